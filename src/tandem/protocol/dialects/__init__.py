"""The dialects in which agents ask for a turn: pure functions between the wire and `tandem.protocol.turns`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.protocol.dialects import anthropic, chat, responses
from tandem.protocol.refusal import Refusal
from tandem.protocol.turns import Reply, Turn


class Answers(Protocol):
    """Writes the reply to a turn as one body."""

    def __call__(
        self, turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]
    ) -> dict[str, Any]: ...


class Replays(Protocol):
    """Writes the reply to a turn as server-sent events."""

    def __call__(
        self, turn: Turn, reply: Reply, *, response_id: str, model: str, usage: Mapping[str, int]
    ) -> Iterator[bytes]: ...


@dataclass(frozen=True)
class Dialect:
    """One dialect. A new one is a file, and a row of `DIALECTS`."""

    path: str
    """The route that speaks it."""

    summary: str
    read: Callable[[Mapping[str, Any], bool], Turn]
    """The turn of a body; with True images and sounds stay parts of its messages. Raises `Refusal` for what would change the
    meaning."""

    answer: Answers
    events: Replays
    refused: Callable[[Refusal], dict[str, Any]] = Refusal.body
    """The body of a refusal."""

    count_path: str | None = None
    """The route that answers how many tokens a turn's prompt has."""

    count_object: str | None = None
    """The value of `object` in that answer; None: it has no such field."""

    failed: Callable[[Refusal], bytes] = chat.failed
    """The event of a refusal that comes when the stream has begun."""

    def counted(self, tokens: int) -> dict[str, Any]:
        """The body that says how many tokens a turn's prompt has."""
        return {"input_tokens": tokens} | ({} if self.count_object is None else {"object": self.count_object})


DIALECTS = (
    Dialect(
        "/v1/chat/completions",
        "OpenAI's chat completions",
        chat.read,
        chat.answer,
        chat.events,
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
