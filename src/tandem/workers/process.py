"""Child processes that are ended with all their descendants, and worker processes among them, which answer calls.

Each child is started through a keeper process, its parent. A keeper (`keeper.py`) ends its process and all descendants when
the owner closes it or is killed, so that no process is left that holds memory or a port. A server outlives its owner only
after `Child.keep`; the process that is started next takes it over.

A worker (`child.py`) that does not answer by a call's deadline is killed and replaced.
"""

import contextlib
import json
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import psutil

from tandem.api.failures import EpisodeFailure
from tandem.config.errors import ConfigError
from tandem.config.libraries import of_others
from tandem.workers.child import HEADER
from tandem.workers.keeper import END, KEEP, KILL_S, children_of, is_private

_KEEPER = Path(__file__).with_name("keeper.py")

GRACE_S = 8.0
"""Default seconds between SIGTERM and SIGKILL when a process is ended."""

LOOK_S = 0.05

_OURS = re.compile(
    "PYTHONPATH|PYTHONHOME|OMP_NUM_THREADS|MKL_NUM_THREADS|RANK|WORLD_SIZE|"
    "(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|TORCH_NCCL)_.*|NCCL_ASYNC.*"
)
"""Environment variables of this process that a server must not inherit. With torchrun's variables, a server that forms its
own process group would wait forever for our launcher's store."""


def inherited() -> dict[str, str]:
    """Returns the environment for a server: that of this process, without `_OURS` and the variables that Tandem set."""
    kept = {name: value for name, value in of_others(os.environ).items() if not _OURS.fullmatch(name)}
    return kept | {"PYTHONUNBUFFERED": "1"}


def keeper_command(
    command: Sequence[str],
    pipe: int,
    grace_s: float,
    *,
    orderly: bool = False,
    cpus: Sequence[int] = (),
    kept: str = "",
    output: int = 2,
) -> list[str]:
    """Returns the command line of a keeper of ``command``; `keeper.py` documents the arguments. The keeper must inherit
    ``pipe``, and should lead a session of its own, so that a Ctrl-C in the terminal does not reach the command."""
    whom = "command" if orderly else "all"
    words = map(str, (_KEEPER, pipe, grace_s, whom, ",".join(map(str, cpus)), output, kept, *command))
    return [sys.executable, "-I", "-S", *words]


class Keeper(subprocess.Popen[bytes]):
    """A keeper process that this process started."""

    _child: int | None = None
    _noticed = False

    def poll(self) -> int | None:
        return self._kill_rest(super().poll())

    def wait(self, timeout: float | None = None) -> int:
        status = super().wait(timeout)
        self._kill_rest(status)
        return status

    def _kill_rest(self, status: int | None) -> int | None:
        """Kills what is left of the process group of a keeper that was killed, the first time that its death is noticed.
        Returns ``status``."""
        if not self._noticed and status is not None:
            self._noticed = True
            if status < 0:  # only a signal ends a keeper before all its descendants
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
        return status

    def child(self) -> int:
        """Waits until the keeper has started its command and returns the command's process id, or 0 if it could not start
        it. Only one thread at a time may call it."""
        if self._child is None:
            assert self.stdout is not None
            with self.stdout as words:
                self._child = int(words.readline() or 0)
        return self._child


class Stranger:
    """The keeper of a server that another process started; has the methods of `Keeper`."""

    def __init__(self, pid: int, child: int, file: Path):
        self.pid, self._child, self._file = pid, child, file

    def child(self) -> int:
        return self._child

    def poll(self) -> int | None:
        """Returns None while the keeper runs, otherwise -1. Only a process with the file's path in its command line is the
        keeper: another process may have got its process id."""
        with contextlib.suppress(psutil.Error):
            if any(str(self._file) in word for word in psutil.Process(self.pid).cmdline()):
                return None
        return -1

    def terminate(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(psutil.Error):
                psutil.Process(self.pid).terminate()

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the keeper has ended. Raises `subprocess.TimeoutExpired` after ``timeout`` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"keeper {self.pid}", timeout or 0.0)
            time.sleep(LOOK_S)
        return -1


class Child:
    """A child process with all its descendants. `start` and `over_socket` start one; `reopen` returns a server that an
    earlier process left running (see `keep`)."""

    def __init__(
        self,
        keeper: Keeper | Stranger,
        pipe: int | None = None,
        log_file: Path | None = None,
        grace_s: float = GRACE_S,
        file: Path | None = None,
    ):
        """``pipe``: the pipe that ends the process when it closes; None for a server that already outlives its starter.
        ``file``: the file that `keep` writes."""
        self._keeper, self.log_file = keeper, log_file
        self.kept = self.taken_over = pipe is None
        """``kept``: True if the child process outlives the present process. ``taken_over``: True if another process started
        it."""

        self._pipe, self._file, self._patience_s = pipe, file, grace_s + 2 * KILL_S
        self._lock = threading.Lock()
        # a kept process must not end with this object
        self._finalize = None if pipe is None else weakref.finalize(self, _end, keeper, pipe, self._patience_s, self._lock)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        log_file: Path | None = None,
        output: int | None = None,
        stdin: int = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
        cpus: Sequence[int] | None = None,
        grace_s: float = GRACE_S,
        orderly: bool = False,
        keep: tuple[int, Path] | None = None,
    ) -> "Child":
        """Starts a command.

        Args:
            command: the program and its arguments.
            log_file: file for the output; its first line is the command.
            output: descriptor for the output, if there is no ``log_file``; None: this process's standard error.
            stdin: descriptor of the standard input.
            environment: the complete environment; None: see `inherited`.
            cpus: cores that it may run on; None: the cores of this process.
            grace_s: seconds between SIGTERM and SIGKILL when it is ended; 0: it is killed at once.
            orderly: True if the command ends its descendants itself at SIGTERM. Otherwise they get SIGTERM with it.
            keep: needed for a later call of `Child.keep`: the pipe that ends the kept server when it closes, and the file
                that describes the server to other processes.

        Raises:
            ConfigError: the program does not exist, or the folder of ``keep``'s file is not private to this user.
        """
        if not Path(command[0]).is_file():
            raise ConfigError(f"a server's interpreter must be a file, got {command[0]}; give the python of its environment")
        place = ""
        if keep is not None:
            place, folder = f"{keep[0]}:{keep[1]}", keep[1].parent
            folder.mkdir(mode=0o700, exist_ok=True)  # before others can read its name in a command line
            if not is_private(folder):
                raise ConfigError(f"{folder} must be a folder of this user's alone, for it will hold tokens; remove it")
        with contextlib.ExitStack() as stack:
            if log_file is not None:
                log_file.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(log_file.open("ab", buffering=0))
                log.write(f"$ {' '.join(command)}\n".encode())
                output = log.fileno()
            read, write = os.pipe()
            stack.callback(os.close, read)
            stack.callback(os.close, write)
            keeper = Keeper(
                keeper_command(command, read, grace_s, orderly=orderly, cpus=cpus or (), kept=place),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=(read, *(keep or ())[:1]),
                start_new_session=True,
                env=inherited() if environment is None else environment,
            )
            pipe = os.dup(write)
        return cls(keeper, pipe, log_file, grace_s, None if keep is None else keep[1])

    @classmethod
    def over_socket(
        cls, command: Sequence[str], kind: int = socket.SOCK_STREAM, **how: Any
    ) -> "tuple[Child, socket.socket]":
        """Like `start`, but also returns a socket of this kind to the process, which gets the other end as standard input
        (see `tandem.workers.child.own_socket`)."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        with theirs:
            try:
                return cls.start(command, stdin=theirs.fileno(), **how), ours
            except BaseException:
                ours.close()
                raise

    @classmethod
    def reopen(cls, file: Path) -> "tuple[Child, dict[str, Any]]":
        """Returns the server that another process left running, and the facts in ``file``, which its `keep` wrote.

        Raises:
            OSError, ValueError, KeyError, TypeError: the file does not exist or is invalid.
        """
        facts = json.loads(file.read_text(encoding="utf-8"))
        return cls(Stranger(int(facts["keeper"]), int(facts["pid"]), file), log_file=Path(facts["log_file"])), facts

    @property
    def pid(self) -> int:
        """Process id of the command, not of its keeper; 0 if the command could not be started."""
        with self._lock:
            return self._keeper.child()

    @property
    def alive(self) -> bool:
        return self.poll() is None

    def how_it_ended(self) -> str | None:
        """Describes how the process ended; None while it runs."""
        status = self.poll()
        if status is None:
            return None
        if status > 128:
            with contextlib.suppress(ValueError):
                return f"its process {self.pid} was killed by {signal.Signals(status - 128).name}"
        return f"its process {self.pid} ended" + (f" with exit status {status}" if status >= 0 else "")

    def last_words(self, lines: int = 20) -> str:
        """Returns the last lines of the log; empty without a log."""
        if self.log_file is None:
            return ""
        with contextlib.suppress(OSError), self.log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        return ""

    def keep(self, facts: Mapping[str, Any]) -> None:
        """Lets the server outlive this process. ``facts``: the data that another process needs to take it over.

        Raises:
            OSError: the file cannot be written; the server still ends with this process.
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
        # the file first: otherwise, after a failure, only the keeper would know of a server that lives on
        os.write(self._pipe, KEEP + words.encode() + END)
        os.close(self._pipe)
        self.kept, self._pipe, self._finalize = True, None, None

    def poll(self) -> int | None:
        """Returns the exit status in the shell's convention (128 + n after signal n), a negative number if it is unknown, or
        None while the process runs."""
        with self._lock:  # Popen.poll from two threads may lose the status
            return self._keeper.poll()

    def processes(self) -> list[psutil.Process]:
        """Returns the keeper and all its descendants; empty if the keeper has ended."""
        with contextlib.suppress(psutil.Error):
            if self.alive:
                keeper = psutil.Process(self._keeper.pid)
                return [keeper, *keeper.children(recursive=True)]
        return []

    def terminate(self) -> None:
        """Asks the keeper to end a kept server; does not wait."""
        self._keeper.terminate()

    def close(self) -> None:
        """Ends the process and its descendants, even after `keep`: with SIGTERM, after the grace time with SIGKILL.
        Idempotent."""
        if self._finalize is not None:
            self._finalize()
        elif self.poll() is None:
            self._keeper.terminate()
            _wait(self._keeper, self._patience_s)

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end and returns the exit status. Raises `subprocess.TimeoutExpired` after ``timeout_s`` seconds."""
        return self._keeper.wait(timeout_s)


def _end(keeper: Keeper | Stranger, pipe: int, timeout_s: float, lock: threading.Lock) -> None:
    os.close(pipe)
    keeper.terminate()  # needed if a process that this one forked holds the pipe open
    _wait(keeper, timeout_s)
    with lock:
        keeper.child()  # closes the pipe from which it reads the process id


def _wait(keeper: Keeper | Stranger, timeout_s: float) -> None:
    try:
        keeper.wait(timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()


def computes(pid: int) -> bool:
    """Returns True if a process or one of its descendants is running on a core or waiting for one.

    False if all of them sleep, wait for a network or have ended, and on systems without /proc.
    """
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            if (thread / "stat").read_text().rpartition(")")[2].split()[:1] == ["R"]:
                return True
    return any(map(computes, children_of(pid)))


LOAD_TIMEOUT_S = 120.0
"""Longest time in seconds to start a worker and import its code; it does not count towards a call's deadline."""

LOOK_EVERY_S = 0.05
"""Seconds between two checks whether a queued call may begin."""

MAX_ANSWER_BYTES = 1 << 20
BOOT = """
import importlib, json, sys
path, main, *rest = sys.argv[1:]
sys.path[:] = json.loads(path)
importlib.import_module(main).main(*rest)
"""


class RemoteError(Exception):
    """An exception that was raised in a worker process. Its text is the traceback from that process."""


class Silent(Exception):
    """A worker gave no answer. ``reason``: ``late`` or ``died`` (the worker was killed), or ``unsent`` (the call could not
    be pickled). The text has the details."""

    def __init__(self, reason: str, text: str):
        super().__init__(text)
        self.reason = reason


class Worker:
    """A worker process that answers calls. Only one thread at a time may use it."""

    def __init__(self, name: str, main: str, *arguments: str):
        """Starts the process. ``name``: its name in messages. ``main``: the module whose ``main(*arguments)`` the process
        runs."""
        command = [sys.executable, "-c", BOOT, json.dumps(sys.path), main, *arguments]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self._name = name
        self._child, self._socket = Child.over_socket(command, environment=environment, grace_s=0.0)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._child.alive

    def loaded(self) -> dict[str, Any]:
        """Waits for the worker's first message, which says whether it could load its code, and returns it. Raises `Silent`
        if none comes."""
        return self._answer(None, LOAD_TIMEOUT_S, "in its start")

    def ask(self, arguments: Any, timeout_s: float, doing: str = "in a call") -> dict[str, Any]:
        """Sends a call and returns the answer. Raises `Silent` if none comes within ``timeout_s`` seconds. ``doing``: the
        worker's activity, as its message names it."""
        token = secrets.token_hex(8)
        try:
            body = pickle.dumps((token, arguments))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise Silent("unsent", f"{self._name}: the row cannot be sent to a worker: {error}") from error
        message = self._answer(body, timeout_s, doing)
        if message.get("token") != token:
            self.kill()
            raise Silent("died", f"{self._name}: an answer without the call's token; the worker was killed")
        return message

    def _answer(self, body: bytes | None, timeout_s: float, doing: str) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        try:
            if body is not None:  # the deadline also covers a worker that does not read its request
                self._socket.settimeout(timeout_s)
                self._socket.sendall(HEADER.pack(len(body)) + body)
            size = HEADER.unpack(self._read(HEADER.size, deadline))[0]
            message = json.loads(self._read(size, deadline) if size <= MAX_ANSWER_BYTES else b"")
        except TimeoutError:
            self.kill()
            raise Silent("late", f"{self._name} was {doing} for more than {timeout_s:g} s and was killed") from None
        except (OSError, EOFError, ValueError):
            code = self.kill(grace_s=1.0)  # waits, so that a worker that died by itself reports its own exit code
            raise Silent("died", f"{self._name}: the worker died with exit code {exit_code(code)} {doing}") from None
        return message if isinstance(message, dict) else {}

    def _read(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def kill(self, grace_s: float = 0.0) -> int:
        """Ends the process and all its descendants after up to ``grace_s`` seconds; returns its exit code. Idempotent; any
        thread may call it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(grace_s)
        self._child.close()
        return self._child.wait()

    def release(self) -> None:
        """Closes the socket of a killed worker. No thread may be reading from it. Idempotent."""
        self._socket.close()


def exit_code(code: int) -> str:
    """Returns the exit code as text, with the signal's name if a signal ended the process, such as ``-9 (SIGKILL)``."""
    number = code - 128 if code > 128 else -code
    name = signal.Signals(number).name if number in set(signal.Signals) else ""
    return f"{code} ({name})" if name else str(code)


W = TypeVar("W", bound=Worker)


class Workers(ABC, Generic[W]):
    """Workers that run the same code. Each is started when first needed and lent to one user at a time. A worker that died
    between two users is replaced without a failure for the next user."""

    failure: ClassVar[type[EpisodeFailure]]
    """The exception class of failures that users get."""

    reasons: ClassVar[Mapping[str, str]]
    """Maps the ``reason`` of a `Silent` to the reason of the failure."""

    closed: ClassVar[str]
    """The message of the failure that a call gets if the workers are closed before it has returned."""

    def __init__(self, name: str, make: Callable[[], W], *threads: ThreadPoolExecutor):
        """``make``: starts a worker. ``threads``: the thread pools that call the workers; `close` shuts them down."""
        self.name, self._make, self._threads = name, make, threads
        self._idle: list[W] = []
        self._all: set[W] = set()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of all workers."""
        with self._changed:
            return [worker.pid for worker in self._all]

    def close(self) -> None:
        """Ends the workers. Calls under way fail. Idempotent."""
        with self._changed:
            self._closed = True
            idle, workers = list(self._idle), list(self._all)
            self._idle.clear()
            self._changed.notify_all()
        for worker in workers:
            if worker not in idle:
                worker.kill()
        self._part_from(idle)
        for worker in idle:
            worker.kill()
        for threads in self._threads:
            threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.release()
        self._all.clear()

    def _part_from(self, idle: Sequence[W]) -> None:
        """Lets idle workers clean up before `close` kills them. By default does nothing."""

    @abstractmethod
    def _has_room(self) -> bool:
        """Returns True if a worker may be lent now. Called with the lock ``_changed`` held."""

    def _begin(self, worker: W) -> None:
        """Called when a worker is lent, with the lock ``_changed`` held."""

    def _end(self, worker: W) -> None:
        """Called when a worker is returned or retired, with the lock ``_changed`` held."""
        self._changed.notify()

    def _failure(self, silent: Silent) -> EpisodeFailure:
        if self._closed:
            return self.failure(self.reasons["died"], f"{self.name}: {self.closed}")
        return self.failure(self.reasons[silent.reason], str(silent))

    def _sound(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the message unless it reports a failure; raises that failure otherwise."""
        if "failure" in message:
            cause = RemoteError(message["traceback"])
            raise self.failure(message["failure"], f"{self.name}: {message['message']}") from cause
        return message

    def _take(self) -> W:
        """Waits until a worker may be lent; returns an idle worker, or a new one once it has loaded its code."""
        while True:
            with self._changed:
                while not (self._closed or self._has_room()):
                    self._changed.wait(LOOK_EVERY_S)
                if self._closed:
                    raise self._failure(Silent("died", self.closed))
                is_new = not self._idle
                worker = self._make() if is_new else self._idle.pop()
                self._all.add(worker)
                self._begin(worker)
            if is_new:
                break
            if worker.alive:
                return worker
            self._retire(worker)
        try:
            self._sound(worker.loaded())
        except Silent as silent:
            self._retire(worker)
            raise self._failure(silent) from None
        except BaseException:
            self._retire(worker)
            raise
        return worker

    def _give_back(self, worker: W) -> None:
        """Returns a worker to the idle ones, or retires it if it has ended."""
        if not worker.alive:
            self._retire(worker)
            return
        with self._changed:
            self._idle.append(worker)
            self._end(worker)

    def _retire(self, worker: W) -> None:
        worker.kill()
        worker.release()
        with self._changed:
            self._all.discard(worker)
            self._end(worker)
