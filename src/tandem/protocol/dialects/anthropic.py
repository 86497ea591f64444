"""Anthropic's messages (``POST /v1/messages``) as turns, and replies as messages, whole or as a stream of events.

A message is a list of blocks: text, thinking, calls of tools (``tool_use``), and in the user's turn their results.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tandem.api.requests import StopReason
from tandem.protocol.dialects.wire import (
    Fields,
    History,
    as_list,
    as_object,
    as_text,
    call_of,
    refused,
    text_of,
    tool_of,
    wrong,
)
from tandem.protocol.turns import Reply, Turn

FIELDS = Fields(
    read={"model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"},
    sampling={"max_tokens", "temperature", "top_p", "top_k"},
    harmless={"metadata", "service_tier", "thinking", "cache_control", "inference_geo"},
)
REMEDIES = {
    "output_config": "the engine does not constrain what it writes",
    "output_format": "the engine does not constrain what it writes",
    "mcp_servers": "tools are called by the agent, not here",
    "container": "tools are called by the agent, not here",
    "context_management": "the history is taken as it is sent; let the agent shorten it",
}


def read(body: Mapping[str, Any]) -> Turn:
    """The turn that a request asks for.

    Raises:
        Refusal: 400, the body has not this shape, or asks for what would mean something else here.
    """
    overridden, ignored = FIELDS.sort(body, REMEDIES)
    history = History()
    system = text_of(body.get("system"), "system", {"text"})
    if system:
        history.say("system", system)
    for number, message in enumerate(as_list(body.get("messages"), "messages")):
        _read_message(as_object(message, f"messages[{number}]"), history, f"messages[{number}]")
    return Turn(
        history.messages("messages"),
        tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(as_list(body.get("tools"), "tools"))),
        tool_choice=_tool_choice(body.get("tool_choice")),
        stops=tuple(as_text(stop, "stop_sequences") for stop in as_list(body.get("stop_sequences"), "stop_sequences")),
        max_tokens=body.get("max_tokens"),
        stream=bool(body.get("stream")),
        overridden=overridden,
        ignored=ignored,
    )


def _read_message(message: Mapping[str, Any], history: History, where: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}.role", "must be user, assistant or system", role)
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else as_list(content, f"{where}.content")
    if role == "assistant":
        history.assistant()
    words: list[str] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if role == "assistant":
            _read_own(as_object(block, place), history, place)
        elif as_object(block, place).get("type") == "tool_result":
            _say(words, role, history)
            result = text_of(block.get("content"), f"{place}.content", {"text"})
            history.result(as_text(block.get("tool_use_id"), f"{place}.tool_use_id"), result, f"{place}.tool_use_id")
        else:
            words.append(text_of([block], f"{where}.content", {"text"}))
    _say(words, role, history)


def _say(words: list[str], role: str, history: History) -> None:
    if words:
        history.say(role, "".join(words))
        words.clear()


def _read_own(block: Mapping[str, Any], history: History, where: str) -> None:
    """A block of the assistant's own turn."""
    kind = block.get("type")
    if kind == "text":
        history.assistant(as_text(block.get("text"), f"{where}.text"))
    elif kind == "thinking":
        history.assistant(reasoning=as_text(block.get("thinking"), f"{where}.thinking"))
    elif kind == "tool_use":
        name, call_id = as_text(block.get("name"), f"{where}.name"), as_text(block.get("id"), f"{where}.id")
        history.assistant(call=call_of(call_id, name, as_object(block.get("input"), f"{where}.input")))
    else:
        raise refused(f"{where}.type", f"blocks of the assistant are text, thinking and tool_use, got {kind!r}")


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = as_object(tool, where).get("type") or "custom"
    if kind != "custom":
        raise refused(
            f"{where}.type", f"only tools with an input_schema can be called, got {kind!r}; switch it off in the agent"
        )
    return tool_of(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)


def _tool_choice(choice: Any) -> Any:
    names = {"auto": "auto", "any": "required", "none": "none"}
    kind = "auto" if choice is None else as_object(choice, "tool_choice").get("type")
    if kind not in names:
        raise refused("tool_choice", f"the model chooses the tool; auto, any and none are known, got {kind!r}")
    return names[kind]


# ------------------------------------------------------------------ what is answered


def answer(turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]) -> dict[str, Any]:
    """The finished message."""
    return _frame(response_id, model, usage) | {
        "content": _blocks(reply),
        "stop_reason": _stop_reason(reply),
        "usage": _usage(usage["prompt_tokens"], usage["completion_tokens"]),
    }


def events(turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]) -> Iterator[bytes]:
    """The finished message as the events of a stream."""
    yield _event("message_start", message=_frame(response_id, model, usage))
    for index, block in enumerate(_blocks(reply)):
        empty, deltas = _in_pieces(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    said = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
    yield _event("message_delta", delta=said, usage={"output_tokens": usage["completion_tokens"]})
    yield _event("message_stop")


def _event(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


def _frame(response_id: str, model: str, usage: Mapping[str, int]) -> dict[str, Any]:
    return {
        "id": response_id,
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
    if reply.stop_reason != StopReason.STOP:
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
    """A block as it is opened, and what is then added to it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
