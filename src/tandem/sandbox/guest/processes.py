"""Processes below this one: who they are, what they use, and how they end."""

import contextlib
import os
import signal
from collections.abc import Collection

from tandem.sandbox.guest import kernel

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
ROUNDS = 200
"""Most rounds of freezing; each finds what was forked during the one before, so few are ever needed."""


def children_of(pid: int) -> set[int]:
    """Its children, by whatever thread."""
    children: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children.update(map(int, file.read().split()))
    return children


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


def usage(pids: set[int]) -> tuple[int, float, int]:
    """(bytes of memory, seconds of CPU time, threads) of living processes together. Shared memory counts once."""
    private = shared = threads = 0
    seconds = 0.0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{pid}/statm") as file:
                resident, in_common = map(int, file.read().split()[1:3])
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            private += resident - in_common
            shared = max(shared, in_common)
            seconds += sum(map(int, fields[11:15])) / _TICKS
            threads += int(fields[17])
    return (private + shared) * _PAGE, seconds, threads
