"""Signals that ask a run to end."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

ONCE_S = 2.0
"""Requests to end within so long are one: a shell and the kernel both tell of a terminal that closes, and a whole process
group may be asked and then each process."""

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def each_request_once() -> Iterator[None]:
    """A block in which a request to end that is delivered twice raises KeyboardInterrupt once."""
    counted_at = -ONCE_S
    before: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal counted_at
        now = time.monotonic()
        if now - counted_at >= ONCE_S:
            counted_at = now
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in REQUESTS}
    heard = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler or signal.SIG_DFL)
