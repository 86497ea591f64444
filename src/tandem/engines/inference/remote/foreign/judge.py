"""When a completion ends: the embedded engine's rules, applied to tokens of any server."""

from collections.abc import Sequence

from tandem.api.requests import StopReason
from tandem.engines.inference.stopping import StopText


class Judge:
    """Looks at the tokens of one completion, in pieces.

    A stop token ends it and stays in it; so does the token that completes a stop string. A server may stop earlier or
    later than that, for a token of its own or because it reads only what is new: its word is not asked. ``minimum``: so many
    tokens are no stop tokens, and no stop string counts that is complete before them.
    """

    def __init__(self, stop_ids: frozenset[int], limit: int, stop_text: StopText | None = None, minimum: int = 0):
        self._stop_ids, self._limit, self._stop_text, self._minimum = stop_ids, limit, stop_text, minimum
        self._count = 0

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._limit - self._count

    def look(self, tokens: Sequence[int]) -> tuple[int, StopReason | None]:
        """How many of these tokens belong to the completion, and why it ends with the last of them; None: it goes on.

        Raises:
            ValueError: a stop token came that was to be suppressed.
        """
        for place, token in enumerate(tokens, 1):
            self._count += 1
            if self._stop_text is not None and self._stop_text.add(token) and self._count >= self._minimum:
                return place, StopReason.STOP
            if token in self._stop_ids:
                if self._count <= self._minimum:
                    raise ValueError(f"drew stop token {token} as token {self._count}, with {self._minimum} to come before")
                return place, StopReason.STOP
            if self._count >= self._limit:
                return place, StopReason.LENGTH
        return len(tokens), None
