"""Records some steps of a run: what it computed, and every few milliseconds what it used."""

import gzip
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import orjson
import psutil
import torch

from tandem.api.activity import span
from tandem.api.profile import ProcessProfile, Trace
from tandem.config.errors import ConfigError

SAMPLE_S = 0.01
BEFORE = 2
"""Steps before those that are recorded: one warms up, and one is timed without the profiler."""


class Use(NamedTuple):
    """The use of the machine by this process and its children, at an instant."""

    at_us: float
    """Microseconds since 1970."""

    cpu_s: float
    """Processor time so far."""

    memory: int
    """Resident bytes."""

    gpu_memory: int
    """Bytes that torch had allocated on its GPU at most since the instant before."""


class Sampler:
    """A thread that notes what is used, between its construction and `stop`."""

    def __init__(self) -> None:
        here = psutil.Process()
        self._processes = [here, *here.children(recursive=True)]
        self._seconds: dict[int, float] = {}
        self.uses: list[Use] = [self._use()]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="profile-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> list[Use]:
        """Ends it; gives all instants in order."""
        self._ended.set()
        self._thread.join()
        return self.uses

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(SAMPLE_S)
            self.uses.append(self._use())

    def _use(self) -> Use:
        memory = 0
        for process in list(self._processes):
            try:
                with process.oneshot():
                    memory += process.memory_info().rss
                    self._seconds[process.pid] = sum(process.cpu_times()[:2])
            except psutil.Error:  # it has ended; the seconds that it used stay
                self._processes.remove(process)
        self._seconds[os.getpid()] = time.process_time()  # the system counts in ticks of 10 ms
        return Use(time.time_ns() / 1e3, sum(self._seconds.values()), memory, _gpu_peak())


def _gpu_peak() -> int:
    if not torch.cuda.is_initialized():
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


@dataclass
class Profiler:
    """Watches the steps of a run (`tandem.trainers.loop.Watch`)."""

    name: str
    """The name of this process in the trace."""

    steps_s: dict[int, float] = field(default_factory=dict)
    """Seconds of each step, those before included."""

    plain: int | None = None
    """The step that was timed without the profiler; None if the run had no step for it."""

    recorded: list[int] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    trace: Trace = field(default_factory=dict)

    def steps(
        self, numbers: Iterable[int], begin: Callable[[], None] = lambda: None, end: Callable[[], None] = lambda: None
    ) -> Iterator[int]:
        """Hands the numbers on, and records all but those that come before. ``begin``, ``end``: begin and end the profile
        of another process.

        Raises:
            ConfigError: there is one step only.
        """
        every = list(numbers)
        if len(every) < 2:
            raise ConfigError(
                f"a profile needs two steps, one of them to warm up, and this run has {len(every)}: raise total_train_steps "
                "or total_train_epochs"
            )
        before = every[: min(BEFORE, len(every) - 1)]
        self.plain = before[1] if len(before) > 1 else None
        for number in before:
            yield from self._timed(number)
        sampler, profile = Sampler(), ProcessProfile()
        begin()
        self.recorded = every[len(before) :]
        for number in self.recorded:
            yield from self._timed(number)
        end()
        self.trace, self.uses = profile.stop(self.name), sampler.stop()

    def _timed(self, number: int) -> Iterator[int]:
        began = time.perf_counter()
        with span(f"step: {number}"):
            yield number
        self.steps_s[number] = time.perf_counter() - began


def joined(trace: Trace, other: Trace) -> None:
    """Puts the events of another process into a trace."""
    later_us = (other["baseTimeNanoseconds"] - trace["baseTimeNanoseconds"]) / 1e3
    events = other["traceEvents"]
    trace["traceEvents"] += [event | {"ts": event["ts"] + later_us} if "ts" in event else event for event in events]


def counters(trace: Trace, uses: Iterable[Use]) -> None:
    """Puts the curve of memory into a trace."""
    start_us, pid = trace["baseTimeNanoseconds"] / 1e3, os.getpid()
    for use in uses:
        held = {"resident": use.memory, **({"gpu": use.gpu_memory} if use.gpu_memory else {})}
        figures = {name: round(number / 2**30, 4) for name, number in held.items()}
        trace["traceEvents"].append(
            {"ph": "C", "name": "memory (GiB)", "pid": pid, "tid": 0, "ts": use.at_us - start_us, "args": figures}
        )


def write(trace: Trace, file: Path) -> None:
    """Writes a trace, packed with gzip."""
    with gzip.open(file, "wb", compresslevel=5) as packed:
        packed.write(orjson.dumps(trace))
