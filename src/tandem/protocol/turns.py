"""One turn of a chat with tools, whatever dialect it came in: what was asked, and what the model replied.

Messages are those of a chat template (`transformers`, ``apply_chat_template``): mappings with ``role`` and ``content``, a
text. An assistant's may have ``reasoning_content`` and ``tool_calls``, each ``{"id", "type": "function", "function":
{"name", "arguments"}}`` with ``arguments`` as a mapping. A tool's result has ``role`` ``tool``, ``tool_call_id``, ``name``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from tandem.api.requests import StopReason

Message = Mapping[str, Any]


class CallStatus(StrEnum):
    """The state of a tool call in the model's text."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED = "unclosed"
    UNKNOWN_TOOL = "unknown_tool"
    WRONG_ARGUMENTS = "wrong_arguments"


@dataclass(frozen=True)
class Call:
    """A tool that the model called, or tried to call."""

    name: str
    """Empty where none could be read."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: CallStatus = CallStatus.OK
    text: str = ""
    """The model's words."""

    why: str = ""
    """Its fault, in words for the model; empty for a call that is ``ok``."""

    call_id: str = ""

    def message(self) -> dict[str, Any]:
        """The call in the shape of a chat template."""
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(frozen=True)
class Reply:
    """The model's turn, as it reads."""

    content: str
    """The text beside thinking and calls."""

    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    """In the order of the text, the malformed ones too."""

    stop_reason: StopReason = StopReason.STOP

    @property
    def good_calls(self) -> tuple[Call, ...]:
        """The calls that can be carried out."""
        return tuple(call for call in self.calls if call.status == CallStatus.OK)

    def shown(self, stops: Sequence[str] = ()) -> "Reply":
        """The reply as a client is shown it: a call that cannot be read, or that no tool answers to, is text of its turn.

        A text that ends the turn is not. A call whose arguments do not fit is one: the client's own repair runs.
        """
        calls = [replace(c, status=CallStatus.OK) if c.status == CallStatus.WRONG_ARGUMENTS else c for c in self.calls]
        content = self.content
        for text in dict.fromkeys(call.text for call in calls if call.status != CallStatus.OK):
            content += text
        for stop in stops:
            content = content.partition(stop)[0]
        return replace(self, content=content, calls=tuple(call for call in calls if call.status == CallStatus.OK))

    def message(self) -> dict[str, Any]:
        """The assistant's message of a chat template."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.good_calls:
            made["tool_calls"] = [call.message() for call in self.good_calls]
        return made


class AnswerFormat(NamedTuple):
    """The shape of a reply that is JSON."""

    schema: Mapping[str, Any]
    """The JSON schema that its text must fit."""

    where: str
    """The schema's place in the body, for errors."""


@dataclass(frozen=True)
class Turn:
    """A request for the model's next turn."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """``{"type": "function", "function": {"name", "description", "parameters": JSON schema}}`` each."""

    tool_choice: Literal["auto", "none", "required"] = "auto"
    chosen_tool: str = ""
    """The tool that must be called where `tool_choice` is required; empty: any."""

    answer_format: AnswerFormat | None = None
    """The shape of a reply that must be JSON; None: any text."""

    stops: tuple[str, ...] = ()
    """Texts that end the turn."""

    max_tokens: int | None = None
    stream: bool = False
    overridden: tuple[str, ...] = ()
    """Fields of sampling that the caller set and that the trainer decides instead; for the metrics."""

    ignored: tuple[str, ...] = ()
    """Fields that change nothing here."""
