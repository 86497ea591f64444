"""Reads OpenAI's requests: checks them, and makes the completions that they ask for.

A parameter that this engine cannot honour is refused by name, unless its value has no effect. Also makes the grammars that a
turn must fit: that of its answer's JSON schema, or of a tool call that it must make.
"""

import asyncio
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.api.failures import DataFailure
from tandem.api.media import MediaKind
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.serve.text import Tokenizers
from tandem.engines.inference.serve.token_routes import SEED_LIMIT, STOP_STRINGS, TOP_P
from tandem.engines.inference.watched import WHITE_SPACE, check_grammar, json_grammar
from tandem.protocol.access import ServiceLimits
from tandem.protocol.bodies import Refusal, Schema, array, integer, optional, record, text
from tandem.protocol.dialects.openai_chat import read_stops, read_turn
from tandem.protocol.dialects.wire import as_object
from tandem.protocol.tool_families import Family
from tandem.protocol.turns import Turn


async def grammar_of(turn: Turn, family: Family) -> str:
    """Returns the grammar that a turn must fit, with tool calls in the format of ``family``; empty: any text may be written.

    Raises:
        Refusal: 400 for a schema that cannot be enforced, or a call that cannot be forced; the message names the part.
    """
    form, where = turn.answer_format, "tool_choice"
    if form is not None and turn.tools:
        message = "an answer that must be JSON cannot call tools: leave one out, or set tool_choice to none"
        raise Refusal(400, message, param=form.where)
    try:
        if form is not None:
            where = form.where
            return await asyncio.to_thread(json_grammar, form.schema)
        if turn.tool_choice == "required":
            grammar = _call_grammar(turn, family)
            await asyncio.to_thread(check_grammar, grammar)
            return grammar
    except DataFailure as failure:
        raise Refusal(400, f"{where}: {failure}", code=failure.reason, param=where) from failure
    return ""


def _call_grammar(turn: Turn, family: Family) -> str:
    """Returns the grammar of a call of one of the turn's tools, or of the chosen tool, in Lark notation."""
    tools = [tool["function"] for tool in turn.tools if turn.chosen_tool in ("", tool["function"]["name"])]
    if not tools:
        message = f"tool_choice wants a call of {turn.chosen_tool or 'some tool'}, which is not among the tools"
        raise Refusal(400, message, param="tool_choice")
    if family.forced is None:
        message = f"tool_choice must be auto or none: calls in the format of this model ({family.name}) cannot be forced"
        raise Refusal(400, message, param="tool_choice")
    before, field, behind = family.forced
    calls = " | ".join(f"call_{number}" for number in range(len(tools)))
    return "\n".join([f"start: {_text(before)} ({calls}) {_text(behind)}", *_rules(tools, field)])


def _rules(tools: Sequence[Mapping[str, Any]], field: str) -> list[str]:
    """Returns the Lark rules of the tools' calls. Each schema has a rule of its own, so that its references stay valid."""
    rules = []
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "{field}": '
        schema = {**as_object(tool["parameters"], "tools.parameters"), "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        rules.append(f"call_{number}: {_text(head)} arguments_{number} {_text('}')}")
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return rules


def _text(words: str) -> str:
    return json.dumps(words, ensure_ascii=False)


WITHOUT_EFFECT: Mapping[str, list[Any]] = {
    "frequency_penalty": [0, None],
    "presence_penalty": [0, None],
    "logit_bias": [{}, None],
}
"""OpenAI parameters that this engine does not have → their values without effect; other values are refused."""

CHAT_WITHOUT_EFFECT = {
    "parallel_tool_calls": [True, None],
}
LEGACY_WITHOUT_EFFECT = {"best_of": [1, None], "suffix": ["", None]}

MAX_TOP = 20
"""Most tokens per position whose log-probabilities are returned."""

DEFAULT_LEGACY_TOKENS = 16
"""Tokens of a `/v1/completions` answer without `max_tokens`, as OpenAI's."""

_TEMPERATURE = {
    "anyOf": [{"type": "number", "minimum": 0.01, "maximum": 2}, {"enum": [0]}, {"type": "null"}],
    "description": "0 takes the most probable token.",
}


NO_TURN = Turn(())


@dataclass(frozen=True)
class CompletionQuestion:
    """The completions that one request asks for."""

    prompts: tuple[tuple[int, ...], ...]
    gconfig: GenerationConfig
    seed: int
    stream: bool
    usage_in_stream: bool
    logprobs: bool = False
    top_logprobs: int = 0
    echo: tuple[str, ...] = ()
    """The text of each prompt if the answers repeat it; else empty."""

    grammar: str = ""
    turn: Turn = NO_TURN
    """The chat that a chat completion continues."""

    media: tuple[int, ...] = ()
    """Media number of each token of the prompt; a question with media has only one prompt."""

    prompt_text: str = ""
    """The whole prompt, as the model reads it."""

    def requests(self) -> list[LLMRequest]:
        """Returns one request per completion: those of the first prompt, then those of the second, and so on. The seed
        determines the noise of all."""
        return [
            LLMRequest(
                prompt,
                self.gconfig,
                NoiseKey(self.seed, group=group, sample=sample),
                media=self.media,
                grammar=self.grammar,
                top_logprobs=self.top_logprobs,
                scores_prompt=bool(self.echo),
            )
            for group, prompt in enumerate(self.prompts)
            for sample in range(self.gconfig.n_samples)
        ]


def _common(name: str, vocab_size: int, limits: ServiceLimits) -> dict[str, Schema]:
    tokens = optional(integer(1, limits.max_tokens))
    return {
        "model": {"enum": [name]},
        "max_tokens": tokens,
        "n": optional(integer(1, limits.max_completions)),
        "temperature": _TEMPERATURE,
        "top_p": optional(TOP_P),
        "seed": optional(integer(-SEED_LIMIT, SEED_LIMIT, "The same seed gives the same answers.")),
        "stop": {"anyOf": [text(256, 1), STOP_STRINGS, {"type": "null"}]},
        "stream": optional({"type": "boolean"}),
        "stream_options": optional(record({"include_usage": optional({"type": "boolean"})})),
        "top_k": optional(integer(0, SEED_LIMIT, "Not OpenAI's: only the k most probable tokens; 0 is off.")),
        "min_tokens": optional(integer(0, limits.max_tokens, "Not OpenAI's: no stop token before this many tokens.")),
        "stop_token_ids": optional(array(integer(0, vocab_size - 1), 0, 1024)),
        "user": optional(text(512, 0, "Ignored, and stored nowhere.")),
        **{key: {"enum": values} for key, values in WITHOUT_EFFECT.items()},
    }


def completion_schema(name: str, vocab_size: int, limits: ServiceLimits) -> Schema:
    token = integer(0, vocab_size - 1)
    prompt = text(limits.max_body_bytes, 1)
    ids = array(token, 1, limits.max_tokens)
    several = [array(kind, 1, limits.max_completions) for kind in (prompt, ids)]
    fields = _common(name, vocab_size, limits) | {
        "prompt": {"anyOf": [prompt, ids, *several]},
        "max_tokens": optional(integer(0, limits.max_tokens, "0 needs echo.")),
        "logprobs": optional(integer(0, MAX_TOP, "Also for this many of the most probable tokens at each position.")),
        "echo": optional(
            {"type": "boolean", "description": "The answer begins with the prompt; with logprobs also for its tokens."}
        ),
        **{key: {"enum": values} for key, values in LEGACY_WITHOUT_EFFECT.items()},
    }
    return record(fields, ("model", "prompt"))


def _parts(media: Collection[MediaKind], limits: ServiceLimits) -> Schema:
    """Returns the schema of one part of a message's content."""

    def part(name: str, value: Schema) -> Schema:
        return record({"type": {"enum": [name]}, name: value}, ("type", name))

    data = text(limits.max_media_body_bytes, 1)
    image = record({"url": data, "detail": {"enum": ["auto", None]}}, ("url",))
    sound = record({"data": data, "format": optional(text(16))}, ("data",))
    parts = [part("text", text(limits.max_body_bytes))]
    parts += [part("image_url", image)] if "image" in media else []
    parts += [part("input_audio", sound)] if "audio" in media else []
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _formats() -> list[Schema]:
    """Returns the schemas of `response_format`."""
    schema = {"type": "object", "description": "A JSON schema that the answer fits."}
    inner = {"name": optional(text(256)), "description": optional(text(8192)), "schema": schema}
    inner["strict"] = optional({"type": "boolean"})
    named = record({"type": {"enum": ["json_schema"]}, "json_schema": record(inner, ("schema",))}, ("type", "json_schema"))
    return [named, record({"type": {"enum": ["text", "json_object"]}}, ("type",))]


def turn_schema(name: str) -> Schema:
    """Returns the schema of the fields that dialects share; each dialect checks its other fields itself."""
    fields = {
        "model": {"enum": [name]},
        "temperature": _TEMPERATURE,
        "top_p": optional(TOP_P),
        "top_k": optional(integer(0, SEED_LIMIT)),
        "stream": optional({"type": "boolean"}),
        "user": optional(text(512)),
        "top_logprobs": {"enum": [0, None]},
        "parallel_tool_calls": {"enum": [True, None]},
        "include": optional(array({"enum": ["reasoning.encrypted_content"]}, 0, 8)),
    }
    return {"type": "object", "properties": fields, "required": ["model"], "additionalProperties": True}


def chat_schema(name: str, vocab_size: int, limits: ServiceLimits, media: Collection[MediaKind] = ()) -> Schema:
    """Returns the schema of a chat completion's body. ``media``: the kinds of media that the model takes."""
    called = record({"name": text(256, 1), "arguments": text(limits.max_body_bytes)}, ("name", "arguments"))
    call = record({"id": text(256), "type": {"enum": ["function"]}, "function": called}, ("type", "function"))
    message: dict[str, Schema] = {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [text(limits.max_body_bytes), array(_parts(media, limits), 0, 256), {"type": "null"}]},
        "name": optional(text(256)),
        "tool_calls": optional(array(call, 0, 128)),
        "tool_call_id": optional(text(256)),
        "reasoning_content": optional(text(limits.max_body_bytes)),
        **{
            key: {"type": "null"} for key in ("refusal", "audio", "function_call")
        },  # fields of an answer that a client sends back
        "annotations": optional(array({"type": "object"}, 0, 0)),
    }
    function = {
        "type": "object",
        "properties": {"name": text(256, 1)},
        "required": ["name"],
        "additionalProperties": True,
    }
    tool = record({"type": {"enum": ["function"]}, "function": function}, ("type", "function"))
    chosen = record({"type": {"enum": ["function"]}, "function": record({"name": text(256, 1)}, ("name",))}, ("function",))
    fields = _common(name, vocab_size, limits) | {
        "messages": array(record(message, ("role",)), 1, 4096),
        "max_completion_tokens": optional(integer(1, limits.max_tokens)),
        "logprobs": optional({"type": "boolean"}),
        "top_logprobs": optional(integer(0, MAX_TOP, "This many of the most probable tokens; needs logprobs.")),
        "response_format": {"anyOf": [*_formats(), {"type": "null"}]},
        "chat_template_kwargs": optional({"type": "object", "description": "Not OpenAI's: options of the chat template."}),
        "tools": optional(array(tool, 0, 128) | {"description": "The model may call these; calls come back as tool_calls."}),
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required", None]}, chosen]},
        **{key: {"enum": values} for key, values in CHAT_WITHOUT_EFFECT.items()},
    }
    return record(fields, ("model", "messages"))


async def legacy_question(body: Mapping[str, Any], tokenizers: Tokenizers, limits: ServiceLimits) -> CompletionQuestion:
    prompt, echo, top = body["prompt"], bool(body.get("echo")), body.get("logprobs")
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    most = DEFAULT_LEGACY_TOKENS if body.get("max_tokens") is None else body["max_tokens"]
    if not most and not echo:
        raise Refusal(
            400, "max_tokens=0 generates nothing; for the log-probabilities of a prompt, add echo", param="max_tokens"
        )
    if echo and body.get("stream"):
        raise Refusal(400, "echo needs stream=false", param="echo")
    room = limits.max_tokens + (not most)  # without new tokens, the prompt may fill the context
    ids = tuple([await tokenizers.encode(p, room) if isinstance(p, str) else tuple(p) for p in prompts])
    if not all(ids):
        raise Refusal(400, "prompt has no tokens; give it some text", param="prompt")
    question = _question(body, ids, most, read_stops(body.get("stop")), limits)
    texts = tuple(p if isinstance(p, str) else tokenizers.text(p) for p in prompts) if echo else ()
    return replace(question, logprobs=top is not None, top_logprobs=top or 0, echo=texts)


async def chat_question(body: Mapping[str, Any], tokenizers: Tokenizers, limits: ServiceLimits) -> CompletionQuestion:
    turn = read_turn(body, media=bool(tokenizers.media))
    maxima = {body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None}
    if len(maxima) > 1:
        raise Refusal(400, "max_tokens and max_completion_tokens mean the same; leave one out", param="max_tokens")
    logprobs, top = bool(body.get("logprobs")), body.get("top_logprobs") or 0
    if top and not logprobs:
        raise Refusal(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    question = await turn_question(turn, body, tokenizers, limits)
    return replace(question, logprobs=logprobs, top_logprobs=top)


async def turn_question(
    turn: Turn, body: Mapping[str, Any], tokenizers: Tokenizers, limits: ServiceLimits
) -> CompletionQuestion:
    """Makes the completions of a turn. ``body``: the request's body, for sampling settings and the template's options."""
    if not tokenizers.has_chat_template:
        raise Refusal(400, "this model has no chat template; use /v1/completions", param="messages")
    if turn.tool_choice == "none":
        turn = replace(turn, tools=())
    grammar = await grammar_of(turn, tokenizers.reader.family)
    tokens, text = await tokenizers.encode_chat(turn, limits.max_tokens, body.get("chat_template_kwargs"))
    most = min(turn.max_tokens or limits.default_chat_tokens, limits.max_tokens)
    question = _question(body, (tuple(tokens.ids),), most, turn.stops, limits)
    return replace(question, turn=turn, grammar=grammar, media=tuple(tokens.media), prompt_text=text)


def _question(
    body: Mapping[str, Any],
    prompts: tuple[tuple[int, ...], ...],
    max_tokens: int,
    stops: tuple[str, ...],
    limits: ServiceLimits,
) -> CompletionQuestion:
    n, temperature, seed = body.get("n") or 1, body.get("temperature"), body.get("seed")
    if n * len(prompts) > limits.max_completions:
        message = f"n times prompts must be at most {limits.max_completions}, got {n} times {len(prompts)}"
        raise Refusal(400, message, param="n")
    if body.get("stream_options") is not None and not body.get("stream"):
        raise Refusal(400, "stream_options needs stream=true", param="stream_options")
    gconfig = GenerationConfig(
        n_samples=n,
        max_new_tokens=max_tokens,
        min_new_tokens=body.get("min_tokens") or 0,
        temperature=temperature or 1.0,
        greedy=temperature == 0,
        top_p=1.0 if body.get("top_p") is None else body["top_p"],
        top_k=body.get("top_k") or 0,
        stop=stops,
        stop_token_ids=tuple(body.get("stop_token_ids") or ()),
    )
    return CompletionQuestion(
        prompts,
        gconfig,
        secrets.randbits(63) if seed is None else seed,
        bool(body.get("stream")),
        bool((body.get("stream_options") or {}).get("include_usage")),
    )
