"""Measuring from outside: how long the phases of a step took, and how much memory was used."""

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
"""Blocks of a step that a timer remembers."""

Span = tuple[str, str, float, float]
"""(role, stage, begin, end): what a process did when, in seconds since 1970: those of several processes can be compared."""


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
        self._inner_s = 0.0  # of the phases within the one that is open
        self._began = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str, role: str = "", stage: str = "") -> Iterator[None]:
        """Counts the time of the ``with`` block for `phase`, also when it raises; a phase may come several times, and
        another one within it stops its clock. The block is a span of `role` too, under the name of `stage`.

        Whoever watches over the run sees the phase too (`tandem.api.activity`).
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
        """The blocks that have ended since the last call, in that order; the last `MOST_SPANS` of them."""
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def seconds(self, phase: str) -> float:
        """Seconds of this step so far."""
        return self._seconds.get(phase, 0.0)

    def metrics(self) -> dict[str, float]:
        """`time/<phase>_s` of each phase and `time/step_s` since the last call (or the construction); starts anew."""
        now = time.perf_counter()
        found = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()} | {"time/step_s": now - self._began}
        self._seconds, self._began = {}, now
        return found


def _peak_bytes(pid: int) -> int:
    """Largest resident size that a process has had; 0 where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024


def peak_memory_gib() -> float:
    """Sum of the peaks of this process and its living children, in GiB.

    An upper bound of the true peak: pages that processes share are counted once each, and peaks need not coincide.
    """
    here = psutil.Process()
    total = sum(_peak_bytes(process.pid) for process in [here, *here.children(recursive=True)])
    if total == 0:  # no /proc: macOS, where ru_maxrss is in bytes
        total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return total / GIB
