"""Runs in processes of their own that are asked to end, or get stuck, at a named instant."""

import importlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.cli.main import main
from tandem.launch.local import ONCE_S
from tandem.lifecycle import oversight
from tests.trainers import killing


def command(arguments: Sequence[str], instant: str | None, fault: str, nth: int, out: str) -> None:
    """`tandem` with these arguments; at the ``nth`` time of an instant (see `killing.INSTANTS`) one of `FAULTS` happens.

    The exit status is written to ``out``, and beside it, in ``at``, when that was.
    """
    if instant is not None:
        module, attribute, _ = killing.INSTANTS[instant]
        holder: Any = importlib.import_module(module)
        *outer, name = attribute.split(".")
        for part in outer:
            holder = getattr(holder, part)
        setattr(holder, name, _faulty(getattr(holder, name), FAULTS[fault], nth, Path(out).with_name("at")))
    Path(out).write_text(str(main(list(arguments))))


def _faulty(function: Callable[..., Any], fault: Callable[[], None], nth: int, at: Path) -> Callable[..., Any]:
    count = 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth:
            at.write_text(str(time.monotonic()))
            fault()
        return function(*arguments, **named)

    return called


def asked(number: int) -> Callable[[], None]:
    """Somebody asks the process to end."""
    return lambda: os.kill(os.getpid(), number)


def asked_twice() -> None:
    """And cannot wait."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ONCE_S + 0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


def delivered_twice() -> None:
    """One request, by two ways."""
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)


def asked_in_vain() -> None:
    """The step does not end within the grace."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


def stuck() -> None:
    """A call that a signal can end."""
    time.sleep(600)


def stuck_for_good() -> None:
    """One that no signal can end: Python's handlers run between its own instructions only."""
    oversight.CLOSE_S = 5.0
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(600)


FAULTS = {
    "SIGINT": asked(signal.SIGINT),
    "SIGTERM": asked(signal.SIGTERM),
    "SIGHUP": asked(signal.SIGHUP),
    "twice": asked_twice,
    "delivered twice": delivered_twice,
    "in vain": asked_in_vain,
    "stuck": stuck,
    "stuck for good": stuck_for_good,
}
