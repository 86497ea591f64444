"""A rank's side of its launcher: what it is told, and what it tells."""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.config.errors import TandemError, kind_and_text
from tandem.launch.kept_servers import KEPT
from tandem.launch.local import ERROR, FAILED, LAUNCHER, RENDEZVOUS, RESTARTS, STACKS, STACKS_SIGNAL, TELL

LOOK_S = 0.5
STARTING_LOOK_S = 0.05
"""Before the run folder is open: a rank that dies soon after must have said that it was."""

CLOSE_S = 30.0
"""Seconds that a rank may take to close after its launcher is gone."""

LAST_S = 5.0
"""Seconds of the launcher's patience that a rank keeps for closing, which takes more than 3 s on a busy machine."""

_PR_SET_PDEATHSIG = 1


def meeting_place() -> str:
    """The address at which ranks find each other, as torch.distributed wants it: our file, or the store of rank 0."""
    file = os.environ.get(RENDEZVOUS)
    return f"file://{file}" if file and "MASTER_ADDR" not in os.environ else "env://"


def has_launcher() -> bool:
    """True if a launcher of ours has started this very process."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def restarts() -> int:
    """Number of times that the launcher has started the ranks again."""
    return int(os.environ.get(RESTARTS, "0")) if has_launcher() else 0


def kept_servers() -> tuple[Path, int] | None:
    """Folder and pipe for servers that may outlive this rank, see `kept_servers.py`; None where nobody would take them
    over."""
    ends = _kept()
    return None if ends is None else (Path(ends[2]), int(ends[0]))


def _kept() -> list[str] | None:
    words = os.environ.get(KEPT, "") if has_launcher() else ""
    return words.split(":", 2) if words else None


def follow_launcher(look: Callable[[], Mapping[str, Any]] = dict) -> None:
    """From now on this process ends when its launcher does: first as by Ctrl-C, after `CLOSE_S` in any case.

    It tells the launcher, at least twice a second, what ``look`` says of the main thread, and writes the stacks of all
    threads when the launcher asks. Nothing happens where no launcher of ours has started it.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    if has_launcher():
        stacks = _file(STACKS).open("w")  # open as long as the process lives
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        _hold_kept_servers()
        with contextlib.suppress(OSError, AttributeError):  # Linux: a rank that is stopped notices too
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
    arguments = (int(launcher), look, threading.main_thread().ident)
    threading.Thread(target=_follow, args=arguments, name="follow-launcher", daemon=True).start()


def _hold_kept_servers() -> None:
    """Servers that are kept live as long as this process: what it starts and forks must not hold them too."""
    ends = _kept()
    if ends is not None:
        for end in ends[:2]:
            os.set_inheritable(int(end), False)
        held = [int(ends[1])]
        os.register_at_fork(after_in_child=lambda: os.close(held.pop()) if held else None)  # once: its children have none


def failed_elsewhere() -> str | None:
    """Why the launcher ends this rank, where the reason is another one."""
    said = _ended()
    return None if said is None else str(said["cause"])


def time_to_save_s() -> float | None:
    """Seconds that a rank which the launcher ends may still spend on what it is writing, before it closes; None where the
    launcher does not end it."""
    said = _ended()
    return None if said is None else max(0.0, float(said["until"]) - time.monotonic() - LAST_S)


def _ended() -> dict[str, Any] | None:
    if not has_launcher():
        return None
    with contextlib.suppress(OSError):
        found: dict[str, Any] = json.loads((Path(os.environ[RENDEZVOUS]).parent / FAILED).read_text(encoding="utf-8"))
        return found
    return None


@contextlib.contextmanager
def telling_errors() -> Iterator[None]:
    """A block whose error the launcher hears of, so that it names the rank that was first and repeats nothing."""
    try:
        yield
    except BaseException as error:
        if has_launcher():
            text = str(error) if isinstance(error, TandemError) else kind_and_text(error)
            words = {"kind": type(error).__name__, "text": text, "at": time.monotonic()}
            with contextlib.suppress(OSError):  # a full disk: the exit status says enough
                _file(ERROR).write_text(json.dumps(words), encoding="utf-8")
        raise


def _file(name: str) -> Path:
    """One of this rank's, in the folder where the ranks meet."""
    return Path(os.environ[RENDEZVOUS]).parent / name.format(rank=os.environ["RANK"])


def _follow(launcher: int, look: Callable[[], Mapping[str, Any]], main: int | None) -> None:
    pipe = int(os.environ.get(TELL, "-1")) if has_launcher() else -1
    while os.getppid() == launcher:
        said = look()
        if pipe >= 0:
            message = json.dumps({**said, "place": place_of(main)}) + "\n"
            with contextlib.suppress(OSError):  # full, because the launcher is stopped
                os.write(pipe, message.encode())
        time.sleep(STARTING_LOOK_S if said.get("phase") == "start" else LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(CLOSE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # a session of its own: with all that it has started


def place_of(thread: int | None) -> int:
    """A number for where a thread is in its code; the same as long as it stays in one call."""
    frame = sys._current_frames().get(thread or 0)
    found = 0
    while frame is not None:
        found = hash((found, id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return found
