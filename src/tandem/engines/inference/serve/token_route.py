"""`/inference/v1/generate`: vLLM's token route, for training clients that were written for it (verifiers, prime-rl).

A parameter that this engine cannot honour is refused by its name, unless it has the value that means nothing.
"""

import itertools
import secrets
import uuid
from typing import Any

from aiohttp import web

from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey
from tandem.config.generation import GenerationConfig
from tandem.engines.inference.serve.generate import SEED_LIMIT, STOP_STRINGS, TEMPERATURE, TOKENS, TOP_P
from tandem.engines.inference.serve.service import EngineService, check_finished
from tandem.protocol.dialects.chat import usage_of
from tandem.protocol.schema import Schema, array, integer, optional, record, text

SESSION_HEADER = "X-Session-ID"
"""Requests of one session belong together: it is their affinity."""

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
"""Sampling parameters of vLLM's that ask for nothing with these values, and are refused with others."""

_ANY: Schema = {}
_HARMLESS: tuple[str, ...] = (
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "include_stop_str_in_output",
)
_HARMLESS += ("routed_experts_prompt_start", "skip_reading_prefix_cache")
"""Parameters that are about text, or about what this engine's answers do not have."""

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
ANSWER = record(
    {
        "request_id": {"type": "string"},
        "choices": {"type": "array", "items": _CHOICE},
        "usage": record({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT}),
    },
    ("request_id", "choices", "usage"),
)


def request_schema(name: str, vocab_size: int, max_tokens: int) -> Schema:
    """The body, and the parameters of sampling in it."""
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
        "cache_salt": optional(text(256, 0, "Not needed: no prompt is shared over an update of the weights.")),
        "priority": optional(integer(-SEED_LIMIT, SEED_LIMIT, "Not used: the first that comes is served first.")),
        "stream": {"enum": [False, None]},
    }
    return record(fields, ("token_ids",))


async def token_route(service: EngineService, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """One completion of a prompt that is given as tokens."""
    given = {name: value for name, value in (body.get("sampling_params") or {}).items() if value is not None}
    limits, stop, temperature = service.limits, given.get("stop", ()), given.get("temperature", 1.0)
    gconfig = GenerationConfig(
        n_samples=1,
        max_new_tokens=given.get("max_tokens", min(limits.default_chat_tokens, limits.max_tokens)),
        min_new_tokens=given.get("min_tokens", 0),
        temperature=temperature or 1.0,
        greedy=temperature == 0,
        top_p=given.get("top_p", 1.0),
        top_k=max(0, given.get("top_k", 0)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(given.get("stop_token_ids", ())),
    )
    noise = NoiseKey(given.get("seed", secrets.randbits(63)))
    wanted = LLMRequest(tuple(body["token_ids"]), gconfig, noise, affinity=request.headers.get(SESSION_HEADER))
    responses = await service.complete([wanted])
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
