"""The start of a server (its environment, port and cores, and the wait until it answers), and the take-over of kept servers.

A kept server outlives the process that started it. When a process is started again in its place, it takes the server over.

A kept server has a file that only this user can read. It contains a fingerprint of the server's settings, the process id of
its keeper, its address and its tokens. A server is taken over if it was started with the same settings, is alive, has ended
the requests of the previous process, and generates. Its weights are unknown, so the fleet delivers weights before it serves.
Otherwise the server is ended and a new one is started; the log gives the reason.
"""

import contextlib
import hashlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tandem.api.failures import EngineDied, EpisodeFailure, InfrastructureFailure, WaitTimeout
from tandem.config.errors import ConfigError
from tandem.engines.inference.engine_calls import in_thread
from tandem.workers.keeper import is_private
from tandem.workers.process import Child

T = TypeVar("T")

POLL_S = 0.25
PROGRESS_S = 5.0
"""Seconds between two progress messages while a server starts."""


def own_environment(threads: int) -> dict[str, str]:
    """Returns the environment variables for a child that runs Tandem itself, in addition to `inherited`: this process's
    module paths, and the number of threads."""
    path = os.pathsep.join(path for path in sys.path if path)
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def free_port() -> int:
    """Returns a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(
    process: Child,
    ask: Callable[[], T],
    *,
    what: str,
    timeout_s: float,
    progress: Callable[[str], None],
    progress_s: float = PROGRESS_S,
) -> T:
    """Calls ``ask`` until it no longer raises `InfrastructureFailure`, and returns its result.

    ``what``: the server's name in messages. ``progress`` gets a message every ``progress_s`` seconds.

    Raises:
        EngineDied: the process ended first; the message has the end of its log.
        WaitTimeout: ``ask`` did not succeed within ``timeout_s``; the message has the end of the log.
    """
    began = reported = time.monotonic()
    while True:
        try:
            return ask()
        except InfrastructureFailure as error:
            reason = error
        now = time.monotonic()
        ended = process.how_it_ended()
        if ended is not None:
            raise EngineDied(f"{what} did not start: {ended}; {process.log_file} ends with\n{process.last_words()}")
        if now - began > timeout_s:
            raise WaitTimeout(
                f"{what} had not generated a token within {timeout_s:g} s ({reason}); {process.log_file} ends with\n"
                f"{process.last_words()}"
            )
        if now - reported >= progress_s:
            reported = now
            progress(f"waiting for {what}, {now - began:.0f} s: {process.last_words(1).strip()[-120:]}")
        time.sleep(POLL_S)


def cores_of_this_process() -> list[int]:
    """Returns the numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


class Cores:
    """Assigns cores to servers: first the cores that the fewest servers have. Kept servers keep their cores."""

    def __init__(self, allowed: Callable[[], Sequence[int]] = cores_of_this_process) -> None:
        self._allowed = allowed
        self._lock = threading.Lock()
        self._held: dict[object, tuple[int, ...]] = {}
        self._folders: set[Path] = set()

    def take(self, count: int | None, file: Path | None = None) -> tuple[int, ...]:
        """Assigns ``count`` cores to a server; None: all. ``file``: the file of the server, if it can be kept (see
        `ServerPlace`). The cores of an earlier server with this file become free, and servers with other files in the same
        folder keep their cores."""
        allowed = self._allowed()
        if count is None or count >= len(allowed):
            return tuple(allowed)
        with self._lock:
            if file is not None:
                self._look(file.parent)
                self._held.pop(file, None)
            used = Counter(core for cores in self._held.values() for core in cores)
            chosen = tuple(sorted(sorted(allowed, key=lambda core: used[core])[:count]))
            self._held[file or object()] = chosen
        return chosen

    def _look(self, folder: Path) -> None:
        """Reads the cores of the kept servers in a folder, once per folder."""
        if folder in self._folders:
            return
        self._folders.add(folder)
        for file in folder.glob("*.json"):
            # an invalid file is ignored, because its server is not taken over either
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                words = json.loads(file.read_text(encoding="utf-8"))
                self._held[file] = tuple(int(core) for core in words.get(CORES_WORD, ()))


CORES_WORD = "cores"
"""The key of the cores in the file of a kept server."""

CORES = Cores()


logger = logging.getLogger("tandem.fleet")

S = TypeVar("S")


class ServerClient(Protocol):
    """An engine that uses a server."""

    process: Child | None


E = TypeVar("E", bound=ServerClient)

LOOK_S = 0.05

CALM_S = 15.0
"""Seconds that a server has at a take-over to end the previous process's requests, and again to generate a token."""


TAKE_OVER_S = 60.0
"""Longest time in seconds for a whole take-over. A server that hangs may be the reason why the ranks were ended, and must
not delay the restarted ranks."""


@dataclass(frozen=True)
class Keeping:
    """The folder and the pipe of a run's kept servers."""

    folder: Path
    """A folder for this run only; it is created with the first server."""

    pipe: int
    """Read end of a pipe. Kept servers end when the other end is closed."""

    def place(self, name: str) -> "ServerPlace":
        return ServerPlace(name, self.folder / f"{name}.json", self.pipe)


@dataclass(frozen=True)
class ServerPlace:
    """The name, the file and the pipe of one kept server; see `Keeping`."""

    name: str
    file: Path
    pipe: int


def fingerprint(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Returns a hash of a server's command line and environment. The caller leaves out values that differ at each start,
    such as ports, cores and temporary files."""
    return hashlib.sha256(json.dumps([list(words), sorted(environment.items())]).encode()).hexdigest()


def keep(place: ServerPlace, process: Child, settings: str, facts: Mapping[str, Any]) -> None:
    """Lets a server that is ready outlive this process. ``settings``: its `fingerprint`; ``facts``: the data that the next
    process needs to attach to it. A failure is only logged."""
    try:
        process.keep({"settings": settings, **facts})
    except OSError as error:
        logger.warning(
            "%s is not kept: when this process is started again, a new server is started too: %s", place.name, error
        )
        return
    logger.info(
        "%s (process %d) is kept: if this process ends and is started again, the server goes on", place.name, process.pid
    )


def take_over(place: ServerPlace, settings: str, attach: Callable[[Mapping[str, Any], Child], S]) -> S | None:
    """Takes over the server that is kept at ``place``. Returns its engine, which ``attach`` creates from its facts.

    Returns None if a new server must be started. If the file of a kept server is valid, that server has then been ended.
    ``settings``: the `fingerprint` that the kept server must have.
    """
    try:
        if not is_private(place.file.parent):
            raise ValueError(f"{place.file.parent} is not a folder of this user alone")
        process, facts = Child.reopen(place.file)
    except FileNotFoundError:
        if place.file.parent.exists():  # otherwise this is the first server of the run
            logger.info("%s is started anew: no server of that name runs any more", place.name)
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is started anew: the file of the kept server cannot be read: %s", place.name, error)
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
    start: Callable[..., Child],
    attach: Callable[[], E],
    take: Callable[[Mapping[str, Any], Child], E],
    facts: Callable[[E], Mapping[str, Any]],
    what: str,
    timeout_s: float,
    progress: Callable[[str], None],
) -> E:
    """Takes over the server that is kept at ``place``, or starts a new one, and returns its engine.

    A new server must have generated a token before this returns. It outlives this process as the server of ``place``, or
    ends with this process if ``place`` is None.

    Args:
        place: the place of the kept server.
        settings: the server's `fingerprint`.
        start: starts the server; its argument ``keep`` is that of `Child.start`.
        attach: creates the engine of a new server; raises `InfrastructureFailure` until the server answers.
        take: creates the engine of a kept server from its facts.
        facts: returns the facts about an engine's server that ``take`` needs in another process.
        what: the server's name in messages.
        timeout_s: longest time in seconds until a new server is ready.
        progress: gets progress messages.

    Raises:
        EngineDied: the new server ended before it was ready; the message has the end of its log.
        WaitTimeout: the new server was not ready within ``timeout_s``; the message has the end of its log.
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
    """Calls ``attach`` in a thread and returns its result. Abandons the thread and raises `InfrastructureFailure` after
    `TAKE_OVER_S` seconds."""
    try:
        return in_thread("take-over", attach).result(TAKE_OVER_S)
    except TimeoutError:
        raise InfrastructureFailure("busy", f"it could not be taken over within {TAKE_OVER_S:g} s") from None


def until_calm(under_way: Callable[[], int]) -> None:
    """Waits until a server has ended the requests of the previous process. ``under_way``: returns the number of its running
    requests; its exceptions are passed on.

    Raises:
        InfrastructureFailure: some requests are still running after `CALM_S`.
    """
    until = time.monotonic() + CALM_S
    while count := under_way():
        if time.monotonic() > until:
            raise InfrastructureFailure("busy", f"{count} requests of the previous process are still under way")
        time.sleep(LOOK_S)
