"""The descendants of this process: functions that find, measure and kill them."""

import contextlib
import os
import re
import resource
import signal
from collections.abc import Collection

from tandem.sandbox.guest import kernel

_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY = re.compile(rb"^(RssAnon|RssShmem|VmSwap|VmPTE|HugetlbPages):\s+(\d+)", re.M)
_SHARE = re.compile(rb"^Pss_Shmem:\s+(\d+)", re.M)
ROUNDS = 200
"""Maximum number of rounds of freezing. Each round finds the processes that were forked during the previous one, so few
rounds are needed."""


def content(path: str) -> bytes:
    """Returns a file of /proc as bytes, because a program controls parts of its text; empty if the process has ended."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def threads_of(pid: int) -> list[str]:
    """Returns the folders in /proc of a process's threads. The first thread may have ended; its files are then empty."""
    with contextlib.suppress(OSError):
        return [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    return []


def children_of(pid: int) -> set[int]:
    """Returns the children of a process, started by any of its threads."""
    return {int(child) for thread in threads_of(pid) for child in content(f"{thread}/children").split()}


def descendants_of(pid: int) -> set[int]:
    """Returns all descendants of a process."""
    known: set[int] = set()
    new = children_of(pid)
    while new:
        known |= new
        new = set().union(*map(children_of, new)) - known
    return known


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_below(spare: Collection[int] = ()) -> None:
    """Kills all descendants of this process, which must be pid 1 of its namespace or adopt all orphans (a subreaper).

    ``spare``: children that are kept, with their descendants.
    """
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # kills all at once, so that none can escape by forking
        return
    stopped: set[int] = set()
    for _ in range(ROUNDS):  # stopped processes cannot fork
        children = children_of(os.getpid()) - set(spare)
        new = children.union(*map(descendants_of, children)) - stopped
        if not new:
            break
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def end_with_parent(parent: int, number: int) -> None:
    """Makes the kernel send this process a signal when its parent dies. ``parent``: the expected parent's pid."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, number)
    if os.getppid() not in (parent, 0):  # 0: the parent is in another namespace
        os.kill(os.getpid(), number)


def end_all() -> None:
    """Kills and reaps all descendants of this process, including those that are forked meanwhile."""
    while True:
        kill_below()
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def memory_of(status: bytes) -> dict[bytes, int]:
    """Returns kilobytes by kind of memory from a thread's file ``status``; empty if its process has no memory any more."""
    return {name: int(size) for name, size in _MEMORY.findall(status)}


class Meter:
    """Measures the resources that the processes of one program use together."""

    def __init__(self) -> None:
        self._ticks: dict[tuple[int, bytes], int] = {}
        self._reaped_before = _reaped_s()

    def usage(self, pids: set[int]) -> tuple[int, float, int]:
        """Returns (bytes of memory, seconds of CPU time, number of threads) of these processes together.

        CPU time is the larger of two sums. The sum over all processes ever seen misses processes that end between two calls.
        The sum over the living processes and all that were waited for misses ended processes that no process waits for.
        """
        memory = threads = waited = 0
        for pid in pids:
            fields = content(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            if not fields:
                continue
            ticks = [int(field) for field in fields[11:15]]
            self._ticks[pid, fields[19]] = sum(ticks[:2])
            waited += sum(ticks)
            threads += int(fields[17])
            memory += next(filter(None, map(_memory_kib, threads_of(pid))), 0)
        seconds = max(sum(self._ticks.values()) / _TICKS, waited / _TICKS + _reaped_s() - self._reaped_before)
        return memory << 10, seconds, threads


def _reaped_s() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _memory_kib(thread: str) -> int:
    """Returns the memory of a thread's process in KiB. Shared pages count by their share, or fully if the process hides its
    mappings."""
    sizes = memory_of(content(f"{thread}/status"))
    if sizes.get(b"RssShmem") and (share := _SHARE.search(content(f"{thread}/smaps_rollup"))):
        sizes[b"RssShmem"] = int(share[1])
    return sum(sizes.values())
