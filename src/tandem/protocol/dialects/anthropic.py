"""Anthropic's messages (``POST /v1/messages``): parses a body into a turn, and formats a reply as one message or as events.

A message is a list of blocks: text, thinking, tool calls (``tool_use``), and tool results in the user's turn.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from tandem.api.media import PARTS
from tandem.api.requests import StopReason
from tandem.protocol.bodies import Refusal
from tandem.protocol.dialects.openai_chat import (
    named_results,
    read_content,
    read_function,
    read_limit,
    read_stops,
    read_text,
)
from tandem.protocol.dialects.wire import Fields, History, as_list, as_object, as_text, pick, read_format, refused, wrong
from tandem.protocol.turns import Reply, Turn

FIELDS = Fields(
    read=("model", "messages", "system", "tools", "tool_choice", "stop_sequences", "stream", "max_tokens", "output_config"),
    sampling=("temperature", "top_p", "top_k"),
    harmless=("betas", "cache_control", "inference_geo", "metadata", "service_tier", "speed", "thinking", "user_profile_id"),
    refused={
        "output_format": "use output_config.format",
        "mcp_servers": "tools are called by the agent",
        "container": "tools are called by the agent",
        "fallbacks": "only the policy answers",
        "context_management": "the history is used as sent; let the agent shorten it",
    },
)
_ROLES = {role: role for role in ("user", "assistant", "system")}
_CHOICES: Mapping[Any, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "tool": "required",  # recorded turns request the call in the prompt, but do not force it
}


def read(body: Mapping[str, Any], media: bool = False) -> Turn:
    """Parses a body into a turn. ``media``: see `chat.read_turn`.

    Raises:
        Refusal: 400, the body is malformed, or sets an unsupported field that would change the reply.
    """
    if body.get("thread"):  # holds only a part of the history; on this code the SDK sends all of it
        raise Refusal(400, "thread is not served here: send all messages", code="thread_unsupported_request", param="thread")
    overridden, ignored = FIELDS.sort(body)
    history, choice = History(), as_object(body.get("tool_choice") or {}, "tool_choice")
    output = as_object(body.get("output_config") or {}, "output_config")
    for name, value in output.items():
        if name not in ("effort", "format") and value is not None:
            raise refused(f"output_config.{name}", "only effort (which is ignored) and format are supported")
    system = read_text(body.get("system"), "system")
    if system:
        history.say("system", system)
    for number, message in enumerate(as_list(body.get("messages"), "messages")):
        _read_message(as_object(message, f"messages[{number}]"), history, f"messages[{number}]", media)
    return Turn(
        messages=tuple(named_results(history.messages("messages"))),
        tools=tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(as_list(body.get("tools"), "tools"))),
        tool_choice=pick(choice.get("type", "auto"), _CHOICES, "tool_choice.type"),
        chosen_tool=as_text(choice.get("name") or "", "tool_choice.name"),
        answer_format=read_format(output.get("format"), "output_config.format"),
        stops=read_stops(body.get("stop_sequences")),
        max_tokens=read_limit(body.get("max_tokens"), "max_tokens"),
        stream=bool(body.get("stream")),
        overridden=overridden,
        ignored=ignored,
    )


def _read_message(message: Mapping[str, Any], history: History, where: str, media: bool) -> None:
    role, content = pick(message.get("role"), _ROLES, f"{where}.role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else as_list(content, f"{where}.content")
    if role == "assistant":
        history.assistant()
    parts: list[Any] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if role == "assistant":
            _read_assistant_block(as_object(block, place), history, place)
        elif as_object(block, place).get("type") == "tool_result":
            _add_message(role, parts, history, where, media)
            result = _content(block.get("content"), f"{place}.content", media)
            history.result(as_text(block.get("tool_use_id"), f"{place}.tool_use_id"), result)
        else:
            parts.append(block)
    _add_message(role, parts, history, where, media)


def _add_message(role: str, parts: list[Any], history: History, where: str, media: bool) -> None:
    """Adds the collected text and image blocks to the history as one message."""
    if parts:
        history.say(role, _content(parts, f"{where}.content", media))
        parts.clear()


def _content(blocks: Any, where: str, media: bool) -> str | list[dict[str, Any]]:
    if media and isinstance(blocks, list):
        blocks = [_part(as_object(block, where), where) for block in blocks]
    return read_content(blocks, where, media)


def _part(block: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Converts a block to a message part. This dialect supports images as its only media."""
    kind = str(block.get("type"))
    if kind != "image":
        if kind in PARTS:
            raise wrong(f"{where}.type", "must be text or image", kind)
        return block
    source = as_object(block.get("source"), f"{where}.source")
    key = pick(source.get("type"), {"base64": "data", "url": "url"}, f"{where}.source.type")
    return {"type": "image", "base64" if key == "data" else key: as_text(source.get(key), f"{where}.source.{key}")}


def _read_assistant_block(block: Mapping[str, Any], history: History, where: str) -> None:
    """Adds a block of the assistant's turn to the history."""
    kind = block.get("type")
    if kind == "text":
        history.assistant(as_text(block.get("text"), f"{where}.text"))
    elif kind == "thinking":
        history.assistant(reasoning=as_text(block.get("thinking"), f"{where}.thinking"))
    elif kind == "tool_use":
        name, call_id = as_text(block.get("name"), f"{where}.name"), as_text(block.get("id"), f"{where}.id")
        history.call(call_id, name, as_object(block.get("input"), f"{where}.input"))
    else:
        raise refused(f"{where}.type", f"blocks of the assistant are text, thinking and tool_use; got {kind!r}")


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = as_object(tool, where).get("type") or "custom"
    if kind != "custom":
        raise refused(f"{where}.type", f"only tools with an input_schema can be called; switch the tool {kind!r} off")
    as_text(tool.get("name"), f"{where}.name")
    return read_function({**tool, "parameters": tool.get("input_schema")})


# ------------------------------------------------------------------ answers


def answer(turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]) -> dict[str, Any]:
    """Formats the reply as a complete message."""
    return _frame(response_id, model, usage) | {
        "content": _blocks(reply),
        "stop_reason": _stop_reason(reply),
        "usage": _usage(usage["prompt_tokens"], usage["completion_tokens"]),
    }


def events(turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]) -> Iterator[bytes]:
    """Formats the reply as the events of a stream."""
    yield _event("message_start", message=_frame(response_id, model, usage))
    for index, block in enumerate(_blocks(reply)):
        empty, deltas = _in_pieces(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ending = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
    yield _event("message_delta", delta=ending, usage={"output_tokens": usage["completion_tokens"]})
    yield _event("message_stop")


def refused_body(refusal: Refusal) -> dict[str, Any]:
    """Formats a refusal as a response body."""
    error = refusal.body()["error"]
    details = {"error_code": refusal.code, "unsupported": [refusal.param]} if refusal.code else None
    return {"type": "error", "error": {"type": error["type"], "message": error["message"], "details": details}}


def failed(refusal: Refusal) -> bytes:
    """Formats a refusal as an event in the middle of a stream."""
    return _event("error", error=refused_body(refusal)["error"])


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def _frame(response_id: str, model: str, usage: Mapping[str, int]) -> dict[str, Any]:
    return {
        "id": f"msg_{response_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage["prompt_tokens"], 0),
    }


def _usage(prompt: int, completion: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, "output_tokens": completion, **cached}


def _stop_reason(reply: Reply) -> str:
    if reply.stop_reason == StopReason.LENGTH:
        return "max_tokens"
    return "tool_use" if reply.good_calls else "end_turn"


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.good_calls:
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": dict(call.arguments)})
    return blocks or [{"type": "text", "text": ""}]


def _in_pieces(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns a block without its content, as a stream opens it, and the deltas that add the content."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
