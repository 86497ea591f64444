"""Two routes with tokens in and tokens out: `/generate` of `TandemServer`, and vLLM's `/inference/v1/generate`.

`/generate` gives each token with a log-probability and a version. vLLM's route is for training clients that were written for
it (verifiers, prime-rl); a parameter that this engine cannot honour is refused by name, unless its value has no effect.
"""

import itertools
import secrets
import uuid
from collections.abc import Collection
from typing import Any

from aiohttp import web

from tandem.api.media import MediaKind
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.serve.service import EngineService, check_finished
from tandem.protocol.bodies import Refusal, Schema, array, integer, optional, record, text
from tandem.protocol.dialects.openai_chat import usage_of

MIN_TEMPERATURE = 1e-4
"""Lowest temperature. Logits divided by a lower temperature exceed the range of the kernels; `greedy` is the limit at 0."""

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
    "A version of the weights: number of updates so far, digest of all tensors, run and model.",
)

GENERATE_ANSWER = record(
    {
        "output_ids": TOKENS,
        "logprobs": NUMBERS | {"description": "One per token, of softmax(logits / temperature)."},
        "versions": TOKENS | {"description": "Number of the version of the weights that produced each token."},
        "stop_reason": {"enum": ["stop", "length", "cancelled"]},
        "untrained_tokens": {"type": "integer"},
        "run": optional({"type": "string"}),
        "instance": {"type": "string"},
    },
    ("output_ids", "logprobs", "versions", "stop_reason", "untrained_tokens", "run", "instance"),
)


def generate_schema(max_tokens: int, vocab_size: int, media: bool = False) -> Schema:
    """Returns the schema of `/generate`'s body; sampling has the fields of `GenerationConfig`. ``media``: the model takes
    images or sounds."""
    token = integer(0, vocab_size - 1)
    sampling = {
        "max_new_tokens": integer(1, max_tokens),
        "min_new_tokens": integer(0, max_tokens),
        "temperature": TEMPERATURE,
        "first_token_temperature": optional(TEMPERATURE),
        "top_p": TOP_P,
        "top_k": integer(0, SEED_LIMIT),
        "greedy": {"type": "boolean"},
        "stop": STOP_STRINGS,
        "stop_token_ids": array(token, 0, 1024),
    }
    key = array(integer(-SEED_LIMIT, SEED_LIMIT), 1, 6)
    fields = {
        "input_ids": array(token, 1, max_tokens),
        "sampling": record(sampling, (), "The fields of `gconfig`; a field that is left out has its default."),
        "noise_key": optional(
            key
            | {"description": "seed, epoch, group, sample, trajectory, attempt: they and the position determine each draw."}
        ),
        "deadline_s": optional(
            {
                "type": "number",
                "minimum": 0,
                "maximum": 1e9,
                "description": "Then the request ends as cancelled, with its tokens so far.",
            }
        ),
        "run": optional(text(256, 0, "Refused with status 409 if the server belongs to another run.")),
    }
    if media:
        numbers = array(integer(-SEED_LIMIT - 1, 0), 0, max_tokens)
        fields["media"] = numbers | {"description": "For each token its medium's number from `/media`, 0 for text."}
    return record(fields, ("input_ids",))


def medium_schema(kinds: Collection[MediaKind]) -> Schema:
    """Returns the schema of `/media`'s body. ``kinds``: kinds of media that the model takes."""
    data = {"type": "string", "description": "base64 of a file"}
    return record({"kind": {"enum": list(kinds)}, "data": data}, ("kind", "data"))


MEDIUM_ANSWER = record({"number": {"type": "integer"}}, ("number",))


async def keep_medium(service: EngineService, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Answers `/media`: keeps an image or sound for later requests, which name it by its number."""
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
    llm_request = LLMRequest(
        tuple(body["input_ids"]),
        GenerationConfig(n_samples=1, **sampling),
        NoiseKey(secrets.randbits(63)) if key is None else NoiseKey(*key),
        deadline_s=body.get("deadline_s"),
        media=tuple(body.get("media", ())),
    )
    (response,) = await service.complete([llm_request])
    return {
        "output_ids": response.output_ids,
        "logprobs": response.logprobs,
        "versions": response.versions,
        "stop_reason": response.stop_reason.name.lower(),
        "untrained_tokens": response.untrained_tokens,
        "run": service.run,
        "instance": service.instance,
    }


SESSION_HEADER = "X-Session-ID"
"""Header whose value becomes the request's affinity: requests of one session belong together."""

WITHOUT_EFFECT = {
    "n": [1, None],
    "min_p": [0, None],
    "presence_penalty": [0, None],
    "frequency_penalty": [0, None],
    "repetition_penalty": [1, None],
    "logit_bias": [{}, None],
    "allowed_token_ids": [None],
    "bad_words": [[], None],
    "structured_outputs": [None],
    "prompt_logprobs": [None],
    "ignore_eos": [False, None],
    "logprobs": [0, 1, None],
}
"""vLLM's sampling parameters that this engine does not have → their values without effect; other values are refused."""

_ANY: Schema = {}
_HARMLESS: tuple[str, ...] = (
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "include_stop_str_in_output",
)
_HARMLESS += ("routed_experts_prompt_start", "skip_reading_prefix_cache")
"""Parameters that are ignored: they concern text, or parts that this engine's answers do not have."""

_ENTRY = record(
    {
        "token": {"type": "string", "description": "token_id:<id>"},
        "logprob": {"type": "number"},
        "top_logprobs": {"type": "array"},
    },
    ("token", "logprob"),
)
_SPAN = record({"version": {"type": "string"}, "start": {"type": "integer"}, "end": {"type": "integer"}})
_CHOICE = record(
    {
        "index": {"type": "integer"},
        "token_ids": TOKENS,
        "finish_reason": {"enum": ["stop", "length"]},
        "logprobs": record({"content": {"type": "array", "items": _ENTRY}}),
        "weight_versions": {"type": "array", "items": _SPAN},
    },
    ("index", "token_ids", "finish_reason", "logprobs", "weight_versions"),
)
_COUNT = {"type": "integer"}
TOKEN_ROUTE_ANSWER = record(
    {
        "request_id": {"type": "string"},
        "choices": {"type": "array", "items": _CHOICE},
        "usage": record({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT}),
    },
    ("request_id", "choices", "usage"),
)


def token_route_schema(name: str, vocab_size: int, max_tokens: int) -> Schema:
    """Returns the schema of the body of vLLM's route, with its sampling parameters."""
    token = integer(0, vocab_size - 1)
    stops = {"anyOf": [text(256, 1), STOP_STRINGS, {"type": "null"}]}
    sampling = {
        "max_tokens": optional(integer(1, max_tokens)),
        "min_tokens": optional(integer(0, max_tokens)),
        "temperature": {
            "anyOf": [TEMPERATURE, {"enum": [0]}, {"type": "null"}],
            "description": "0 takes the most probable token.",
        },
        "top_p": optional(TOP_P),
        "top_k": optional(integer(-1, SEED_LIMIT, "-1 and 0 are off.")),
        "seed": optional(integer(-SEED_LIMIT, SEED_LIMIT)),
        "stop": stops,
        "stop_token_ids": optional(array(token, 0, 1024)),
        **{key: {"enum": values} for key, values in WITHOUT_EFFECT.items()},
        **dict.fromkeys(_HARMLESS, _ANY),
    }
    fields = {
        "token_ids": array(token, 1, max_tokens),
        "sampling_params": optional(record(sampling)),
        "model": {"enum": [name, None]},
        "request_id": optional(text(256)),
        "cache_salt": optional(text(256, 0, "Ignored: prompts are never shared between two versions of the weights.")),
        "priority": optional(integer(-SEED_LIMIT, SEED_LIMIT, "Ignored: requests are served in order of arrival.")),
        "stream": {"enum": [False, None]},
    }
    return record(fields, ("token_ids",))


async def token_route(service: EngineService, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Answers vLLM's route with one completion of a prompt that is given as tokens."""
    sampling = {name: value for name, value in (body.get("sampling_params") or {}).items() if value is not None}
    limits, stop, temperature = service.limits, sampling.get("stop", ()), sampling.get("temperature", 1.0)
    gconfig = GenerationConfig(
        n_samples=1,
        max_new_tokens=sampling.get("max_tokens", min(limits.default_chat_tokens, limits.max_tokens)),
        min_new_tokens=sampling.get("min_tokens", 0),
        temperature=temperature or 1.0,
        greedy=temperature == 0,
        top_p=sampling.get("top_p", 1.0),
        top_k=max(0, sampling.get("top_k", 0)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(sampling.get("stop_token_ids", ())),
    )
    noise = NoiseKey(sampling.get("seed", secrets.randbits(63)))
    llm_request = LLMRequest(tuple(body["token_ids"]), gconfig, noise, affinity=request.headers.get(SESSION_HEADER))
    responses = await service.complete([llm_request])
    check_finished(responses)
    (response,) = responses
    return {
        "request_id": body.get("request_id") or uuid.uuid4().hex,
        "choices": [_choice(response)],
        "usage": usage_of(len(response.input_ids), len(response.output_ids)),
    }


def _choice(response: LLMResponse) -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for version, group in itertools.groupby(response.versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": str(version), "start": start, "end": start + len(list(group))})
    entries = [
        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(response.output_ids, response.logprobs, strict=True)
    ]
    return {
        "index": 0,
        "token_ids": response.output_ids,
        "finish_reason": "length" if response.truncated else "stop",
        "logprobs": {"content": entries},
        "weight_versions": spans,
    }
