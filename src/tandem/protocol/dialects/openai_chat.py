"""OpenAI's chat completions: parses a body into a turn, and formats a reply as one answer or as a stream."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from tandem.api.media import PARTS
from tandem.api.requests import StopReason
from tandem.protocol.bodies import MAX_DEPTH, Refusal, load
from tandem.protocol.dialects.wire import Fields, as_list, as_object, as_text, check_last, pick, read_format, refused, wrong
from tandem.protocol.turns import Reply, Turn

SAMPLING: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs")
SAMPLING += ("frequency_penalty", "presence_penalty", "repetition_penalty")
"""Sampling fields. The trainer sets these itself, so a client's values have no effect."""

MEANT = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
}
"""Unsupported fields that would change a reply, each with those of its values that have no effect. Any other value is
refused."""

FIELDS = Fields(
    read=(
        *("model", "messages", "tools", "tool_choice", "stop", "stream", "max_tokens", "max_completion_tokens"),
        *("response_format", *MEANT),
    ),
    sampling=SAMPLING,
    harmless=(
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
        "verbosity",
    ),
    refused={},
)

OPENING = {"role": "assistant", "content": ""}
"""The first delta of a streamed reply, sent before any text."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

MAX_STOPS = 16

MAX_ARGUMENTS = 1 << 18
"""Maximum length of a call's arguments, in characters. The arguments are parsed in this process, so a long text would block
it."""


def read(body: Mapping[str, Any], media: bool = False) -> Turn:
    """Parses a body into a turn. ``media``: see `read_turn`.

    Raises:
        Refusal: 400, the body is malformed, or sets an unsupported field that would change the reply.
    """
    for name, harmless in MEANT.items():
        if name in body and body[name] not in harmless:
            raise refused(name, f"it would change what a reply means; got {body[name]!r:.80}")
    overridden, ignored = FIELDS.sort(body)
    return replace(read_turn(body, media), overridden=overridden, ignored=ignored)


def read_turn(body: Mapping[str, Any], media: bool = False) -> Turn:
    """Parses the fields that define a turn and ignores all others. ``media``: images and sounds stay parts of the messages,
    for `tandem.media.parts.read_media`; without it they are refused. Raises as `read`."""
    numbered = enumerate(as_list(body.get("messages"), "messages"))
    messages = [_message(message, f"messages[{i}]", media) for i, message in numbered]
    check_last(messages, "messages")
    tools, (choice, chosen) = read_tools(body.get("tools")), _choice(body.get("tool_choice"))
    limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    return Turn(
        messages=tuple(named_results(messages)),
        tools=tools,
        tool_choice=choice,
        chosen_tool=chosen,
        answer_format=read_format(body.get("response_format"), "response_format", "json_schema"),
        stops=read_stops(body.get("stop")),
        max_tokens=read_limit(next(iter(limits), None), "max_tokens"),
        stream=bool(body.get("stream")),
    )


def answer(turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]) -> dict[str, Any]:
    """Formats the reply as one answer. ``usage``: the counts ``prompt_tokens`` and ``completion_tokens``."""
    return _frame("chat.completion", response_id, model) | {"choices": [choice(reply)], "usage": usage_of(**usage)}


def choice(reply: Reply, index: int = 0, logprobs: Any = None) -> dict[str, Any]:
    """Formats one reply as an entry of ``choices``."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    calls = _calls(reply)
    if calls:
        message |= {"content": reply.content or None, "tool_calls": calls}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason(reply)}


def events(turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]) -> Iterator[bytes]:
    """Formats the answer as a stream of events; ``usage`` is in the last one."""
    frame = _frame("chat.completion.chunk", response_id, model)

    for delta in (OPENING, *deltas(reply)):
        yield event(frame | {"choices": [piece(delta)]})
    yield event(frame | {"choices": [piece({}, reason=finish_reason(reply))], "usage": usage_of(**usage)})
    yield b"data: [DONE]\n\n"


def deltas(reply: Reply) -> Iterator[dict[str, Any]]:
    """Yields the text, thinking and calls of a reply, or of a part of a reply, as the deltas of a stream."""
    if reply.reasoning:
        yield {"reasoning_content": reply.reasoning}
    if reply.content:
        yield {"content": reply.content}
    for index, call in enumerate(_calls(reply)):
        yield {"tool_calls": [{"index": index, **call}]}


def piece(delta: Mapping[str, Any], index: int = 0, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    """Formats one delta as an entry of ``choices`` in a streamed reply."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def pieces(reply: Reply, index: int, logprobs: Any, *, last: bool) -> Iterator[dict[str, Any]]:
    """Yields the next parts of a streamed reply. The last part gives the finish reason; after calls that is a separate
    part."""
    made = [*deltas(reply), *([{}] if reply.calls else [])]
    made = made or ([{}] if last or logprobs else [])
    for number, delta in enumerate(made, 1):
        ends = last and number == len(made)
        yield piece(delta, index, logprobs if number == 1 else None, finish_reason(reply) if ends else None)


def failed(refusal: Refusal) -> bytes:
    """Formats a refusal as an event in the middle of a stream."""
    return event(refusal.body())


def event(value: Any) -> bytes:
    """Formats one server-sent event without a name."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


# ------------------------------------------------------------------ helpers shared with other dialects


def read_text(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Returns content as one string: null is empty, parts are joined. ``kinds``: the part types that hold text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(where, "must be text or a list of parts", content)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        elif kind not in kinds or not isinstance(part.get("text"), str):
            raise wrong(where, "must be text, because no other content is supported here", kind)
        else:
            texts.append(part["text"])
    return "".join(texts)


def read_content(content: Any, where: str, media: bool, kinds: tuple[str, ...] = ("text",)) -> str | list[dict[str, Any]]:
    """Returns content as one string, or as a list of parts if ``media`` is true and it has images or sounds. ``kinds``: see
    `read_text`."""
    types = (
        [str(part.get("type")) if isinstance(part, Mapping) else "" for part in content] if isinstance(content, list) else []
    )
    if not (media and any(kind in PARTS for kind in types)):
        return read_text(content, where, kinds)
    return [
        dict(part) if kind in PARTS else {"type": "text", "text": read_text([part], where, kinds)}
        for part, kind in zip(content, types, strict=True)
    ]


def read_arguments(text: Any, where: str) -> dict[str, Any]:
    """Parses the arguments of an earlier call that the client sends back."""
    if isinstance(text, Mapping):
        return dict(text)
    text = text or "{}"
    if isinstance(text, str) and len(text) <= MAX_ARGUMENTS:
        with suppress(ValueError):
            arguments = load(text.encode())
            if isinstance(arguments, dict):
                return arguments
    raise wrong(where, f"must be a JSON object as text, at most {MAX_ARGUMENTS} long and {MAX_DEPTH} deep", text)


def read_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns the tools as functions in the format of chat templates."""
    made = []
    for i, tool in enumerate(as_list(tools, "tools")):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        function = tool.get("function") if kind == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise wrong(f"tools[{i}]", "must be a function with a name", kind)
        made.append(read_function(function))
    return tuple(made)


def read_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one tool in the format of chat templates, with empty defaults for missing fields."""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    inner = {"name": function["name"], "description": function.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": inner}


def read_stops(stop: Any) -> tuple[str, ...]:
    """Returns the stop strings."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops) or len(stops) > MAX_STOPS:
        raise wrong("stop", f"must be one text or at most {MAX_STOPS}, none of them empty", stop)
    return tuple(stops)


def read_limit(value: Any, where: str) -> int | None:
    """Returns a maximum number of tokens; null: none is set."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise wrong(where, "must be a whole number of at least 1", value)
    return int(value)


def named_results(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the messages and adds to each tool result the name of the called tool, because some templates use it."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message:
            yield message | {"name": names.get(message["tool_call_id"], "")}
        else:
            yield message


# ------------------------------------------------------------------ helpers of this dialect


def _message(message: Any, where: str, media: bool) -> dict[str, Any]:
    role = pick(as_object(message, where).get("role"), ROLES, f"{where}.role")
    content = read_content(message.get("content"), f"{where}.content", media)
    made: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        made["tool_call_id"] = str(message.get("tool_call_id") or "")
        if message.get("name"):
            made["name"] = str(message["name"])
    if role != "assistant":
        return made
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        made["reasoning_content"] = reasoning
    calls = as_list(message.get("tool_calls"), f"{where}.tool_calls")
    if message.get("function_call"):
        raise refused(f"{where}.function_call", "send tool_calls")
    if calls:
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return made


def _call(call: Any, where: str) -> dict[str, Any]:
    function = as_object(as_object(call, where).get("function"), f"{where}.function")
    as_text(function.get("name"), f"{where}.function.name")
    arguments = read_arguments(function.get("arguments"), f"{where}.function.arguments")
    inner = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": inner}


def _choice(choice: Any) -> tuple[Literal["auto", "none", "required"], str]:
    """Returns the tool choice and the name of a tool that must be called. Recorded turns request the call in the prompt, but
    do not force it."""
    if choice in (None, "auto", "none", "required"):
        return choice or "auto", ""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = as_object(choice.get("function") or {}, "tool_choice.function")
        return "required", as_text(function.get("name") or "", "tool_choice.function.name")
    raise wrong("tool_choice", "must be auto, none, required or a function", choice)


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in reply.good_calls
    ]


def finish_reason(reply: Reply) -> str:
    """Returns OpenAI's ``finish_reason`` of a reply."""
    if reply.stop_reason == StopReason.LENGTH:
        return "length"
    return "tool_calls" if reply.good_calls else "stop"


def _frame(kind: str, response_id: str, model: str) -> dict[str, Any]:
    return {"id": response_id, "object": kind, "created": int(time.time()), "model": model}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Returns the token counts in OpenAI's format."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
