"""Measures the time of the phases of a step, and the peak of memory."""

import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tandem.api.activity import within

GIB = 2**30

MOST_SPANS = 1000
"""Maximum number of blocks of a step that a timer stores."""

Span = tuple[str, str, float, float]
"""(role, stage, begin, end) of a block in a process. Times are in seconds since 1970, so that spans of several processes can
be compared."""


class PhaseTimer:
    """Adds up wall time by phase, from one `metrics` call to the next.

    Example::

        with timer("generate"):
            …
        timer.metrics()  # {"time/generate_s": 1.2, "time/step_s": 1.3}
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._inner_s = 0.0  # time of the phases within the open phase
        self._began = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str, role: str = "", stage: str = "") -> Iterator[None]:
        """Adds the time of the ``with`` block to ``phase``, also if the block raises. A phase may come several times; the
        time of a phase within another is not counted for the outer one. The block is also a span (``role``, ``stage``; both
        are ``phase`` by default), and is announced to `tandem.api.activity`, which supervision reads.
        """
        at, began, outer = time.time(), time.perf_counter(), self._inner_s
        self._inner_s = 0.0
        try:
            with within(phase):
                yield
        finally:
            passed = time.perf_counter() - began
            self._seconds[phase] = self._seconds.get(phase, 0.0) + passed - self._inner_s
            self._inner_s = outer + passed
            self._spans.append((role or phase, stage or phase, at, at + passed))

    def spans(self) -> list[Span]:
        """Returns the blocks that have ended since the last call, in order, at most the last `MOST_SPANS`."""
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def seconds(self, phase: str) -> float:
        """Returns the seconds of a phase since the last `metrics` call."""
        return self._seconds.get(phase, 0.0)

    def metrics(self) -> dict[str, float]:
        """Returns `time/<phase>_s` of each phase and `time/step_s` since the last call (or the construction), and resets."""
        now = time.perf_counter()
        times = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()} | {"time/step_s": now - self._began}
        self._seconds, self._began = {}, now
        return times


def _peak_bytes(pid: int) -> int:
    """Returns the peak resident size of a process in bytes; 0 if the system does not report it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024


def peak_memory_gib() -> float:
    """Returns the sum of the peaks of this process and its living children, in GiB.

    The result is an upper bound of the true peak: shared pages count for each process, and the peaks may be at different
    times.
    """
    this_process = psutil.Process()
    total = sum(_peak_bytes(process.pid) for process in [this_process, *this_process.children(recursive=True)])
    if total == 0:  # no /proc: macOS, where ru_maxrss is in bytes
        total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return total / GIB
