"""Processes below this one: who they are, what they use, and how they end."""

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
"""Most rounds of freezing; each finds what was forked during the one before, so few are ever needed."""


def content(path: str) -> bytes:
    """A file of /proc as bytes, which a program's own words in it may be; nothing once the process has ended."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def threads_of(pid: int) -> list[str]:
    """Folders in /proc of its threads. The first may have ended before the others, and shows nothing then."""
    with contextlib.suppress(OSError):
        return [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    return []


def children_of(pid: int) -> set[int]:
    """Its children, by whatever thread."""
    return {int(child) for thread in threads_of(pid) for child in content(f"{thread}/children").split()}


def descendants_of(pid: int) -> set[int]:
    """Everything below it."""
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
    """Kills everything below this process, which must be pid 1 of its namespace or own all orphans (a subreaper).

    ``spare``: children that live on, with everything below them.
    """
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # at once for all, so nothing can fork away
        return
    stopped: set[int] = set()
    for _ in range(ROUNDS):  # what is stopped cannot fork
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
    """Has the kernel send this process a signal when its parent dies; ``parent``: who that should be."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, number)
    if os.getppid() not in (parent, 0):  # 0: in another namespace
        os.kill(os.getpid(), number)


def end_all() -> None:
    """Kills and reaps everything below this process; what is born meanwhile as well."""
    while True:
        kill_below()
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def memory_of(status: bytes) -> dict[bytes, int]:
    """Kilobytes by kind, from the file ``status`` of a thread; empty: its process has no memory any more."""
    return {name: int(size) for name, size in _MEMORY.findall(status)}


class Meter:
    """Adds up what the processes of one program use."""

    def __init__(self) -> None:
        self._ticks: dict[tuple[int, bytes], int] = {}
        self._reaped_before = _reaped_s()

    def usage(self, pids: set[int]) -> tuple[int, float, int]:
        """(bytes of memory, seconds of CPU time, threads) together.

        CPU time: of all that were ever seen, or of the living and all that were waited for, whichever is more: the first
        misses processes that end between two looks, the second those that nobody waits for.
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
    """Memory of a thread's process; of shared pages its share, or all of them if it does not show its mappings."""
    sizes = memory_of(content(f"{thread}/status"))
    if sizes.get(b"RssShmem") and (share := _SHARE.search(content(f"{thread}/smaps_rollup"))):
        sizes[b"RssShmem"] = int(share[1])
    return sum(sizes.values())
