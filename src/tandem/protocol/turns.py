"""One turn of a chat with tools in a form common to all dialects: the request for the turn and the model's reply.

Messages are those of a chat template (`transformers`, ``apply_chat_template``): mappings with ``role`` and ``content`` (a
string). An assistant's message may have ``reasoning_content`` and ``tool_calls``, each ``{"id", "type": "function",
"function": {"name", "arguments"}}`` with ``arguments`` as a mapping. A tool's result has ``role`` ``tool``,
``tool_call_id`` and ``name``.
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
    """A tool call in a reply, also if the model wrote it wrongly."""

    name: str
    """The tool's name; empty if no name could be read."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: CallStatus = CallStatus.OK
    text: str = ""
    """The call as the model wrote it."""

    why: str = ""
    """The call's fault, in words for the model; empty for a call that is ``ok``."""

    call_id: str = ""

    def message(self) -> dict[str, Any]:
        """Returns the call as an entry of a chat message's ``tool_calls``."""
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(frozen=True)
class Reply:
    """The model's turn, parsed."""

    content: str
    """The text outside thinking and calls."""

    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    """The calls in the order of the text, malformed ones included."""

    stop_reason: StopReason = StopReason.STOP

    @property
    def good_calls(self) -> tuple[Call, ...]:
        """The calls that can be executed."""
        return tuple(call for call in self.calls if call.status == CallStatus.OK)

    def shown(self, stops: Sequence[str] = ()) -> "Reply":
        """Returns the reply as a client sees it. Calls that are malformed or name an unknown tool become text, and
        the text is cut at the first stop string.

        Calls with wrong arguments stay calls, so that the client's own repair can run.
        """
        calls = [replace(c, status=CallStatus.OK) if c.status == CallStatus.WRONG_ARGUMENTS else c for c in self.calls]
        content = self.content
        for text in dict.fromkeys(call.text for call in calls if call.status != CallStatus.OK):
            content += text
        for stop in stops:
            content = content.partition(stop)[0]
        return replace(self, content=content, calls=tuple(call for call in calls if call.status == CallStatus.OK))

    def message(self) -> dict[str, Any]:
        """Returns the reply as an assistant's message of a chat template."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.good_calls:
            made["tool_calls"] = [call.message() for call in self.good_calls]
        return made


class AnswerFormat(NamedTuple):
    """The JSON format that a reply must have."""

    schema: Mapping[str, Any]
    """The JSON schema that the reply's text must satisfy."""

    where: str
    """Path of the schema in the request's body, for error messages."""


@dataclass(frozen=True)
class Turn:
    """A request for the model's next turn."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Each tool is ``{"type": "function", "function": {"name", "description", "parameters": JSON schema}}``."""

    tool_choice: Literal["auto", "none", "required"] = "auto"
    chosen_tool: str = ""
    """The tool that must be called if `tool_choice` is ``required``; empty: any tool."""

    answer_format: AnswerFormat | None = None
    """The format of a reply that must be JSON; None: any text."""

    stops: tuple[str, ...] = ()
    """Strings that end the turn."""

    max_tokens: int | None = None
    stream: bool = False
    overridden: tuple[str, ...] = ()
    """Sampling fields of the request that the trainer overrides; recorded in the metrics."""

    ignored: tuple[str, ...] = ()
    """Fields of the request that have no effect here."""
