"""Parts of a request's body that several dialects read alike: fields by their effect, texts in parts, arguments of calls."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.protocol.refusal import Refusal


@dataclass(frozen=True)
class Fields:
    """The fields of a dialect's body by what they do here; any other is refused by its name."""

    read: Collection[str]
    """Fields that the dialect's reader looks at."""

    sampling: Collection[str]
    """Fields of sampling: the trainer decides them."""

    harmless: Collection[str]
    """Fields that change nothing of the model's turn."""

    def sort(self, body: Mapping[str, Any], remedies: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names that are set among the fields of sampling, and among the harmless ones.

        Raises:
            Refusal: 400, a field that is none of these is set; ``remedies`` says why, and what to do, for some names.
        """
        given = [name for name, value in body.items() if value is not None]
        for name in given:
            if name not in self.read and name not in self.sampling and name not in self.harmless:
                raise refused(name, remedies.get(name, "it is not known here; leave it out"))
        return tuple(n for n in given if n in self.sampling), tuple(n for n in given if n in self.harmless)


def refused(where: str, why: str) -> Refusal:
    """A refusal of one field: ``where`` is its path."""
    return Refusal(400, f"{where} cannot be honoured: {why}", code="unsupported", param=where)


def wrong(where: str, rule: str, value: Any) -> Refusal:
    """A refusal of a value that has not the dialect's shape."""
    shown = repr(value)
    return Refusal(400, f"{where} {rule}, got {shown if len(shown) <= 80 else shown[:80] + '…'}", param=where)


def as_text(value: Any, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong(where, "must be a string", value)
    return value


def as_object(value: Any, where: str) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, Mapping):
        raise wrong(where, "must be an object", value)
    return value


def as_list(value: Any, where: str) -> Sequence[Any]:
    """A JSON array; null is an empty one."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise wrong(where, "must be an array", value)
    return value


def text_of(content: Any, where: str, kinds: Collection[str]) -> str:
    """The text of a content, which is null, a string, or a list of parts of these ``kinds``, each with a ``text``.

    Raises:
        Refusal: 400, a part of another kind (a picture, a file).
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(as_list(content, where)):
        place = f"{where}[{number}]"
        kind = as_object(part, place).get("type")
        if kind not in kinds:
            raise refused(f"{place}.type", f"this model reads text only ({', '.join(sorted(kinds))}), got {kind!r}")
        texts.append(as_text(part.get("text", ""), f"{place}.text"))
    return "".join(texts)


def arguments_of(text: Any, where: str) -> Mapping[str, Any]:
    """The arguments of a call, which come as a JSON object written as text."""
    try:
        arguments = json.loads(as_text(text, where) or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise wrong(where, "must be a JSON object as text", text)
    return arguments


def call_of(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call of an assistant's message in a chat template."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def tool_of(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool as a chat template takes it."""
    return {
        "type": "function",
        "function": {
            "name": as_text(name, f"{where}.name"),
            "description": as_text(description or "", f"{where}.description"),
            "parameters": dict(as_object({} if parameters is None else parameters, f"{where}.parameters")),
        },
    }


class History:
    """Messages of a chat as they are read, one after another; parts of one assistant's turn become one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def say(self, role: str, content: str) -> None:
        """A message that the model did not write."""
        self._messages.append({"role": role, "content": content})

    def assistant(self, content: str = "", *, reasoning: str = "", call: dict[str, Any] | None = None) -> None:
        """More of the assistant's turn."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self.say("assistant", "")
        message = self._messages[-1]
        message["content"] += content
        if reasoning:
            message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
        if call is not None:
            message.setdefault("tool_calls", []).append(call)
            self._names[call["id"]] = call["function"]["name"]

    def result(self, call_id: str, content: str, where: str) -> None:
        """A tool's answer to an earlier call."""
        if call_id not in self._names:
            raise wrong(where, "must be the id of a call that comes before it", call_id)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "name": self._names[call_id], "content": content})

    def messages(self, where: str) -> tuple[dict[str, Any], ...]:
        """All of them.

        Raises:
            Refusal: 400, there are none, or the last is the assistant's: an answer that is begun cannot be continued.
        """
        if not self._messages:
            raise wrong(where, "must have at least one message", [])
        if self._messages[-1]["role"] == "assistant":
            raise refused(where, "the last message is the assistant's, and an answer that is begun is not continued here")
        return tuple(self._messages)
