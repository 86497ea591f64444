"""OpenAI's responses (``POST /v1/responses``) as turns, and replies as responses, whole or as a stream of events.

A response is a list of items: reasoning, a message, calls of functions. A client sends them back in ``input`` with the
results of the calls; consecutive items of the assistant are one turn of the model.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.api.requests import StopReason
from tandem.protocol.dialects.wire import (
    Fields,
    History,
    arguments_of,
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
    read={"model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "text", "background"},
    sampling={"temperature", "top_p", "top_logprobs", "max_output_tokens"},
    harmless={
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
    },
)
REMEDIES = {
    "previous_response_id": "answers are not stored under their ids; send the whole history in input (store=false)",
    "conversation": "conversations are not stored; send the whole history in input",
    "prompt": "there are no stored prompts; send instructions and input",
}
_TEXT = {"input_text", "output_text", "text", "refusal"}
_MARK = "tandem:"
"""Begins the thinking in `encrypted_content`, which clients that store nothing send back as they got it."""


def read(body: Mapping[str, Any]) -> Turn:
    """The turn that a request asks for.

    Raises:
        Refusal: 400, the body has not this shape, or asks for what would mean something else here.
    """
    overridden, ignored = FIELDS.sort(body, REMEDIES)
    if body.get("background"):
        raise refused("background", "an answer is given to the request that asks for it; leave it out")
    form = as_object(as_object(body.get("text") or {}, "text").get("format") or {}, "text.format").get("type", "text")
    if form != "text":
        raise refused("text.format", f"the engine does not constrain what it writes, got {form!r}")
    history = History()
    if body.get("instructions"):
        history.say("system", as_text(body["instructions"], "instructions"))
    _read_input(body.get("input"), history)
    return Turn(
        history.messages("input"),
        tuple(_tools(body.get("tools"), "tools")),
        tool_choice=_tool_choice(body.get("tool_choice")),
        max_tokens=body.get("max_output_tokens"),
        stream=bool(body.get("stream")),
        overridden=overridden,
        ignored=ignored,
    )


def _read_input(given: Any, history: History) -> None:
    if isinstance(given, str):
        history.say("user", given)
        return
    for number, item in enumerate(as_list(given, "input")):
        _read_item(as_object(item, f"input[{number}]"), history, f"input[{number}]")


def _read_item(item: Mapping[str, Any], history: History, where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise wrong(f"{where}.role", "must be system, developer, user or assistant", role)
        words = text_of(_refusals_as_text(item.get("content")), f"{where}.content", _TEXT)
        if role == "assistant":
            history.assistant(words)
        else:
            history.say("system" if role == "developer" else role, words)
    elif kind == "function_call":
        name = _full_name(item.get("namespace"), as_text(item.get("name"), f"{where}.name"))
        call_id = as_text(item.get("call_id"), f"{where}.call_id")
        history.assistant(call=call_of(call_id, name, arguments_of(item.get("arguments"), f"{where}.arguments")))
    elif kind == "function_call_output":
        words = text_of(item.get("output"), f"{where}.output", _TEXT)
        history.result(as_text(item.get("call_id"), f"{where}.call_id"), words, f"{where}.call_id")
    elif kind == "reasoning":
        history.assistant(reasoning=_reasoning(item, where))
    else:
        raise refused(f"{where}.type", f"items are message, function_call, function_call_output, reasoning, got {kind!r}")


def _refusals_as_text(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("refusal")} if isinstance(part, dict) and part.get("type") == "refusal" else part
        for part in content
    ]


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The thinking of an item that was ours; a summary, or what another maker encrypted, is not the model's words."""
    if item.get("content"):
        return text_of(item["content"], f"{where}.content", {"reasoning_text", "text"})
    sealed = item.get("encrypted_content") or ""
    return as_text(sealed, f"{where}.encrypted_content").removeprefix(_MARK) if sealed.startswith(_MARK) else ""


def _tools(given: Any, where: str, namespace: str | None = None) -> Iterator[dict[str, Any]]:
    """Functions; those of a namespace are called ``namespace.name``, for no name of the wire's has a dot."""
    for number, tool in enumerate(as_list(given, where)):
        place = f"{where}[{number}]"
        kind = as_object(tool, place).get("type")
        if kind == "namespace" and namespace is None:
            yield from _tools(tool.get("tools"), f"{place}.tools", as_text(tool.get("name"), f"{place}.name"))
        elif kind == "function":
            name = _full_name(namespace, as_text(tool.get("name"), f"{place}.name"))
            yield tool_of(name, tool.get("description"), tool.get("parameters"), place)
        else:
            raise refused(f"{place}.type", f"only functions can be called, got {kind!r}; switch that tool off in the agent")


def _full_name(namespace: str | None, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


def _tool_choice(choice: Any) -> Any:
    if choice not in (None, "auto", "none", "required"):
        raise refused("tool_choice", f"the model chooses the tool; auto, none and required are known, got {choice!r}")
    return choice or "auto"


# ------------------------------------------------------------------ what is answered


def answer(
    turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int], created: int = 0
) -> dict[str, Any]:
    """The finished response."""
    whole = _frame(turn, response_id, model, created)
    cut = reply.stop_reason != StopReason.STOP
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    return whole | {
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


def events(
    turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int], created: int = 0
) -> Iterator[bytes]:
    """The finished response as the events of a stream."""
    finished = answer(turn, reply, response_id=response_id, model=model, usage=usage, created=created)
    frame = _frame(turn, response_id, model, created)
    told = [{"type": "response.created", "response": frame}, {"type": "response.in_progress", "response": frame}]
    for index, item in enumerate(finished["output"]):
        told += [{"output_index": index} | event for event in _item_events(item)]
    told.append({"type": f"response.{finished['status']}", "response": finished})
    for number, event in enumerate(told):
        yield f"event: {event['type']}\ndata: {json.dumps(event | {'sequence_number': number})}\n\n".encode()


def _frame(turn: Turn, response_id: str, model: str, created: int) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
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
        "text": {"format": {"type": "text"}},
        "tool_choice": turn.tool_choice,
        "tools": [{**tool["function"], "type": "function", "strict": False} for tool in turn.tools],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _items(reply: Reply, response_id: str, cut: bool) -> list[dict[str, Any]]:
    number = response_id.rpartition("_")[2]
    status = "incomplete" if cut else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        thinking = [{"type": "reasoning_text", "text": reply.reasoning}]
        item = {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": thinking}
        items.append(item | {"encrypted_content": _MARK + reply.reasoning})
    if reply.content or not reply.good_calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status, "content": [part]})
    for place, call in enumerate(reply.good_calls):
        namespace, _, name = call.name.rpartition(".")
        item = {"type": "function_call", "id": f"fc_{number}_{place}", "call_id": call.call_id, "name": name}
        item |= {"namespace": namespace} if namespace else {}
        items.append(item | {"arguments": json.dumps(dict(call.arguments)), "status": "completed"})
    return items


def _item_events(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An item's events, less the place of the item and the number of the event."""
    at = {"item_id": item["id"]}
    if item["type"] == "function_call":
        yield {"type": "response.output_item.added", "item": {**item, "arguments": "", "status": "in_progress"}}
        yield at | {"type": "response.function_call_arguments.delta", "delta": item["arguments"]}
        yield at | {
            "type": "response.function_call_arguments.done",
            "name": item["name"],
            "arguments": item["arguments"],
        }
    else:
        yield {"type": "response.output_item.added", "item": {**item, "content": []} | _in_progress(item)}
        for number, part in enumerate(item["content"]):
            place, kind = at | {"content_index": number}, part["type"]
            extra: Sequence[tuple[str, Any]] = [("logprobs", [])] if kind == "output_text" else []
            yield place | {"type": "response.content_part.added", "part": {**part, "text": ""}}
            yield place | {"type": f"response.{kind}.delta", "delta": part["text"], **dict(extra)}
            yield place | {"type": f"response.{kind}.done", "text": part["text"], **dict(extra)}
            yield place | {"type": "response.content_part.done", "part": part}
    yield {"type": "response.output_item.done", "item": item}


def _in_progress(item: Mapping[str, Any]) -> dict[str, str]:
    return {"status": "in_progress"} if "status" in item else {}
