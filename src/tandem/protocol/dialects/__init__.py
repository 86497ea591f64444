"""Wire formats (dialects) in which agents request a turn: pure functions that convert to and from
`tandem.protocol.turns`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.protocol.bodies import Refusal
from tandem.protocol.dialects import anthropic, openai_chat, responses
from tandem.protocol.turns import Reply, Turn


class Answers(Protocol):
    """Formats the reply to a turn as one response body."""

    def __call__(
        self, turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]
    ) -> dict[str, Any]: ...


class Replays(Protocol):
    """Formats the reply to a turn as server-sent events."""

    def __call__(
        self, turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]
    ) -> Iterator[bytes]: ...


@dataclass(frozen=True)
class Dialect:
    """One dialect. To add a dialect, write a module and add a row to `DIALECTS`."""

    path: str
    """The HTTP route of the dialect."""

    summary: str
    read: Callable[[Mapping[str, Any], bool], Turn]
    """(body, media) → turn. With ``media`` true, images and sounds stay parts of the messages. Raises `Refusal` for a field
    that is not supported and would change the meaning of the reply."""

    answer: Answers
    events: Replays
    refused: Callable[[Refusal], dict[str, Any]] = Refusal.body
    """Formats a refusal as a response body."""

    count_path: str | None = None
    """The route that counts the tokens of a turn's prompt; None: the dialect has none."""

    count_object: str | None = None
    """The value of the field `object` in the counting route's answer; None: no such field."""

    failed: Callable[[Refusal], bytes] = openai_chat.failed
    """Formats a refusal as an event, for a stream that has already begun."""

    def counted(self, tokens: int) -> dict[str, Any]:
        """Returns the response body with the token count of a turn's prompt."""
        return {"input_tokens": tokens} | ({} if self.count_object is None else {"object": self.count_object})


DIALECTS = (
    Dialect(
        "/v1/chat/completions",
        "OpenAI's chat completions",
        openai_chat.read,
        openai_chat.answer,
        openai_chat.events,
    ),
    Dialect(
        "/v1/responses",
        "OpenAI's responses",
        responses.read,
        responses.answer,
        responses.events,
        count_path="/v1/responses/input_tokens",
        count_object="response.input_tokens",
        failed=responses.failed,
    ),
    Dialect(
        "/v1/messages",
        "Anthropic's messages",
        anthropic.read,
        anthropic.answer,
        anthropic.events,
        anthropic.refused_body,
        "/v1/messages/count_tokens",
        failed=anthropic.failed,
    ),
)
