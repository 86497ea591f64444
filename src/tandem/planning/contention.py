"""The share of the processors' time that other processes took from a measurement."""

import hashlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from tandem.config.cores import usable_cores

ONE_THREAD_S = 0.3


class _Spent(NamedTuple):
    """Seconds so far: of this process's threads on a processor, and ready to run without one; of the machine's processors,
    stolen by others of the same host, and at work."""

    computing: float
    waiting: float
    stolen: float
    working: float


class Contention:
    """Watches from its construction on. ``threads``: so many compute at once."""

    def __init__(self, threads: int):
        self._before = _spent() if threads <= usable_cores() else None  # more than cores wait for each other

    def share(self) -> float:
        """The part of the wanted time that others took since then, from 0 to 1."""
        now = None if self._before is None else _spent()
        if self._before is None or now is None:
            return _taken_from_one_thread()
        computing, waiting, stolen, working = (after - before for after, before in zip(now, self._before, strict=True))
        return max(waiting / max(computing + waiting, 1e-9), stolen / max(working + stolen, 1e-9))


def _spent() -> _Spent | None:
    """Seconds of processor time spent so far; None if the system does not tell (not Linux)."""
    try:
        threads = [file.read_text().split() for file in Path("/proc/self/task").glob("*/schedstat")]
        machine = [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    if not threads or len(machine) < 8:
        return None
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = machine[:8]
    tick = 1 / os.sysconf("SC_CLK_TCK")
    computing, waiting = (sum(int(thread[column]) for thread in threads) / 1e9 for column in (0, 1))
    working = (user + nice + system + interrupts + soft_interrupts) * tick
    return _Spent(computing, waiting - _throttled_s(), stolen * tick, working)


def _throttled_s() -> float:
    """Seconds that a container's own limit made its threads wait: a run will wait as long, so it is no disturbance."""
    try:
        lines = Path("/sys/fs/cgroup/cpu.stat").read_text().split()
        return int(lines[lines.index("throttled_usec") + 1]) / 1e6
    except (OSError, ValueError):
        return 0.0


def _taken_from_one_thread() -> float:
    """The same of one thread that hashes for a moment, from its processor's time and the clock's."""
    data, began, used = bytes(1 << 20), time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < ONE_THREAD_S:
        hashlib.sha256(data).digest()
    return max(0.0, 1.0 - (time.thread_time() - used) / (time.perf_counter() - began))
