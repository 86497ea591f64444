"""Ends a process together with everything that it started."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
FREEZE_ROUNDS = 20
"""Number of times that the tree is walked again for processes that were forked meanwhile."""


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants (Linux), so that one that detaches is still found."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def computes(pid: int) -> bool:
    """Says whether a process, or one that it started, is running on a core or waiting for one.

    False where all of them sleep, wait for a network or have ended, and on systems without /proc.
    """
    with contextlib.suppress(OSError, IndexError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            if (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
            if any(computes(int(child)) for child in (thread / "children").read_text().split()):
                return True
    return False


def children_of(pid: int, recursive: bool = True) -> set[int]:
    """Process ids of the children, none when the process is gone."""
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=recursive)}
    except psutil.NoSuchProcess:
        return set()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_tree(pid: int, *, root: bool = True, spare: Collection[int] = ()) -> None:
    """Kills a process (unless ``root`` is false) and its descendants, except those in ``spare``.

    Everything is stopped before anything is killed: what is stopped cannot fork, and an orphan cannot slip away from a
    parent that is still there to own it.
    """
    stopped: set[int] = set()
    if root:
        _signal(pid, signal.SIGSTOP)
    for _ in range(FREEZE_ROUNDS):
        found = children_of(pid) - stopped - set(spare)
        if not found:
            break
        for child in found:
            _signal(child, signal.SIGSTOP)
        stopped |= found
    for victim in [*stopped, *([pid] if root else [])]:
        _signal(victim, signal.SIGKILL)
