"""A sandbox that distributes programs over a few workers, and replaces workers that were killed."""

import asyncio
import contextlib
import fcntl
import json
import math
import os
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tandem.api.failures import SandboxLost, WaitTimeout
from tandem.api.sandbox import Limits, Outcome, Program, Sandbox, SandboxProcess, Snapshot, Status, Workspace, check_path
from tandem.config.devices import usable_cores
from tandem.sandbox.guest.folders import remove
from tandem.sandbox.jail import ENVIRONMENT, Jail
from tandem.workers.process import Child

PAUSE_S = 0.002
"""Seconds between two connections of one session, so that a program that requests many connections does not block the event
loop."""
CONNECT_S = 5.0
_WORD = 16


class Connections:
    """Opens connections to one address for a session, one after the other, while the event loop runs.

    The session sends a message over the socket ``theirs`` for each connection, and gets the connection's descriptor, or an
    answer without a descriptor if the address cannot be reached.
    """

    def __init__(self, address: tuple[str, int]):
        self._address = address
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._task = asyncio.get_running_loop().create_task(self._serve())
        self._task.add_done_callback(lambda _: self._ours.close())  # also if the task is cancelled before it begins

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # the session has ended
            while await loop.sock_recv(self._ours, _WORD):
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
                    connection.setblocking(False)
                    try:
                        async with asyncio.timeout(CONNECT_S):
                            await loop.sock_connect(connection, self._address)
                    except OSError:
                        self._ours.send(b"-")
                    else:
                        socket.send_fds(self._ours, [b"+"], [connection.fileno()])
                await asyncio.sleep(PAUSE_S)

    def close(self) -> None:
        """Stops opening connections. Idempotent."""
        self.theirs.close()
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so the task has ended
            self._task.cancel()


START_S = 60.0
"""Longest time in seconds to start a worker and open a session; it does not count towards a program's time limit."""
GRACE_S = 30.0
"""Seconds to wait for a program's end after its time limit. A worker that has not reported the end by then is lost."""
CLOSE_S = 10.0
"""Seconds that a worker may take to end all its sessions before it is killed."""
_MESSAGE = 1 << 16
_PIECE = 1 << 16
_HEADER = struct.Struct("!Q")


async def ready(descriptors: Mapping[int, bool], timeout_s: float) -> bool:
    """Waits until a descriptor can be read, or written if its value is True. Returns False if none can within
    ``timeout_s``."""
    loop = asyncio.get_running_loop()
    happened: asyncio.Future[bool] = loop.create_future()

    def wake() -> None:
        if not happened.done():
            happened.set_result(True)

    for descriptor, writes in descriptors.items():
        add = loop.add_writer if writes else loop.add_reader
        add(descriptor, wake)
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            return await happened
    except TimeoutError:
        return False
    finally:
        for descriptor, writes in descriptors.items():
            (loop.remove_writer if writes else loop.remove_reader)(descriptor)


def sealed(data: bytes) -> int:
    """Returns the descriptor of a read-only file in memory with this content, positioned at its beginning."""
    descriptor = os.memfd_create("content", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    fcntl.fcntl(descriptor, 1033, 0xF)  # F_ADD_SEALS: no growing, shrinking, writing, nor other seals
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def packed(program: Program | None, files: Mapping[str, bytes], path: str) -> bytes:
    """Returns the content that a session reads: a header, the files, and the source of the program.

    Args:
        program: the program to run; None for an operation on files.
        files: maps paths to contents.
        path: the file that the operation is about, or empty.
    """
    source = program.source.encode(errors="replace") if program and program.source is not None else None
    head = {
        "argv": program.argv if program else (),
        "source": None if source is None else len(source),
        "files": [(name, len(data)) for name, data in files.items()],
        "path": path,
        "environment": dict(program.environment) if program else {},
    }
    text = json.dumps(head).encode()
    return b"".join([_HEADER.pack(len(text)), text, *files.values(), source or b""])


class SandboxWorker:
    """One fork server in its jail. Usable at once: requests wait in its socket until it has started."""

    def __init__(self, jail: Jail):
        self._has_started = False
        self._has_walls = jail.name != "none"
        self._words = os.memfd_create("stderr", os.MFD_CLOEXEC)
        self._start = jail.start()
        self._child, self._control = Child.over_socket(
            self._start.command,
            socket.SOCK_SEQPACKET,
            output=self._words,
            environment=ENVIRONMENT,
            grace_s=CLOSE_S,
            orderly=True,  # a program that got SIGTERM would seem to have been killed by its own signal
        )
        self._control.setblocking(False)

    @property
    def pid(self) -> int:
        """Process id of the worker's outermost process."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """True while the worker runs."""
        try:
            self._control.recv(1)  # the worker never sends; once its end is closed, this returns b"" or raises
        except BlockingIOError:
            return self._child.alive
        except OSError:
            pass
        return False

    def words(self) -> str:
        """Returns the beginning of the worker's output, which has the reason if the worker could not start."""
        with contextlib.suppress(OSError):
            return os.pread(self._words, 2000, 0).decode(errors="replace").strip()
        return ""

    async def open(self, limits: Limits) -> "TenantSession":
        """Opens a session, which isolates one tenant from the others.

        Raises:
            SandboxLost: the worker has ended, or cannot start a session.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connections = Connections(limits.address) if limits.address is not None and self._has_walls else None
        session = TenantSession(self, ours, connections)
        try:
            with theirs:
                message = {"file_mib": limits.file_mib, "address": limits.address}
                descriptors = [theirs.fileno()] if connections is None else [theirs.fileno(), connections.theirs.fileno()]
                await self._ask(json.dumps(message).encode(), descriptors)
                if connections is not None:
                    connections.theirs.close()
            if not self._has_started:
                await session.await_ready()
                self._has_started = True
        except OSError as error:
            session.close()
            raise SandboxLost(f"a worker is gone: {error}; {self.words()}") from error
        except BaseException:
            session.close()
            raise
        return session

    async def _ask(self, message: bytes, descriptors: list[int]) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.send_fds(self._control, [message], descriptors)
                return
            except BlockingIOError:  # polls, because an event loop can wake only one of several tasks that wait for a socket
                if time.monotonic() > deadline:
                    raise SandboxLost("a worker does not read its requests") from None
                await asyncio.sleep(0.01)

    def kill(self) -> None:
        """Ends the worker and all its sessions. Idempotent."""
        self._control.close()  # makes the worker end its sessions, remove their files and exit
        self._child.close()
        if self._start.base:
            remove(self._start.base)
        if self._words >= 0:
            os.close(self._words)
            self._words = -1


class TenantSession:
    """A session in a worker: the isolated environment of one tenant. It runs one program at a time."""

    def __init__(self, worker: SandboxWorker, channel: socket.socket, connections: Connections | None = None):
        """``channel``: the socket to the session. ``connections``: opens connections for programs that may reach an
        address."""
        self.worker, self._connections = worker, connections
        self._channel = channel
        self._channel.setblocking(False)

    async def await_ready(self) -> None:
        """Waits until the session reports that it is ready.

        Raises:
            SandboxLost: the session cannot be started. If it reported nothing within `START_S` seconds, its worker is
                killed.
        """
        if not await ready({self._channel.fileno(): False}, START_S):
            await asyncio.to_thread(self.worker.kill)
            raise SandboxLost(f"a worker did not start in {START_S:.0f} s and was killed")
        self.message()

    def message(self) -> dict[str, Any]:
        """Reads the next message: the end of a program, or ``ready``.

        Raises:
            SandboxLost: the session has ended, or cannot be started.
        """
        try:
            data = self._channel.recv(_MESSAGE)
        except ConnectionError:
            data = b""
        if not data:
            raise SandboxLost(f"a worker was killed; {self.worker.words()}".rstrip("; "))
        message: dict[str, Any] = json.loads(data)
        if "error" in message:
            raise SandboxLost(message["error"])
        return message

    def begin(self, operation: str, limits: Limits, content: bytes, stdin: int) -> "Running":
        """Starts a program or an operation on files.

        Args:
            operation: ``exec``, or the name of the operation on files.
            limits: the limits of the program.
            content: the bytes from `packed`.
            stdin: descriptor of the standard input; it is closed here.

        Raises:
            SandboxLost: the session has ended.
        """
        stdout, their_stdout = os.pipe2(os.O_CLOEXEC)
        stderr, their_stderr = os.pipe2(os.O_CLOEXEC)
        theirs = [sealed(content), stdin, their_stdout, their_stderr]
        running = Running(self, limits, stdout, stderr)
        bounds = {name: value for name, value in asdict(limits).items() if name not in ("output_bytes", "address")}
        try:
            socket.send_fds(self._channel, [json.dumps({"op": operation, "limits": bounds}).encode()], theirs)
        except OSError as error:
            running.release()
            raise SandboxLost(f"a worker was killed: {error}") from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return running

    async def work(self, operation: str, limits: Limits, content: bytes, stdin: bytes = b"") -> Outcome:
        """Runs a program or an operation on files to its end. The arguments are those of `begin`, but ``stdin`` is the
        content of the standard input."""
        running = self.begin(operation, limits, content, sealed(stdin))
        try:
            return await running.finish()
        finally:
            running.release()

    def ask_kill(self) -> None:
        """Asks the session to kill the program. The end of the program is reported as usual."""
        with contextlib.suppress(OSError):
            self._channel.send(b'{"op": "kill"}')

    @property
    def descriptor(self) -> int:
        """Descriptor of the socket on which the end of a program is reported."""
        return self._channel.fileno()

    def close(self) -> None:
        """Ends the session with all its processes. Idempotent."""
        self._channel.close()
        if self._connections is not None:
            self._connections.close()


_SIGNALS: dict[int | None, Status] = {-signal.SIGXCPU: "timeout", -signal.SIGXFSZ: "files"}
"""Exit code by which the kernel ends a process at a limit of its own → status."""


class Running:
    """A running program or operation on files."""

    def __init__(self, session: TenantSession, limits: Limits, stdout: int, stderr: int):
        self.session, self._limits = session, limits
        self._began = time.monotonic()
        self.streams = {stdout: bytearray(), stderr: bytearray()}
        self.stdout, self.stderr = stdout, stderr
        self.unended = {stdout, stderr}
        self._too_much = False
        for descriptor in self.unended:
            os.set_blocking(descriptor, False)

    def take(self, descriptor: int) -> None:
        """Reads available output from a descriptor. Output beyond the limit is discarded, and the program is killed."""
        try:
            piece = os.read(descriptor, _PIECE)
        except BlockingIOError:
            return
        room = self._limits.output_bytes - len(self.streams[descriptor])
        self.streams[descriptor] += piece[:room]
        if not piece:
            self.unended.discard(descriptor)
        elif len(piece) > room and not self._too_much:
            self._too_much = True
            self.session.ask_kill()

    async def finish(self, grace_s: float = math.inf) -> Outcome:
        """Reads output until the program has ended. The program is killed after ``grace_s`` seconds, or at its time limit.

        Raises:
            SandboxLost: the worker was killed.
        """
        deadline = self._began + self._limits.wall_s + GRACE_S
        kill = time.monotonic() + grace_s
        end: dict[str, Any] = {}
        while not end:
            if time.monotonic() >= kill:
                self.session.ask_kill()
                kill = math.inf
            watched = dict.fromkeys((self.session.descriptor, *self.unended), False)
            if not await ready(watched, min(deadline, kill) - time.monotonic()) and kill == math.inf:
                await asyncio.to_thread(self.session.worker.kill)
                raise SandboxLost(f"a worker reported nothing for {GRACE_S:.0f} s after its program's time and was killed")
            for descriptor in tuple(self.unended):
                self.take(descriptor)
            with contextlib.suppress(BlockingIOError):
                message = self.session.message()
                end = {} if "ready" in message else message
        self._drain()
        return self._outcome(end)

    def _drain(self) -> None:
        """Reads the output that is left in the pipes after the end of the program."""
        for descriptor in tuple(self.unended):
            size = -1
            while descriptor in self.unended and size != len(self.streams[descriptor]):
                size = len(self.streams[descriptor])
                self.take(descriptor)

    def _outcome(self, end: dict[str, Any]) -> Outcome:
        stdout, stderr = bytes(self.streams[self.stdout]), bytes(self.streams[self.stderr])
        code, killed = end.get("code"), end.get("killed")
        seconds = end["seconds"]
        if reason := end.get("reason"):
            return Outcome("refused", None, b"", reason.encode(), seconds)
        return Outcome(self._status(code, killed, stderr), code, stdout, stderr, seconds)

    def _status(self, code: int | None, killed: Status | None, stderr: bytes) -> Status:
        if self._too_much:
            return "output"
        if killed and (killed == "memory" or code in (None, -9)):
            return killed  # a program with another exit code had ended by itself before it was killed
        if code in _SIGNALS:
            return _SIGNALS[code]
        if code not in (0, None) and b"MemoryError" in stderr[-200:]:
            return "memory"
        return "ok" if code == 0 else "exit" if code is not None and code > 0 else "signal"

    def release(self) -> None:
        """Closes the output pipes of the program. Idempotent."""
        for descriptor in (self.stdout, self.stderr):
            if descriptor >= 0:
                os.close(descriptor)
        self.stdout = self.stderr = -1


class Interactive(SandboxProcess):
    """A running program that the caller exchanges data with. It has its own session."""

    def __init__(self, running: Running, stdin: int):
        self._running, self._stdin = running, stdin
        self._outcome: Outcome | None = None
        os.set_blocking(stdin, False)

    async def send(self, data: bytes, deadline_s: float) -> None:
        """Writes to the program's standard input. Raises `WaitTimeout` if the program has not read everything within
        ``deadline_s``."""
        deadline = time.monotonic() + deadline_s
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                if not await ready({self._stdin: True}, deadline - time.monotonic()):
                    raise WaitTimeout(f"a program in a sandbox did not read its input within {deadline_s:g} s") from None

    async def receive(self, max_bytes: int, deadline_s: float) -> bytes:
        """Returns the next bytes of the program's standard output, or b"" at its end. Raises `WaitTimeout` after
        ``deadline_s``."""
        running = self._running
        deadline = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(BlockingIOError):
                return os.read(running.stdout, max_bytes)
            # stdout stays watched after its end, when reading returns b""
            watched = dict.fromkeys(running.unended | {running.stdout}, False)
            if not await ready(watched, deadline - time.monotonic()):
                raise WaitTimeout(f"a program in a sandbox wrote nothing within {deadline_s:g} s")
            if running.stderr in running.unended:
                running.take(running.stderr)

    async def close(self, grace_s: float = 0.0) -> Outcome:
        """Waits for the program's end, and returns its outcome. A program that still runs after ``grace_s`` seconds is
        killed."""
        if self._outcome is None:
            try:
                self._outcome = await self._running.finish(grace_s)
            except SandboxLost as error:
                self._outcome = Outcome("lost", stderr=error.words.encode())
            finally:
                os.close(self._stdin)  # not earlier, because the program may end when its input is closed
                self._running.release()
                self._running.session.close()
        return self._outcome


ATTEMPTS = 3
MOST_WORKERS = 16


class SandboxPool(Sandbox):
    """Runs programs in up to ``size`` workers, each started when first needed. ``size`` None: one per core, at most
    `MOST_WORKERS`.

    `run` runs up to twice as many programs at once as there are workers, so that one program computes while another is
    started or its output is read; further calls wait. Programs from `start` and workspaces share the workers and are not
    counted. A worker that was killed is replaced.
    """

    def __init__(self, jail: Jail, size: int | None = None):
        self.name = jail.name
        self._jail = jail
        self._workers: list[SandboxWorker | None] = [None] * (size or min(usable_cores(), MOST_WORKERS))
        self._turn = 0
        self._lock = threading.Lock()
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        with self._lock:
            return [worker.pid for worker in self._workers if worker is not None and worker.alive]

    def _worker(self) -> SandboxWorker:
        """Returns the next worker, in rotation; starts it if necessary."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            self._turn = (self._turn + 1) % len(self._workers)
            worker = self._workers[self._turn]
            if worker is None or not worker.alive:
                if worker is not None:
                    worker.kill()  # removes its folder
                worker = self._workers[self._turn] = SandboxWorker(self._jail)
            return worker

    async def run(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Runs a program to its end. If a worker is lost, the program runs again, up to `ATTEMPTS` times in all."""
        limits = limits or Limits()
        loop = asyncio.get_running_loop()
        content = packed(program, program.files, "")
        reason = ""
        async with self._turns.setdefault(loop, asyncio.Semaphore(2 * len(self._workers))):
            for _ in range(ATTEMPTS):
                try:
                    session = await self._worker().open(limits)
                    try:
                        return await session.work("exec", limits, content, program.stdin)
                    finally:
                        session.close()
                except SandboxLost as error:
                    reason = error.words
        return Outcome("lost", stderr=reason.encode())

    async def start(self, program: Program, limits: Limits | None = None) -> SandboxProcess:
        """Starts a program that the caller exchanges data with."""
        limits = limits or Limits()
        session = await self._worker().open(limits)
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        try:
            running = session.begin("exec", limits, packed(program, program.files, ""), theirs)
        except BaseException:
            os.close(ours)
            session.close()
            raise
        process = Interactive(running, ours)
        try:
            await process.send(program.stdin, limits.wall_s)
        except BrokenPipeError:
            pass  # the program has ended already, or has closed its input
        except BaseException:
            await process.close()
            raise
        return process

    async def open(self, files: Mapping[str, bytes] | None = None, limits: Limits | None = None) -> Workspace:
        """Opens a workspace that contains ``files``."""
        limits = limits or Limits()
        workspace = PoolWorkspace(await self._worker().open(limits), limits)
        for path, data in (files or {}).items():
            await workspace.write(path, data)
        return workspace

    def close(self) -> None:
        """Ends all workers with all their sessions."""
        with self._lock:
            self._closed = True
            workers = [worker for worker in self._workers if worker is not None]
            self._workers = [None] * len(self._workers)
        for worker in workers:
            worker.kill()


class PoolWorkspace(Workspace):
    """A workspace: a session that stays open for several programs."""

    def __init__(self, session: TenantSession, limits: Limits):
        self._session, self._limits = session, limits
        self._one_at_a_time = asyncio.Lock()

    async def exec(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Runs a program in the working directory."""
        async with self._one_at_a_time:
            content = packed(program, program.files, "")
            return await self._session.work("exec", limits or self._limits, content, program.stdin)

    async def _files(
        self, operation: str, *, path: str = "", files: Mapping[str, bytes] | None = None, stdin: bytes = b""
    ) -> bytes:
        most = (self._limits.file_mib + 16) << 20  # an archive of the files also has headers
        limits = Limits(wall_s=60, cpu_s=60, memory_mib=512, output_bytes=most, file_mib=self._limits.file_mib)
        async with self._one_at_a_time:
            outcome = await self._session.work(operation, limits, packed(None, files or {}, path), stdin)
        if outcome.status != "ok":
            cause = outcome.stderr.decode(errors="replace").strip() or outcome.status
            raise OSError(f"{operation} {path or 'files'} in a sandbox failed: {cause}")
        return outcome.stdout

    async def read(self, path: str) -> bytes:
        """Returns the content of a file."""
        check_path(path)
        return await self._files("read", path=path)

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file."""
        check_path(path)
        await self._files("write", path=path, files={path: data})

    async def snapshot(self) -> Snapshot:
        """Returns a snapshot of all files."""
        return Snapshot(await self._files("save"))

    async def restore(self, snapshot: Snapshot) -> None:
        """Replaces all files."""
        await self._files("restore", stdin=snapshot.archive)

    async def close(self) -> None:
        """Ends the session."""
        self._session.close()
