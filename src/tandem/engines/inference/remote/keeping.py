"""Servers that outlive the process that started them, found again and taken over by the one that is started in its place.

A server that is ready leaves a file, readable by this user alone: what it was started with, its keeper, its address and
tokens. It is taken over where it was started with the same words, is alive, has let go of the requests of the process that
is gone, and generates. Nobody knows what weights it holds, so the fleet delivers them before it serves. Any other is ended
and a new one started, which takes as long as any start; the log has the reason.
"""

import contextlib
import hashlib
import json
import logging
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from tandem.api.failures import EpisodeFailure, InfrastructureFailure
from tandem.config.errors import ConfigError
from tandem.engines.inference.remote.keeper import is_private
from tandem.engines.inference.remote.launch import ServerProcess, wait_ready
from tandem.engines.inference.threads import in_thread

logger = logging.getLogger("tandem.fleet")

S = TypeVar("S")


class ServerClient(Protocol):
    """An engine over a server."""

    process: ServerProcess | None


E = TypeVar("E", bound=ServerClient)

LOOK_S = 0.05

CALM_S = 15.0
"""A server that is taken over has this long to let go of requests that nobody waits for, and again to generate a token."""


TAKE_OVER_S = 60.0
"""Limit for a whole take-over. A server that hangs may be why the ranks were ended; it must not hold them up again."""


@dataclass(frozen=True)
class Keeping:
    """The place where the servers of a run are kept."""

    folder: Path
    """The folder of this run alone; made with the first server."""

    pipe: int
    """Read end of a pipe; the servers end when its other end closes."""

    def place(self, name: str) -> "ServerPlace":
        return ServerPlace(name, self.folder / f"{name}.json", self.pipe)


@dataclass(frozen=True)
class ServerPlace:
    """The place where one server is kept."""

    name: str
    file: Path
    pipe: int


class Stranger:
    """The keeper of a server that another process has started; see `launch.Keeper`."""

    def __init__(self, pid: int, file: Path):
        self.pid, self._file = pid, file

    def poll(self) -> int | None:
        """Looks for the file's path in the command line, so another process of that number is not taken for it."""
        with contextlib.suppress(psutil.Error):
            if any(str(self._file) in word for word in psutil.Process(self.pid).cmdline()):
                return None
        return -1

    def terminate(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(psutil.Error):
                psutil.Process(self.pid).terminate()

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended. Raises `subprocess.TimeoutExpired`."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"keeper {self.pid}", timeout or 0.0)
            time.sleep(LOOK_S)
        return -1


def fingerprint(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Fingerprint of a server's settings at its start, without those that differ each time: ports, cores, temporary
    files."""
    return hashlib.sha256(json.dumps([list(words), sorted(environment.items())]).encode()).hexdigest()


def keep(place: ServerPlace, process: ServerProcess, settings: str, facts: Mapping[str, Any]) -> None:
    """Leaves a server that is ready for whoever comes after this process; ``facts`` are what it needs to attach."""
    try:
        process.keep({"settings": settings, **facts})
    except OSError as error:
        logger.warning("%s is not kept, and will be started anew where this process is: %s", place.name, error)
        return
    logger.info("%s (process %d) is kept: it outlives this process where that is started again", place.name, process.pid)


def take_over(place: ServerPlace, settings: str, attach: Callable[[Mapping[str, Any], ServerProcess], S]) -> S | None:
    """The engine that ``attach`` makes of the server that was kept there, from its facts; None if a new one has to be
    started.

    ``settings``: the `fingerprint` of what it must have been started with. Then none is left of one that was there.
    """
    try:
        if not is_private(place.file.parent):
            raise ValueError(f"{place.file.parent} is not a folder of this user alone")
        facts = json.loads(place.file.read_text(encoding="utf-8"))
        keeper = Stranger(int(facts["keeper"]), place.file)
        process = ServerProcess(keeper, int(facts["pid"]), None, Path(facts["log_file"]))
    except FileNotFoundError:
        if place.file.parent.exists():  # else it is the first of all
            logger.info("%s is started anew: no server of that name runs any more", place.name)
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is started anew: what was written of it cannot be read: %s", place.name, error)
        return None
    if not process.alive:
        reason = "it is gone"
    elif facts.get("settings") != settings:
        reason = "it was started with other settings"
    else:
        try:
            server = _in_time(partial(attach, facts, process))
        except (EpisodeFailure, ConfigError, OSError, KeyError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
        else:
            logger.info("%s (process %d) is taken over, and gets weights before it serves", place.name, process.pid)
            return server
    logger.warning("%s (process %d) is not taken over but started anew: %s", place.name, process.pid, reason)
    process.close()
    place.file.unlink(missing_ok=True)
    return None


def start_or_take_over(
    place: ServerPlace | None,
    settings: str,
    *,
    start: Callable[..., ServerProcess],
    attach: Callable[[], E],
    take: Callable[[Mapping[str, Any], ServerProcess], E],
    facts: Callable[[E], Mapping[str, Any]],
    what: str,
    timeout_s: float,
    progress: Callable[[str], None],
) -> E:
    """The engine of the server that is kept at ``place``, by ``take``; or of a new one that has generated a token, which is
    kept there from then on. Without a place it ends with this process.

    ``start``: takes ``keep``, see `ServerProcess.start`. ``attach``: raises `InfrastructureFailure` until the server
    answers. ``facts``: what ``take`` needs in another process. ``what``: the server in words, for messages.

    Raises:
        EngineDied: the new one ended before; with the end of its log.
        WaitTimeout: it was not ready within ``timeout_s``; with the end of its log.
    """
    if place is not None and (server := take_over(place, settings, take)) is not None:
        return server
    process = start(keep=None if place is None else (place.pipe, place.file))
    try:
        server = wait_ready(process, attach, what=what, timeout_s=timeout_s, progress=progress)
        if place is not None:
            keep(place, process, settings, facts(server))
    except BaseException:
        process.close()
        raise
    server.process = process
    return server


def _in_time(attach: Callable[[], S]) -> S:
    """The result of the call. If it takes longer than `TAKE_OVER_S`, its thread is abandoned and its server ended."""
    try:
        return in_thread("take-over", attach).result(TAKE_OVER_S)
    except TimeoutError:
        raise InfrastructureFailure("busy", f"it has not let itself be taken over within {TAKE_OVER_S:g} s") from None


def until_calm(under_way: Callable[[], int]) -> None:
    """Waits until a server has let go of requests whose connections are gone.

    Raises:
        InfrastructureFailure: it has not within `CALM_S`, or what ``under_way`` raises.
    """
    until = time.monotonic() + CALM_S
    while count := under_way():
        if time.monotonic() > until:
            raise InfrastructureFailure("busy", f"{count} requests of the process that is gone are still under way")
        time.sleep(LOOK_S)
