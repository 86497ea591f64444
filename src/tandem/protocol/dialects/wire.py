"""Helpers of the other dialects: field groups, and a chat history that is built part by part."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.protocol.bodies import Refusal
from tandem.protocol.turns import AnswerFormat

T = TypeVar("T")


@dataclass(frozen=True)
class Fields:
    """The fields of a dialect's body, grouped by their effect here. A field of no group is refused, because it may change
    the meaning of a request. For example, a new field may stand for a history that the provider's own service stores."""

    read: Collection[str]
    """Fields that the dialect parses."""

    sampling: Collection[str]
    """Sampling fields. The trainer sets these itself."""

    harmless: Collection[str]
    """Fields that do not change the model's turn."""

    refused: Mapping[str, str]
    """Fields that would change the meaning of a reply. Maps each name to the reason given when a body sets it."""

    def sort(self, body: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the names of the sampling fields and of the harmless fields that the body sets.

        Raises:
            Refusal: status 400, the body sets a refused or unknown field.
        """
        names = [name for name, value in body.items() if value is not None]
        for name in names:
            if name in self.refused and body[name]:
                raise refused(name, self.refused[name])
            if name not in {*self.read, *self.sampling, *self.harmless, *self.refused}:
                raise refused(name, "the field is not known here, and may change the meaning of a reply; leave it out")
        return tuple(n for n in names if n in self.sampling), tuple(n for n in names if n in self.harmless)


def refused(where: str, why: str) -> Refusal:
    """Makes a refusal for a field that is not served. ``where``: its path in the body."""
    return Refusal(400, f"{where} is not served here: {why}", code="unsupported", param=where)


def wrong(where: str, rule: str, value: Any) -> Refusal:
    """Makes a refusal for a value that breaks the dialect's ``rule``."""
    return Refusal(400, f"{where} {rule}, got {value!r:.80}", param=where)


def as_text(value: Any, where: str) -> str:
    """Returns ``value`` if it is a string. Raises `Refusal`."""
    if not isinstance(value, str):
        raise wrong(where, "must be a string", value)
    return value


def as_object(value: Any, where: str) -> Mapping[str, Any]:
    """Returns ``value`` if it is a JSON object. Raises `Refusal`."""
    if not isinstance(value, Mapping):
        raise wrong(where, "must be an object", value)
    return value


def as_list(value: Any, where: str) -> Sequence[Any]:
    """Returns ``value`` if it is a JSON array; null is an empty one. Raises `Refusal`."""
    if not isinstance(value, list | None):
        raise wrong(where, "must be an array", value)
    return value or ()


def pick(value: Any, known: Mapping[Any, T], where: str) -> T:
    """Looks a name up in ``known``. Raises `Refusal` for another name."""
    if not isinstance(value, str) or value not in known:
        raise wrong(where, f"must be one of {', '.join(known)}", value)
    return known[value]


def read_format(form: Any, where: str, inner: str = "") -> AnswerFormat | None:
    """Reads the format of an answer; None: any text. ``inner``: the field of the format that holds its schema."""
    spec = as_object({"type": "text"} if form is None else form, where)
    kinds = ("text", "json_object", "json_schema")
    kind = pick(spec.get("type"), dict(zip(kinds, kinds, strict=True)), f"{where}.type")
    if kind != "json_schema":
        return None if kind == "text" else AnswerFormat({"type": "object"}, where)
    if inner:
        where = f"{where}.{inner}"
        spec = as_object(spec.get(inner), where)
    return AnswerFormat(as_object(spec.get("schema"), f"{where}.schema"), f"{where}.schema")


def check_last(messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raises `Refusal` if there is no message, or the last one is the assistant's: continuing an answer is not supported."""
    if not messages:
        raise wrong(where, "must have at least one message", [])
    if messages[-1]["role"] == "assistant":
        raise refused(where, "the last message is the assistant's; a begun answer is not continued here")


class History:
    """Collects the messages of a chat; parts of one assistant turn become one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []

    def say(self, role: str, content: str | list[dict[str, Any]]) -> None:
        """Adds a message that the model did not write. A list holds parts, such as images and sounds."""
        self._messages.append({"role": role, "content": content})

    def result(self, call_id: str, content: str | list[dict[str, Any]]) -> None:
        """Adds a tool's answer to a call, see `say`."""
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def assistant(self, content: str = "", *, reasoning: str = "") -> None:
        """Adds text or thinking to the assistant's turn."""
        message = self._own_turn()
        message["content"] += content
        if reasoning:
            message["reasoning_content"] = message.get("reasoning_content", "") + reasoning

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        """Adds a tool call to the assistant's turn."""
        function = {"name": name, "arguments": dict(arguments)}
        self._own_turn().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _own_turn(self) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self.say("assistant", "")
        return self._messages[-1]

    def messages(self, where: str) -> list[dict[str, Any]]:
        """Returns all messages. Raises as `check_last`."""
        check_last(self._messages, where)
        return self._messages
