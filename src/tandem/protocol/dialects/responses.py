"""OpenAI's responses (``POST /v1/responses``): parses a body into a turn, and formats a reply as one response or as events.

A response is a list of items: reasoning, a message, function calls. A client sends them back in ``input`` together with the
results of the calls. Consecutive assistant items are one turn of the model.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from tandem.api.requests import StopReason
from tandem.protocol.bodies import Refusal
from tandem.protocol.dialects.openai_chat import (
    named_results,
    read_arguments,
    read_content,
    read_function,
    read_limit,
    read_text,
)
from tandem.protocol.dialects.wire import Fields, History, as_list, as_object, as_text, pick, read_format, refused
from tandem.protocol.turns import Reply, Turn

FIELDS = Fields(
    read=("model", "input", "instructions", "tools", "tool_choice", "stream", "text", "max_output_tokens"),
    sampling=("temperature", "top_p", "top_logprobs"),
    harmless=(
        "client_metadata",
        "include",
        "max_tool_calls",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "truncation",
        "user",
    ),
    refused={
        "previous_response_id": "answers are not stored under their ids; send the whole history in input (store=false)",
        "conversation": "conversations are not stored; send the whole history in input",
        "prompt": "there are no stored prompts; send instructions and input",
        "background": "the answer is sent to the request that asks for it",
    },
)
_TEXT = ("input_text", "output_text", "text")
_ROLES = {"system": "system", "developer": "system", "user": "user"}
_MARK = "tandem:"
"""Prefix of this server's thinking in the field `encrypted_content`. Clients that store nothing send that field back
unchanged."""


def read(body: Mapping[str, Any], media: bool = False) -> Turn:
    """Parses a body into a turn. ``media``: see `chat.read_turn`.

    Raises:
        Refusal: 400, the body is malformed, or sets an unsupported field that would change the reply.
    """
    overridden, ignored = FIELDS.sort(body)
    history = History()
    if body.get("instructions"):
        history.say("system", as_text(body["instructions"], "instructions"))
    if isinstance(body.get("input"), str):
        history.say("user", body["input"])
    else:
        for number, item in enumerate(as_list(body.get("input"), "input")):
            _read_item(as_object(item, f"input[{number}]"), history, f"input[{number}]", media)
    choice, chosen = _tool_choice(body.get("tool_choice"))
    return Turn(
        messages=tuple(named_results(history.messages("input"))),
        tools=tuple(_tools(body.get("tools"), "tools")),
        tool_choice=choice,
        chosen_tool=chosen,
        answer_format=read_format(as_object(body.get("text") or {}, "text").get("format"), "text.format"),
        max_tokens=read_limit(body.get("max_output_tokens"), "max_output_tokens"),
        stream=bool(body.get("stream")),
        overridden=overridden,
        ignored=ignored,
    )


def _read_item(item: Mapping[str, Any], history: History, where: str, media: bool) -> None:
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") == "assistant":
        history.assistant(read_text(item.get("content"), f"{where}.content", _TEXT))
    elif kind == "message":
        content = read_content(item.get("content"), f"{where}.content", media, _TEXT)
        history.say(pick(item.get("role"), _ROLES, f"{where}.role"), content)
    elif kind == "function_call":
        name = _full_name(item.get("namespace"), as_text(item.get("name"), f"{where}.name"))
        arguments = read_arguments(item.get("arguments"), f"{where}.arguments")
        history.call(as_text(item.get("call_id"), f"{where}.call_id"), name, arguments)
    elif kind == "function_call_output":
        content = read_content(item.get("output"), f"{where}.output", media, _TEXT)
        history.result(as_text(item.get("call_id"), f"{where}.call_id"), content)
    elif kind == "reasoning":
        history.assistant(reasoning=_reasoning(item, where))
    else:
        raise refused(f"{where}.type", f"items are message, function_call, function_call_output, reasoning; got {kind!r}")


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Returns the thinking of an item that this server wrote. Returns an empty text for a summary, or for text that another
    provider encrypted."""
    if item.get("content"):
        return read_text(item["content"], f"{where}.content", ("reasoning_text", "text"))
    sealed = as_text(item.get("encrypted_content") or "", f"{where}.encrypted_content")
    return sealed.removeprefix(_MARK) if sealed.startswith(_MARK) else ""


def _tools(tools: Any, where: str, namespace: str | None = None) -> Iterator[dict[str, Any]]:
    """Yields the functions. A function in a namespace is named ``namespace.name``; no name in the wire format contains a
    dot."""
    for number, tool in enumerate(as_list(tools, where)):
        place = f"{where}[{number}]"
        kind = as_object(tool, place).get("type")
        if kind == "namespace" and namespace is None:
            yield from _tools(tool.get("tools"), f"{place}.tools", as_text(tool.get("name"), f"{place}.name"))
        elif kind == "function":
            yield read_function({**tool, "name": _full_name(namespace, as_text(tool.get("name"), f"{place}.name"))})
        else:
            raise refused(f"{place}.type", f"only functions can be called; switch the tool {kind!r} off in the agent")


def _full_name(namespace: str | None, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


def _tool_choice(choice: Any) -> tuple[Literal["auto", "none", "required"], str]:
    """Returns the tool choice and the name of a tool that must be called. Recorded turns request the call in the prompt, but
    do not force it."""
    if choice in (None, "auto", "none", "required"):
        return choice or "auto", ""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        name = as_text(choice.get("name") or "", "tool_choice.name")
        return "required", _full_name(choice.get("namespace"), name)
    raise refused("tool_choice", f"auto, none, required and a function are known; got {choice!r:.80}")


# ------------------------------------------------------------------ answers


def answer(turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]) -> dict[str, Any]:
    """Formats the reply as a complete response."""
    frame = _frame(turn, response_id, model)
    cut = reply.stop_reason == StopReason.LENGTH
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    return frame | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(reply, response_id, cut),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
    }


def events(turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]) -> Iterator[bytes]:
    """Formats the reply as the events of a stream."""
    finished = answer(turn, reply, response_id=response_id, model=model, usage=usage)
    frame = _frame(turn, response_id, model)
    sequence = [{"type": "response.created", "response": frame}, {"type": "response.in_progress", "response": frame}]
    for index, item in enumerate(finished["output"]):
        sequence += [{"output_index": index} | event for event in _item_events(item)]
    sequence.append({"type": f"response.{finished['status']}", "response": finished})
    for number, event in enumerate(sequence):
        yield f"event: {event['type']}\ndata: {json.dumps(event | {'sequence_number': number})}\n\n".encode()


def _frame(turn: Turn, response_id: str, model: str) -> dict[str, Any]:
    return {
        "id": f"resp_{response_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": turn.max_tokens,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": None,
        "text": {"format": _format(turn)},
        "tool_choice": turn.tool_choice,
        "tools": [{**tool["function"], "type": "function", "strict": False} for tool in turn.tools],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _format(turn: Turn) -> dict[str, Any]:
    if turn.answer_format is None:
        return {"type": "text"}
    return {"type": "json_schema", "name": "answer", "schema": dict(turn.answer_format.schema), "strict": True}


def _items(reply: Reply, response_id: str, cut: bool) -> list[dict[str, Any]]:
    status = "incomplete" if cut else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        thinking = [{"type": "reasoning_text", "text": reply.reasoning}]
        item = {"type": "reasoning", "id": f"rs_{response_id}", "summary": [], "content": thinking}
        items.append(item | {"encrypted_content": _MARK + reply.reasoning})
    if reply.content or not reply.good_calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{response_id}", "role": "assistant", "status": status, "content": [part]}
        )
    for place, call in enumerate(reply.good_calls):
        namespace, _, name = call.name.rpartition(".")
        item = {"type": "function_call", "id": f"fc_{response_id}_{place}", "call_id": call.call_id, "name": name}
        item |= {"namespace": namespace} if namespace else {}
        items.append(item | {"arguments": json.dumps(dict(call.arguments)), "status": "completed"})
    return items


def failed(refusal: Refusal) -> bytes:
    """Formats a refusal as an event in the middle of a stream."""
    body = {"type": "error", "code": refusal.code, "message": refusal.message, "param": refusal.param, "sequence_number": 0}
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode()


def _item_events(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields an item's events without ``output_index`` and ``sequence_number``, which the caller adds."""
    base = {"item_id": item["id"]}
    if item["type"] == "function_call":
        yield {"type": "response.output_item.added", "item": {**item, "arguments": "", "status": "in_progress"}}
        yield base | {"type": "response.function_call_arguments.delta", "delta": item["arguments"]}
        yield base | {
            "type": "response.function_call_arguments.done",
            "name": item["name"],
            "arguments": item["arguments"],
        }
    else:
        yield {"type": "response.output_item.added", "item": {**item, "content": []} | _in_progress(item)}
        for number, part in enumerate(item["content"]):
            place, kind = base | {"content_index": number}, part["type"]
            extra: Sequence[tuple[str, Any]] = [("logprobs", [])] if kind == "output_text" else []
            yield place | {"type": "response.content_part.added", "part": {**part, "text": ""}}
            yield place | {"type": f"response.{kind}.delta", "delta": part["text"], **dict(extra)}
            yield place | {"type": f"response.{kind}.done", "text": part["text"], **dict(extra)}
            yield place | {"type": "response.content_part.done", "part": part}
    yield {"type": "response.output_item.done", "item": item}


def _in_progress(item: Mapping[str, Any]) -> dict[str, str]:
    return {"status": "in_progress"} if "status" in item else {}
