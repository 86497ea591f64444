"""A lock between processes: one makes a thing that takes minutes, the others wait for it, and are told for whom."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from tandem.api.failures import WaitTimeout
from tandem.config.errors import ConfigError

POLL_S = 0.2
SAY_EVERY_S = 5.0
GONE_S = 1.0
"""So long must the holder be gone: who takes a lock that a killed process left needs a moment to write its own number."""

PATIENCE_S = 3600.0
"""Longer than pip may take to fetch a model, and the conversion behind it."""


@contextlib.contextmanager
def locked(path: Path, what: str, *, patience_s: float = PATIENCE_S, say_every_s: float = SAY_EVERY_S) -> Iterator[None]:
    """Holds the advisory lock of a file, which the operating system drops when its holder dies.

    Who has to wait says on stderr, every ``say_every_s`` seconds, for ``what`` and for whom. A lock that outlives its
    holder, because a process that it had forked still has the file open, is put aside.

    Raises:
        WaitTimeout: it was not free within ``patience_s``.
    """
    began = said = time.monotonic()
    gone_looks = 0
    while True:
        file = path.open("a+")
        if _take(file, path):
            break
        holder = _holder(file)
        gone_looks = gone_looks + 1 if _is_gone(holder) else 0
        if gone_looks * POLL_S >= GONE_S:
            _put_aside(file, path)
        file.close()
        now = time.monotonic()
        if now - began >= patience_s:
            raise WaitTimeout(
                f"waited {now - began:.0f} s for {what}, which {_describe(holder)} is making. If it is stuck, end it; if no "
                f"such process exists any more, remove {path}; then start again"
            )
        if now - said >= say_every_s:
            said = now
            waited = f"Waiting for {what}: {_describe(holder)} is making it ({now - began:.0f} s) …"
            print(waited, file=sys.stderr, flush=True)
        time.sleep(min(POLL_S, patience_s))
    with file:
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "pids": _pid_space()}))
        file.flush()
        yield


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Calls ``make(partial)`` and renames the result to ``folder``; whoever comes second waits and finds it.

    A maker that dies leaves nothing under the final name, and its leftovers are removed by the next one. Raises
    `WaitTimeout` where another process does not come to an end with it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made ({error.strerror}: {error.filename}); set TANDEM_CACHE to a folder that can be written"
        ) from error
    partial = folder.with_name(folder.name + ".partial")
    with locked(folder.with_name(folder.name + ".lock"), f"the folder {folder}"):
        if folder.is_dir():
            return
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        make(partial)
        partial.rename(folder)


def _take(file: IO[str], path: Path) -> bool:
    """True if the lock is ours now; not where the file has been put aside meanwhile."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if _is_at(file, path):
        return True
    file.close()
    return False


def _is_at(file: IO[str], path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _put_aside(file: IO[str], path: Path) -> None:
    """Removes the file, unless somebody else did so and it is another one by now."""
    if _is_at(file, path):
        path.unlink(missing_ok=True)


def _holder(file: IO[str]) -> dict[str, Any]:
    """The words of the holder; empty in the moment before it has written them."""
    if file.closed:
        return {}
    file.seek(0)
    with contextlib.suppress(ValueError):
        found = json.loads(file.read())
        return found if isinstance(found, dict) else {}
    return {}


def _is_gone(holder: dict[str, Any]) -> bool:
    """True if the process that wrote its number ran on this machine and has ended."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    if holder.get("pids") != _pid_space():
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's: it is there
        return False
    return False


def _pid_space() -> str:
    """The space in which process numbers count: containers may share a cache and a host name and not their processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # another system than Linux
        return ""


def _describe(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder.get('host', 'this machine')}" if "pid" in holder else "another process"
