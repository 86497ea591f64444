"""A sandbox over a few workers: which of them runs what, and what happens when one is killed."""

import asyncio
import os
import threading
import weakref
from collections.abc import Mapping

from tandem.api.failures import SandboxLost
from tandem.api.sandbox import Limits, Outcome, Program, Sandbox, SandboxProcess, Snapshot, Workspace, check_path
from tandem.config.cores import usable_cores
from tandem.sandbox.jail import Jail
from tandem.sandbox.worker import Interactive, SandboxWorker, TenantSession, packed

ATTEMPTS = 3
MOST_WORKERS = 16


class SandboxPool(Sandbox):
    """Runs programs in up to ``size`` workers (None: one a core), each started when first needed.

    Of `run`, twice as many programs go at once as there are workers, so that one computes while another is begun or read;
    the others wait. Programs of `start` and workspaces share the workers, and nobody waits for them. A worker that was
    killed is replaced.
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
        """Process numbers of the workers that run."""
        with self._lock:
            return [worker.pid for worker in self._workers if worker is not None and worker.alive]

    def _worker(self) -> SandboxWorker:
        """The next worker in turn."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            self._turn = (self._turn + 1) % len(self._workers)
            worker = self._workers[self._turn]
            if worker is None or not worker.alive:
                if worker is not None:
                    worker.kill()  # its folder may be left
                worker = self._workers[self._turn] = SandboxWorker(self._jail)
            return worker

    async def run(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Runs a program to its end."""
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
                    reason = error.message
        return Outcome("lost", stderr=reason.encode())

    async def start(self, program: Program, limits: Limits | None = None) -> SandboxProcess:
        """Begins a program to speak with."""
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
            pass  # it has ended already, or reads nothing
        except BaseException:
            await process.close()
            raise
        return process

    async def open(self, files: Mapping[str, bytes] | None = None, limits: Limits | None = None) -> Workspace:
        """Makes a workspace."""
        limits = limits or Limits()
        workspace = PoolWorkspace(await self._worker().open(limits), limits)
        for path, data in (files or {}).items():
            await workspace.write(path, data)
        return workspace

    def close(self) -> None:
        """Kills all workers with everything in them."""
        with self._lock:
            self._closed = True
            workers = [worker for worker in self._workers if worker is not None]
            self._workers = [None] * len(self._workers)
        for worker in workers:
            worker.kill()


class PoolWorkspace(Workspace):
    """A session that stays."""

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
        most = (self._limits.file_mib + 16) << 20  # the archive has headers of its own
        limits = Limits(wall_s=60, cpu_s=60, memory_mib=512, output_bytes=most, file_mib=self._limits.file_mib)
        async with self._one_at_a_time:
            outcome = await self._session.work(operation, limits, packed(None, files or {}, path), stdin)
        if outcome.status != "ok":
            cause = outcome.stderr.decode(errors="replace").strip() or outcome.status
            raise OSError(f"{operation} {path or 'files'} in a sandbox failed: {cause}")
        return outcome.stdout

    async def read(self, path: str) -> bytes:
        """The content of a file."""
        check_path(path)
        return await self._files("read", path=path)

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file."""
        check_path(path)
        await self._files("write", path=path, files={path: data})

    async def snapshot(self) -> Snapshot:
        """All files."""
        return Snapshot(await self._files("save"))

    async def restore(self, snapshot: Snapshot) -> None:
        """Replaces all files."""
        await self._files("restore", stdin=snapshot.archive)

    async def close(self) -> None:
        """Ends it."""
        self._session.close()
