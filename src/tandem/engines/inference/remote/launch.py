"""Servers that Tandem starts itself: a child process in another environment, with a log file, ended with the run.

Between the run and the server stands a keeper (`keeper.py`), which ends the server and its descendants when this process
closes it, and also when this process is killed: nobody is left who would hold memory or a port. A server that is kept
(`keeping.py`) outlives this process, for the ranks that are started in its place.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tandem.api.failures import EngineDied, InfrastructureFailure, WaitTimeout
from tandem.config.errors import ConfigError
from tandem.config.libraries import of_others
from tandem.engines.inference.remote.keeper import END, KEEP, KILL_S, is_private

T = TypeVar("T")

_KEEPER = Path(__file__).with_name("keeper.py")

GRACE_S = 8.0
"""Between the kind signal and the other one, when a server is ended."""

POLL_S = 0.25
PROGRESS_S = 5.0
"""Seconds between words of progress while a server starts."""

_OURS = re.compile(
    "PYTHONPATH|PYTHONHOME|OMP_NUM_THREADS|MKL_NUM_THREADS|RANK|WORLD_SIZE|"
    "(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|TORCH_NCCL)_.*|NCCL_ASYNC.*"
)
"""Variables of this environment that a server in another one must not get. With those of torchrun it would look for a
store of our launcher's when it forms a process group of its own, and wait in vain."""


def inherited() -> dict[str, str]:
    """The environment of a server: this one, with all that the user has set in it."""
    return {name: value for name, value in of_others(os.environ).items() if not _OURS.fullmatch(name)}


def own_environment(threads: int) -> dict[str, str]:
    """The variables for a child that runs Tandem itself: the places of this process's modules, and its number of threads."""
    path = os.pathsep.join(path for path in sys.path if path)
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Keeper(Protocol):
    """The process above a server, as `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None:
        """The server's exit status, as a shell would give it; below 0: nobody knows. None while it runs."""

    def terminate(self) -> None:
        """Asks it to end its server."""

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended. Raises `subprocess.TimeoutExpired`."""


class ServerProcess:
    """A running server with all its descendants; made by `start`, or taken over by `kept.take_over`."""

    def __init__(
        self,
        keeper: Keeper,
        pid: int,
        pipe: int | None,
        log_file: Path | None,
        grace_s: float = GRACE_S,
        file: Path | None = None,
    ):
        """``pipe``: with its end the server ends; None: it is kept already. ``file``: see `keep`."""
        self._keeper, self.pid, self.log_file = keeper, pid, log_file
        """``pid`` is the server's own process, below the keeper."""

        self.kept = self.taken_over = pipe is None
        """True if it outlives this process, whoever started it."""

        self._pipe, self._file, self._patience_s = pipe, file, grace_s + 2 * KILL_S
        self._lock = threading.Lock()
        # one that is kept must not end with this object
        self._finalize = None if pipe is None else weakref.finalize(self, _end, keeper, pipe, self._patience_s)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        log_file: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
        cpus: Sequence[int] | None = None,
        grace_s: float = GRACE_S,
        keep: tuple[int, Path] | None = None,
    ) -> "ServerProcess":
        """Starts the command; what it prints goes to ``log_file``, or without one where this process writes its errors.

        ``environment`` is added to this one's, without the variables that are about our own interpreter and libraries;
        ``cpus`` are the cores that it may run on (None: those of this process). ``keep``: the pipe with whose end it ends
        once it is kept, and the file that tells others of it then.

        Raises:
            ConfigError: there is no such program.
        """
        if not Path(command[0]).is_file():
            raise ConfigError(f"a server's interpreter must be a file, got {command[0]}; give the python of its environment")
        read, write = os.pipe()
        place, fds = ("", [read]) if keep is None else (f"{keep[0]}:{keep[1]}", [read, keep[0]])
        if keep is not None:
            private_folder(keep[1].parent)  # before others can read its name in the words of a process
        with contextlib.ExitStack() as stack:
            log = None
            if log_file is not None:
                log_file.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(log_file.open("ab", buffering=0))
                log.write(f"$ {' '.join(command)}\n".encode())
            keeper = subprocess.Popen(
                [sys.executable, "-I", str(_KEEPER), str(read), str(grace_s), _listed(cpus), place, *command],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=fds,
                start_new_session=True,  # the terminal's Ctrl-C does not reach it
                env={**inherited(), "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        os.close(read)
        assert keeper.stdout is not None
        with keeper.stdout as words:
            first = words.readline()
        if not first.strip():
            os.close(write)
            raise EngineDied(f"the keeper of {command[0]} ended at once; see {log_file or 'its output above'}")
        return cls(keeper, int(first), write, log_file, grace_s, None if keep is None else keep[1])

    @property
    def alive(self) -> bool:
        return self._poll() is None

    def how_it_ended(self) -> str | None:
        """Says how the process ended; None while it runs."""
        status = self._poll()
        if status is None:
            return None
        if status > 128:
            with contextlib.suppress(ValueError):
                return f"its process {self.pid} was killed by {signal.Signals(status - 128).name}"
        return f"its process {self.pid} ended" + (f" with exit status {status}" if status >= 0 else "")

    def last_words(self, lines: int = 20) -> str:
        """The end of its log."""
        if self.log_file is None:
            return ""
        with contextlib.suppress(OSError), self.log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        return ""

    def keep(self, facts: Mapping[str, Any]) -> None:
        """From now on the server outlives this process; ``facts`` are what another one needs to take it over.

        Raises:
            OSError: they cannot be written; the server still ends with this process.
        """
        assert self._pipe is not None and self._file is not None and self._finalize is not None
        words = json.dumps({"keeper": self._keeper.pid, "pid": self.pid, "log_file": str(self.log_file), **facts})
        partial = self._file.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY
        with open(os.open(partial, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(words)
        partial.rename(self._file)
        self._finalize.detach()
        # the file first: a keeper that lets the server live on must not be the only one who knows of it
        os.write(self._pipe, KEEP + words.encode() + END)
        os.close(self._pipe)
        self.kept, self._pipe, self._finalize = True, None, None

    def close(self) -> None:
        """Ends the server and its descendants, kindly at first, also one that is kept. Idempotent."""
        if self._finalize is not None:
            self._finalize()
        elif self._poll() is None:
            self._keeper.terminate()
            _wait(self._keeper, self._patience_s)

    def _poll(self) -> int | None:
        with self._lock:  # Popen.poll from two threads may lose the status
            return self._keeper.poll()


def private_folder(folder: Path) -> None:
    """Makes a folder that this user alone can look into, or finds it.

    Raises:
        ConfigError: what is there is somebody else's, or open to others.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise ConfigError(f"{folder} must be a folder of this user's alone, for it will hold tokens; remove it")


def _listed(cpus: Sequence[int] | None) -> str:
    return ",".join(str(cpu) for cpu in cpus or ())


def _end(keeper: Keeper, pipe: int, timeout_s: float) -> None:
    os.close(pipe)
    _wait(keeper, timeout_s)


def _wait(keeper: Keeper, timeout_s: float) -> None:
    try:
        keeper.wait(timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()


def wait_ready(
    process: ServerProcess,
    ask: Callable[[], T],
    *,
    what: str,
    timeout_s: float,
    progress: Callable[[str], None],
    progress_s: float = PROGRESS_S,
) -> T:
    """Calls ``ask`` until it answers instead of raising `InfrastructureFailure`; returns its answer.

    Raises:
        EngineDied: the process ended before; with the end of its log.
        WaitTimeout: no answer within ``timeout_s``; with the end of its log.
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
    """Cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


class Cores:
    """Hands out cores, those first that the fewest servers have; servers that were kept for this process have theirs."""

    def __init__(self, allowed: Callable[[], Sequence[int]] = cores_of_this_process) -> None:
        self._allowed = allowed
        self._lock = threading.Lock()
        self._held: dict[object, tuple[int, ...]] = {}
        self._folders: set[Path] = set()

    def take(self, count: int | None, file: Path | None = None) -> tuple[int, ...]:
        """``count`` cores; None: all. ``file``: where the server is kept (`kept.Place`); what one of that name had is free
        again, and those beside it, which others have started, keep what they have."""
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
        """Reads, once for each folder, which cores its kept servers have."""
        if folder in self._folders:
            return
        self._folders.add(folder)
        for file in folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # torn: nobody takes it over either
                words = json.loads(file.read_text(encoding="utf-8"))
                self._held[file] = tuple(int(core) for core in words.get(CORES_WORD, ()))


CORES_WORD = "cores"
"""The key under which a kept server says its cores."""

CORES = Cores()
