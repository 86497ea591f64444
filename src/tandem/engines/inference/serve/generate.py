"""`/generate`: token in, token out, with a log-probability and a version a token. What `TandemServer` speaks."""

import secrets
from collections.abc import Collection
from typing import Any

from aiohttp import web

from tandem.api.media import MediaKind
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.config.generation import GenerationConfig
from tandem.engines.inference.serve.service import EngineService
from tandem.protocol.refusal import Refusal
from tandem.protocol.schema import Schema, array, integer, optional, record, text

MIN_TEMPERATURE = 1e-4
"""Below this the logits no longer fit what computes with them; `greedy` is the limit."""

SEED_LIMIT = 2**63 - 1

TEMPERATURE = {"type": "number", "minimum": MIN_TEMPERATURE, "maximum": 100}
TOP_P = {"type": "number", "minimum": 1e-6, "maximum": 1}
STOP_STRINGS = array(text(256, 1), 0, 16)
TOKENS = {"type": "array", "items": {"type": "integer"}}
NUMBERS = {"type": "array", "items": {"type": "number"}}

VERSION = record(
    {
        "number": integer(0, SEED_LIMIT),
        "digest": text(128),
        "run": text(256),
        "model": text(256),
    },
    ("number", "digest", "run", "model"),
    "Which weights: number of updates so far, digest of all tensors, run and model that they belong to.",
)

ANSWER = record(
    {
        "output_ids": TOKENS,
        "logprobs": NUMBERS | {"description": "One a token, of softmax(logits / temperature)."},
        "versions": TOKENS | {"description": "Number of the weights that produced the token."},
        "stop_reason": {"enum": ["stop", "length", "cancelled"]},
        "untrained_tokens": {"type": "integer"},
        "run": optional({"type": "string"}),
        "instance": {"type": "string"},
    },
    ("output_ids", "logprobs", "versions", "stop_reason", "untrained_tokens", "run", "instance"),
)


def request_schema(max_tokens: int, vocab_size: int, media: bool = False) -> Schema:
    """The body of `/generate`; sampling has the fields of `GenerationConfig`. ``media``: the model takes some."""
    token = integer(0, vocab_size - 1)
    sampling = {
        "max_new_tokens": integer(1, max_tokens),
        "min_new_tokens": integer(0, max_tokens),
        "temperature": TEMPERATURE,
        "first_token_temperature": optional(TEMPERATURE),
        "train_first_token": {"type": "boolean"},
        "top_p": TOP_P,
        "top_k": integer(0, SEED_LIMIT),
        "greedy": {"type": "boolean"},
        "stop": STOP_STRINGS,
        "stop_token_ids": array(token, 0, 1024),
    }
    key = array(integer(-SEED_LIMIT, SEED_LIMIT), 1, 6)
    fields = {
        "input_ids": array(token, 1, max_tokens),
        "sampling": record(sampling, (), "The fields of `gconfig`; those left out have its defaults."),
        "noise_key": optional(
            key | {"description": "seed, epoch, group, sample, trajectory, attempt: with the position it names every draw."}
        ),
        "deadline_s": optional(
            {"type": "number", "minimum": 0, "maximum": 1e9, "description": "Then it ends as cancelled, with what it has."}
        ),
        "run": optional(text(256, 0, "Refused with status 409 if the server belongs to another run.")),
    }
    if media:
        numbers = array(integer(-SEED_LIMIT - 1, 0), 0, max_tokens)
        fields["media"] = numbers | {"description": "Of each token the number that `/media` gave, 0 for text."}
    return record(fields, ("input_ids",))


def medium_schema(kinds: Collection[MediaKind]) -> Schema:
    """The body of `/media`; ``kinds``: those that the model takes."""
    data = {"type": "string", "description": "base64 of a file"}
    return record({"kind": {"enum": list(kinds)}, "data": data}, ("kind", "data"))


MEDIUM_ANSWER = record({"number": {"type": "integer"}}, ("number",))


async def keep_medium(service: EngineService, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """`/media`: an image or sound for requests to come, which name it by its number."""
    return {"number": await service.tokenizers.keep(body["kind"], body["data"])}


async def generate(service: EngineService, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    run = body.get("run")
    if run is not None and run != service.run:
        owner = "no run" if service.run is None else f"run {service.run!r}"
        raise Refusal(409, f"this server belongs to {owner}, the request to run {run!r}", code="other_run", param="run")
    if run is not None:
        service.heard()
    sampling = dict(body.get("sampling", {}))
    for name in ("stop", "stop_token_ids"):
        sampling[name] = tuple(sampling.get(name, ()))
    key = body.get("noise_key")
    wanted = LLMRequest(
        tuple(body["input_ids"]),
        GenerationConfig(n_samples=1, **sampling),
        NoiseKey(secrets.randbits(63)) if key is None else NoiseKey(*key),
        deadline_s=body.get("deadline_s"),
        media=tuple(body.get("media", ())),
    )
    (response,) = await service.complete([wanted])
    return {
        "output_ids": response.output_ids,
        "logprobs": response.logprobs,
        "versions": response.versions,
        "stop_reason": response.stop_reason.name.lower(),
        "untrained_tokens": response.untrained_tokens,
        "run": service.run,
        "instance": service.instance,
    }
