"""Asking a server until it answers, or until the patience ends."""

import asyncio
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tandem.api.failures import DataFailure, RewardFailure, ServerFailed
from tandem.config.errors import ConfigError
from tandem.protocol.client import HttpClient

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
"""Between two tries of a request; each pause is twice the one before."""

_TRY_AGAIN = (408, 429)
"""Those of the statuses 400 to 499 which say that the same request may be answered later."""


class AskedServer:
    """A server that is asked until it answers, or until the patience ends.

    A question that waited in vain while nobody else was answered either is taken as the end of the server: from then on a
    question is tried once, until one is answered. So a dead server costs a run its patience once, and not at each batch.
    """

    def __init__(self, url: str, token: str | None, path: str, *, request_timeout_s: float, patience_s: float):
        """``path``: see `client_and_path`. ``request_timeout_s``: of one try. ``patience_s``: of a question, all tries
        together."""
        self._client, self._path = client_and_path(url, token, path)
        self._request_timeout_s, self._patience_s = request_timeout_s, patience_s
        self._answered = -math.inf
        self.is_silent = False

    def until(self) -> float:
        """The monotonic time at which the patience of a question of now ends."""
        return time.monotonic() + self._patience_s

    async def ask(
        self,
        body: dict[str, Any],
        read: Callable[[Any], T],
        *,
        until: float | None = None,
        once: bool = False,
        beside: str | None = None,
    ) -> T:
        """The result of ``read`` for the server's answer to ``body``; it raises `ValueError` for an answer of no use.

        A request that fails is repeated, with growing pauses, until the monotonic time ``until``; with ``once`` it is not.
        ``beside``: another route, which stands beside the server's own, such as ``/media``.

        Raises:
            RewardFailure: ``reward_server_failed``, when there was no answer of use in time; ``reward_refused``, when the
                server takes the request for wrong.
        """
        began, pause_s, tries = time.monotonic(), 0.0, 0
        until = self.until() if until is None else until
        path = self._path if beside is None else self._path.rpartition("/")[0] + beside
        while True:
            tries += 1
            try:
                answer = await self._try(path, body, read, until)
                self._answered, self.is_silent = time.monotonic(), False
                return answer
            except DataFailure as failure:
                raise RewardFailure("reward_refused", str(failure)) from failure
            except ServerFailed as error:
                pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                final = error.status is not None and 400 <= error.status < 500 and error.status not in _TRY_AGAIN
                late = time.monotonic() + pause_s >= until
                if final or late or once or self.is_silent:
                    words = self._words(error, tries, began)
                    self.is_silent |= late and self._answered < began
                    raise RewardFailure("reward_server_failed", words) from error
                await asyncio.sleep(pause_s)

    async def _try(self, path: str, body: dict[str, Any], read: Callable[[Any], T], until: float) -> T:
        left_s = max(until - time.monotonic(), 1e-3)
        answer = await self._client.post(path, body, deadline_s=min(self._request_timeout_s, left_s))
        try:
            return read(answer)
        except ValueError as error:
            raise ServerFailed(f"{self._client.base_url}{path}: its answer cannot be read: {error}") from error

    def _words(self, error: ServerFailed, tries: int, began: float) -> str:
        after = f"after {tries} tries in {time.monotonic() - began:.0f} s" if tries > 1 else "at once"
        slow = f"; a try has reward_timeout_s={self._request_timeout_s:g}" if "no answer within" in str(error) else ""
        silent = f"; it has left a question unanswered for patience_s={self._patience_s:g}" if self.is_silent else ""
        return f"{error} (given up {after}{slow}{silent})"

    def close(self) -> None:
        """Drops all connections."""
        self._client.close()


def client_and_path(url: str, token: str | None, path: str) -> tuple[HttpClient, str]:
    """A client of the server at ``url``, and the route: that of ``url``, or ``path`` where it names none or ends with its
    first part, as in ``http://judge/v1``."""
    route = urlsplit(url).path
    client, route = HttpClient(url.removesuffix(route) or url, token=token), route.rstrip("/")
    first = f"/{path.split('/')[1]}" if path.count("/") > 1 else path
    return client, path if not route else route + path.removeprefix(first) if route.endswith(first) else route


def token_of(name: str, token_env: str | None) -> str | None:
    """The bearer token in an environment variable; None if none is named.

    Raises:
        ConfigError: the variable is not set. ``name``: of the reward, for the message.
    """
    if token_env is None:
        return None
    token = os.environ.get(str(token_env))
    if not token:
        raise ConfigError(f"reward {name!r}: token_env={token_env}, and the environment has no variable {token_env}")
    return token


def finite_knobs(name: str, **knobs: Any) -> None:
    """Raises `ConfigError` for a knob that is no finite number. ``name``: of the reward, for the message."""
    for knob, value in knobs.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"reward {name!r}: {knob} must be a finite number, got {value!r}")


def read_knob_file(name: str, knob: str, file: str) -> str:
    """The text of the file that a knob of the reward ``name`` gives.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward {name!r}: the {knob} {file} cannot be read: {error}") from error
