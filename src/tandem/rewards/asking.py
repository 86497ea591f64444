"""Asking a server until it answers, or until the patience ends."""

import asyncio
import math
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tandem.api.failures import DataFailure, RewardFailure, ServerFailed
from tandem.config.errors import ConfigError
from tandem.protocol.client import HttpClient

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
"""Between two tries of a request; each pause is twice the one before."""

_TRY_AGAIN = (408, 429)
"""Of the statuses 400 to 499, those that say that the same request may be answered later."""


async def ask_patiently(
    client: HttpClient,
    path: str,
    body: dict[str, Any],
    read: Callable[[Any], T],
    *,
    request_timeout_s: float,
    until: float,
    once: bool = False,
) -> T:
    """What ``read`` makes of the server's answer to ``body``; it raises `ValueError` for an answer of no use.

    A request that fails is repeated, with growing pauses, until the monotonic time ``until``; with ``once`` it is not. One
    try has ``request_timeout_s``.

    Raises:
        RewardFailure: ``reward_server_failed``, when there was no answer of use in time; ``reward_refused``, when the server
            takes the request for wrong.
    """
    began, pause_s, tries = time.monotonic(), 0.0, 0
    while True:
        tries += 1
        left_s = max(until - time.monotonic(), 1e-3)
        try:
            answer = await client.post(path, body, deadline_s=min(request_timeout_s, left_s))
            try:
                return read(answer)
            except ValueError as error:
                raise ServerFailed(f"{client.base_url}{path}: its answer cannot be read: {error}") from error
        except DataFailure as failure:
            raise RewardFailure("reward_refused", str(failure)) from failure
        except ServerFailed as error:
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            final = error.status is not None and 400 <= error.status < 500 and error.status not in _TRY_AGAIN
            if final or once or time.monotonic() + pause_s >= until:
                after = f"after {tries} tries in {time.monotonic() - began:.0f} s" if tries > 1 else "at once"
                slow = f"; a try has reward_timeout_s={request_timeout_s:g}" if "no answer within" in str(error) else ""
                raise RewardFailure("reward_server_failed", f"{error} (given up {after}{slow})") from error
            await asyncio.sleep(pause_s)


def client_and_path(url: str, token: str | None, path: str) -> tuple[HttpClient, str]:
    """A client of the server at ``url``, and the route: that of ``url``, or ``path`` where it names none or ends with its
    first part, as in ``http://judge/v1``."""
    route = urlsplit(url).path
    client, route = HttpClient(url.removesuffix(route), token=token), route.rstrip("/")
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
