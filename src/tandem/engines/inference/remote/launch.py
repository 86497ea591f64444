"""Servers that Tandem starts itself: a child process in another environment, with a log file, ended with the run.

Between the run and the server stands a keeper (`keeper.py`), which ends the server and its descendants when this process
closes it, and also when this process is killed: nobody is left who would hold memory or a port.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tandem.api.failures import EngineDied, InfrastructureFailure, WaitTimeout
from tandem.config.errors import ConfigError
from tandem.engines.inference.remote.keeper import KILL_S

T = TypeVar("T")

_KEEPER = Path(__file__).with_name("keeper.py")

GRACE_S = 8.0
"""Between the kind signal and the other one, when a server is ended."""

POLL_S = 0.25
PROGRESS_S = 5.0
"""How often the words of progress come while a server starts."""

_OURS = ("PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables of this environment that a server in another one must not get."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class _Cores:
    """Hands out this process' cores in turn, so that servers started one after another do not share them at first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0

    def take(self, count: int | None) -> tuple[int, ...]:
        """``count`` cores; None: all."""
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
        if count is None or count >= len(allowed):
            return tuple(allowed)
        with self._lock:
            first, self._next = self._next, self._next + count
        return tuple(sorted(allowed[(first + i) % len(allowed)] for i in range(count)))


CORES = _Cores()


class ServerProcess:
    """A running server with all its descendants; made by `start`."""

    def __init__(self, keeper: "subprocess.Popen[bytes]", pid: int, pipe: int, log_file: Path, grace_s: float):
        self._keeper, self.pid, self.log_file = keeper, pid, log_file
        """``pid`` is the server's own process, below the keeper."""

        self._lock = threading.Lock()
        self._finalize = weakref.finalize(self, _end, keeper, pipe, grace_s + 2 * KILL_S)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        cpus: Sequence[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> "ServerProcess":
        """Starts the command; what it prints goes to ``log_file``.

        ``environment`` is added to this one's, without the variables that are about our own interpreter; ``cpus`` are the
        cores that it may run on (None: those of this process).

        Raises:
            ConfigError: there is no such program.
        """
        if not Path(command[0]).is_file():
            raise ConfigError(f"a server's interpreter must be a file, got {command[0]}; give the python of its environment")
        log_file.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
        read, write = os.pipe()
        with log_file.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            keeper = subprocess.Popen(
                [sys.executable, "-I", str(_KEEPER), str(read), str(grace_s), _listed(cpus), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[read],
                start_new_session=True,  # the terminal's Ctrl-C does not reach it
                env={**inherited, "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        os.close(read)
        assert keeper.stdout is not None
        with keeper.stdout as words:
            first = words.readline()
        if not first.strip():
            os.close(write)
            raise EngineDied(f"the keeper of {command[0]} ended at once; see {log_file}")
        return cls(keeper, int(first), write, log_file, grace_s)

    @property
    def alive(self) -> bool:
        """Whether the server has not ended."""
        return self._poll() is None

    def how_it_ended(self) -> str | None:
        """In words; None while it runs."""
        status = self._poll()
        if status is None:
            return None
        if status > 128:
            with contextlib.suppress(ValueError):
                return f"its process {self.pid} was killed by {signal.Signals(status - 128).name}"
        return f"its process {self.pid} ended with exit status {status}"

    def last_words(self, lines: int = 20) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError), self.log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        return ""

    def close(self) -> None:
        """Ends the server and its descendants, kindly at first. Idempotent."""
        self._finalize()

    def _poll(self) -> int | None:
        with self._lock:  # Popen.poll from two threads may lose the status
            return self._keeper.poll()


def _listed(cpus: Sequence[int] | None) -> str:
    return ",".join(str(cpu) for cpu in cpus or ())


def _end(keeper: "subprocess.Popen[bytes]", pipe: int, timeout_s: float) -> None:
    os.close(pipe)
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
) -> T:
    """Calls ``ask`` until it answers instead of raising `InfrastructureFailure`; returns its answer.

    Raises:
        EngineDied: the process ended before; with the end of its log.
        WaitTimeout: no answer within ``timeout_s``; with the end of its log.
    """
    began = told = time.monotonic()
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
        if now - told >= PROGRESS_S:
            told = now
            progress(f"waiting for {what}, {now - began:.0f} s: {process.last_words(1).strip()[-120:]}")
        time.sleep(POLL_S)
