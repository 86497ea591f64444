"""A rank's side of the protocol with its launcher: variables from the launcher, and reports to it."""

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
from tandem.launch.local import ERROR, FAILED, KEPT, STACKS, STACKS_SIGNAL
from tandem.launch.place import LAUNCHER, RENDEZVOUS, RESTARTS, TELL

LOOK_S = 0.5
STARTING_LOOK_S = 0.05
"""Seconds between reports until the run folder is open. The interval is short, so that the launcher learns that the folder
is open even if the rank dies soon after."""

CLOSE_S = 30.0
"""Seconds that a rank has to close after its launcher has ended."""

LAST_S = 5.0
"""Seconds before the launcher's deadline that a rank reserves for closing, which takes more than 3 s on a busy machine."""

_PR_SET_PDEATHSIG = 1


def meeting_place() -> str:
    """Returns the URL at which ranks find each other, for torch.distributed: the launcher's file, or the store of rank 0."""
    file = os.environ.get(RENDEZVOUS)
    return f"file://{file}" if file and "MASTER_ADDR" not in os.environ else "env://"


def has_launcher() -> bool:
    """True if the parent of this process is a launcher of Tandem."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def restarts() -> int:
    """Returns how often the launcher has restarted the ranks."""
    return int(os.environ.get(RESTARTS, "0")) if has_launcher() else 0


def kept_servers() -> tuple[Path, int] | None:
    """Returns the folder and the pipe for servers that may outlive this rank (see `KeptServers`), or None if no launcher
    would take the servers over."""
    ends = _kept_pipes()
    return None if ends is None else (Path(ends[2]), int(ends[0]))


def _kept_pipes() -> list[str] | None:
    words = os.environ.get(KEPT, "") if has_launcher() else ""
    return words.split(":", 2) if words else None


def follow_launcher(look: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Makes this process end when its launcher ends: first by SIGTERM, and after `CLOSE_S` by SIGKILL.

    At least twice a second it reports to the launcher the result of ``look`` about the main thread. It writes the stacks of
    all threads when the launcher requests them. Does nothing if no launcher of Tandem has started the process.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    if has_launcher():
        stacks = _file(STACKS).open("w")  # stays open until the process ends
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        _hold_kept_servers()
        with contextlib.suppress(OSError, AttributeError):  # Linux: continues a stopped rank when its launcher ends
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
    arguments = (int(launcher), look, threading.main_thread().ident)
    threading.Thread(target=_follow, args=arguments, name="follow-launcher", daemon=True).start()


def _hold_kept_servers() -> None:
    """Keeps child processes from inheriting the pipes of kept servers, because these servers must end with this process."""
    ends = _kept_pipes()
    if ends is not None:
        for end in ends[:2]:
            os.set_inheritable(int(end), False)
        held = [int(ends[1])]
        os.register_at_fork(after_in_child=lambda: os.close(held.pop()) if held else None)  # once, not in grandchildren


def failed_elsewhere() -> str | None:
    """Returns why the launcher ends this rank because of another rank's failure, or None."""
    order = _ended()
    return None if order is None else str(order["cause"])


def time_to_save_s() -> float | None:
    """Returns the seconds that this rank may still spend on writing before it closes, or None if the launcher does not end
    it."""
    order = _ended()
    return None if order is None else max(0.0, float(order["until"]) - time.monotonic() - LAST_S)


def _ended() -> dict[str, Any] | None:
    if not has_launcher():
        return None
    with contextlib.suppress(OSError):
        order: dict[str, Any] = json.loads((Path(os.environ[RENDEZVOUS]).parent / FAILED).read_text(encoding="utf-8"))
        return order
    return None


@contextlib.contextmanager
def telling_errors() -> Iterator[None]:
    """Reports an error in the block to the launcher, which names the rank that failed first and prints its error once."""
    try:
        yield
    except BaseException as error:
        if has_launcher():
            text = str(error) if isinstance(error, TandemError) else kind_and_text(error)
            words = {"kind": type(error).__name__, "text": text, "at": time.monotonic()}
            with contextlib.suppress(OSError):  # a full disk: the launcher still has the exit status
                _file(ERROR).write_text(json.dumps(words), encoding="utf-8")
        raise


def _file(name: str) -> Path:
    """Returns the path of a file of this rank in the launcher's folder. ``name`` may contain ``{rank}``."""
    return Path(os.environ[RENDEZVOUS]).parent / name.format(rank=os.environ["RANK"])


def _follow(launcher: int, look: Callable[[], Mapping[str, Any]], main: int | None) -> None:
    pipe = int(os.environ.get(TELL, "-1")) if has_launcher() else -1
    while os.getppid() == launcher:
        report = look()
        if pipe >= 0:
            message = json.dumps({**report, "place": place_of(main)}) + "\n"
            with contextlib.suppress(OSError):  # the pipe is full, because the launcher is stopped
                os.write(pipe, message.encode())
        time.sleep(STARTING_LOOK_S if report.get("phase") == "start" else LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(CLOSE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # the rank's process group, with its child processes


def place_of(thread: int | None) -> int:
    """Returns a number that stands for a thread's place in its code; it is constant while the thread stays in one call."""
    frame = sys._current_frames().get(thread or 0)
    digest = 0
    while frame is not None:
        digest = hash((digest, id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return digest
