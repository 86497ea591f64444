"""Records some steps of a run for `tandem profile`: a trace of the operators, and every 10 ms processor time and memory.

`tabulate` makes the table from the trace: time, memory, moved bytes and idle time by stage, with the operators.
"""

import bisect
import gzip
import itertools
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import orjson
import psutil
import torch

from tandem.api.activity import ProcessProfile, Trace, span
from tandem.config.errors import ConfigError

SAMPLE_S = 0.01
BEFORE = 2
"""Number of steps before the recorded steps: one to warm up, and one that is timed without the profiler."""


class Use(NamedTuple):
    """Processor time and memory of this process and its children, at one instant."""

    at_us: float
    """Microseconds since 1970."""

    cpu_s: float
    """Processor time so far, in seconds."""

    memory: int
    """Resident memory in bytes."""

    gpu_memory: int
    """Peak of the memory that torch allocated on the GPU since the previous sample, in bytes."""


class Sampler:
    """A thread that takes a `Use` every `SAMPLE_S`, from its construction until `stop`."""

    def __init__(self) -> None:
        this_process = psutil.Process()
        self._processes = [this_process, *this_process.children(recursive=True)]
        self._seconds: dict[int, float] = {}
        self.uses: list[Use] = [self._use()]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="profile-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> list[Use]:
        """Ends the thread and returns all samples in order."""
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
            except psutil.Error:  # the process has ended; its processor time still counts
                self._processes.remove(process)
        self._seconds[os.getpid()] = time.process_time()  # finer than psutil's ticks of 10 ms
        return Use(time.time_ns() / 1e3, sum(self._seconds.values()), memory, _gpu_peak())


def _gpu_peak() -> int:
    if not torch.cuda.is_initialized():
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


@dataclass
class Profiler:
    """Records the steps of a run (a `tandem.trainers.loop.Watch`)."""

    name: str
    """The name of this process in the trace."""

    steps_s: dict[int, float] = field(default_factory=dict)
    """Seconds of each step, including the steps before the recorded ones."""

    plain: int | None = None
    """The step that was timed without the profiler; None if the run has too few steps."""

    recorded: list[int] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    trace: Trace = field(default_factory=dict)

    def steps(
        self, numbers: Iterable[int], begin: Callable[[], None] = lambda: None, end: Callable[[], None] = lambda: None
    ) -> Iterator[int]:
        """Yields the numbers of the steps. Records all steps except the first `BEFORE` (fewer in a short run). ``begin`` and
        ``end`` start and end the profile of another process.

        Raises:
            ConfigError: there are fewer than two steps.
        """
        steps = list(numbers)
        if len(steps) < 2:
            raise ConfigError(
                f"a profile needs two steps, one of them to warm up, and this run has {len(steps)}: raise total_train_steps "
                "or total_train_epochs"
            )
        before = steps[: min(BEFORE, len(steps) - 1)]
        self.plain = before[1] if len(before) > 1 else None
        for number in before:
            yield from self._timed(number)
        sampler, profile = Sampler(), ProcessProfile()
        begin()
        self.recorded = steps[len(before) :]
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
    """Adds the events of another process to a trace, with their times shifted to its clock."""
    shift_us = (other["baseTimeNanoseconds"] - trace["baseTimeNanoseconds"]) / 1e3
    events = other["traceEvents"]
    trace["traceEvents"] += [event | {"ts": event["ts"] + shift_us} if "ts" in event else event for event in events]


def counters(trace: Trace, uses: Iterable[Use]) -> None:
    """Adds the curve of memory to a trace."""
    start_us, pid = trace["baseTimeNanoseconds"] / 1e3, os.getpid()
    for use in uses:
        sizes = {"resident": use.memory, **({"gpu": use.gpu_memory} if use.gpu_memory else {})}
        figures = {name: round(size / 2**30, 4) for name, size in sizes.items()}
        trace["traceEvents"].append(
            {"ph": "C", "name": "memory (GiB)", "pid": pid, "tid": 0, "ts": use.at_us - start_us, "args": figures}
        )


def write(trace: Trace, file: Path) -> None:
    """Writes a trace, compressed with gzip."""
    with gzip.open(file, "wb", compresslevel=5) as packed:
        packed.write(orjson.dumps(trace))


BETWEEN = "between stages"
ELSEWHERE = "engine's process"
"""Name of the row for the operators of the engine's process, which runs in parallel with the stages."""

SHOWN = 5
"""Maximum number of operators that are shown for each stage."""

LITTLE = 0.02
"""Stages with a smaller share of a step's time are shown without their operators."""

GIB, MIB = 2**30, 2**20


class Piece(NamedTuple):
    """An interval in which one span or operator was the innermost of its thread. Times are in microseconds."""

    start: float
    end: float
    name: str


class Operator(NamedTuple):
    """One operator within a stage; seconds and calls are means per step."""

    name: str
    self_s: float
    calls: float


@dataclass
class StageUse:
    """The resources that a stage used; seconds, calls and moved bytes are means per step."""

    name: str
    calls: float = 0.0
    seconds: float = 0.0
    idle: float = 0.0
    """Share of the stage's time in which the cores of this rank, or its GPU, did nothing for the run."""

    waits_s: float = 0.0
    """Seconds in which the main thread waited for other threads or processes."""

    memory: int = 0
    gpu_memory: int = 0
    """`memory` and `gpu_memory` are in bytes; each is the largest value of all steps."""

    moved: float = 0.0
    silent_s: float = 0.0
    """Seconds in which no operator ran in this process: Python code, waiting, or other programs."""

    operators: list[Operator] = field(default_factory=list)
    """Operators, or kernels if the rank has a GPU, the most time-consuming first."""


class SpanUse(NamedTuple):
    """A span that is not a stage, such as a decode step of the engine; calls and seconds are means per step."""

    name: str
    thread: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class ProfileTable:
    """All stages and spans of the recorded steps. The seconds of the stages add up to ``step_s``, the mean of a step."""

    stages: list[StageUse]
    spans: list[SpanUse]
    step_s: float
    on_gpu: bool


def innermost(spans: Iterable[tuple[float, float, str]]) -> list[Piece]:
    """Splits the nested spans (start, end, name) of one thread into pieces, each with the name of its innermost span."""
    pieces: list[Piece] = []
    opened: list[tuple[float, str]] = []
    at = 0.0
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while opened and opened[-1][0] <= start:
            stop, inner = opened.pop()
            pieces.append(Piece(at, stop, inner))
            at = max(at, stop)
        if opened:
            pieces.append(Piece(at, start, opened[-1][1]))
        opened.append((end, name))
        at = start
    while opened:
        stop, inner = opened.pop()
        pieces.append(Piece(at, stop, inner))
        at = max(at, stop)
    return [piece for piece in pieces if piece.end > piece.start]


def covered(intervals: Iterable[tuple[float, float]], pieces: Sequence[Piece]) -> numpy.ndarray:
    """Returns for each piece the number of microseconds that the union of the intervals covers."""
    curve: list[tuple[float, float]] = []  # (instant, time covered until then), linear between two instants
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end <= reached:
            continue
        if start > reached:
            curve.append((start, total))
        total += end - max(start, reached)
        reached = end
        curve.append((end, total))
    return _grown([at for at, _ in curve], [value for _, value in curve], pieces)


def _grown(at: Sequence[float], values: Sequence[float], pieces: Sequence[Piece]) -> numpy.ndarray:
    """Returns for each piece the growth of a curve during the piece. The curve has ``values`` at the instants ``at``."""
    if not at:
        return numpy.zeros(len(pieces))
    starts, ends = ([getattr(piece, name) for piece in pieces] for name in ("start", "end"))
    return numpy.interp(ends, at, values) - numpy.interp(starts, at, values)


def _is(event: Mapping[str, Any], *kinds: str) -> bool:
    return event.get("cat") == "user_annotation" and event["name"].startswith(kinds)


def _span(event: Mapping[str, Any]) -> tuple[float, float, str]:
    return event["ts"], event["ts"] + event["dur"], event["name"]


class _Reading:
    """The pieces of the recorded steps, and the events that begin in each of them."""

    def __init__(self, trace: Trace):
        self.events = [event for event in trace["traceEvents"] if event["ph"] == "X" and "cat" in event]
        steps = [event for event in self.events if _is(event, "step: ")]
        self.process, main = steps[0]["pid"], steps[0]["tid"]
        self.main = [event for event in self.events if (event["pid"], event["tid"]) == (self.process, main)]
        self.count = len(steps)
        self.step_us = sum(event["dur"] for event in steps) / self.count
        inside = [event for event in self.main if _is(event, "step: ", "stage: ", "wake: ")]
        self.pieces = innermost(map(_span, inside))
        self.names = [_stage_name(piece.name) for piece in self.pieces]
        self.starts = [piece.start for piece in self.pieces]
        self.calls = Counter(_stage_name(event["name"]) for event in inside)
        self.calls[BETWEEN] = 0
        launches = [event for event in self.events if event["cat"] in ("cuda_runtime", "cuda_driver")]
        self._launched = {event["args"].get("correlation"): event["ts"] for event in launches}
        self.gpu = [event for event in self.events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
        self.operators = [event for event in self.events if event["cat"] == "cpu_op" or _is(event, "kernel: ")]

    def stage(self, at: float) -> str | None:
        """Returns the stage at an instant, or None outside of the recorded steps."""
        place = bisect.bisect_right(self.starts, at) - 1
        return self.names[place] if place >= 0 and at < self.pieces[place].end else None

    def stage_of(self, event: Mapping[str, Any]) -> str | None:
        """Returns the stage of an event. For an event of the GPU this is the stage that launched it."""
        return self.stage(self._launched.get(event["args"].get("correlation"), event["ts"]))


def _stage_name(span: str) -> str:
    return BETWEEN if span.startswith("step: ") else span.removeprefix("stage: ")


def tabulate(trace: Trace, uses: Sequence[Use], cores: float, moved: Mapping[str, float]) -> ProfileTable:
    """Builds the table of a trace.

    Args:
        trace: the recorded events.
        uses: the samples of processor time and memory, from the same time.
        cores: number of cores that this rank may use.
        moved: bytes per step by stage, in addition to the copies in the trace.
    """
    read = _Reading(trace)
    stages = {name: StageUse(name, calls / read.count, moved=moved.get(name, 0.0)) for name, calls in read.calls.items()}
    ours = [_span(event)[:2] for event in read.operators if event["pid"] == read.process]
    shifted = [use._replace(at_us=use.at_us - trace["baseTimeNanoseconds"] / 1e3) for use in uses]
    times = [use.at_us for use in shifted]
    busy_us = _grown(times, [use.cpu_s * 1e6 / cores for use in uses], read.pieces)
    busy_us = covered((_span(event)[:2] for event in read.gpu), read.pieces) if read.gpu else busy_us
    silent_us = [piece.end - piece.start for piece in read.pieces] - covered(ours, read.pieces)
    busy: dict[str, float] = defaultdict(float)
    for piece, name, used, silent in zip(read.pieces, read.names, busy_us, silent_us, strict=True):
        stages[name].seconds += (piece.end - piece.start) / read.count / 1e6
        stages[name].silent_s += silent / read.count / 1e6
        busy[name] += used / read.count / 1e6
    for name, stage in stages.items():
        stage.idle = max(0.0, 1.0 - busy[name] / stage.seconds) if stage.seconds else 0.0
    for piece, name in zip(
        read.pieces, read.names, strict=True
    ):  # the samples within, just before and just after each piece
        first, last = numpy.searchsorted(times, (piece.start, piece.end))
        for use in shifted[max(0, first - 1) : last + 1]:
            stages[name].memory = max(stages[name].memory, use.memory)
            stages[name].gpu_memory = max(stages[name].gpu_memory, use.gpu_memory)
    for event in (event for event in read.main if _is(event, "wait: ")):
        if (waiting := read.stage(event["ts"])) is not None:
            stages[waiting].waits_s += event["dur"] / read.count / 1e6
    for event in read.gpu:
        if (moving := read.stage_of(event)) is not None:
            stages[moving].moved += event["args"].get("bytes", 0) / read.count
    _add_operators(read, stages)
    ordered = sorted(stages.values(), key=lambda stage: (stage.name in (BETWEEN, ELSEWHERE), -stage.seconds))
    return ProfileTable(ordered, _spans(trace, read), read.step_us / 1e6, bool(read.gpu))


def _add_operators(read: _Reading, stages: dict[str, StageUse]) -> None:
    rows: dict[str | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0]))
    for event in read.gpu:
        row = rows[read.stage_of(event)][event["name"]]
        row[0] += event["dur"]
        row[1] += 1
    on_gpu = set(rows)
    by_thread = itertools.groupby(sorted(read.operators, key=_thread), key=_thread)
    for (process, _), group in by_thread:
        events = list(group)
        timed = [(piece.start, piece.name, piece.end - piece.start, 0) for piece in innermost(map(_span, events))]
        for at, operator, us, calls in (*timed, *((event["ts"], event["name"], 0.0, 1) for event in events)):
            stage = read.stage(at)
            where = ELSEWHERE if stage is not None and process != read.process else stage
            if where not in on_gpu:
                row = rows[where][operator]
                row[0] += us
                row[1] += calls
    for name in rows.keys() - {None}:
        stages.setdefault(str(name), StageUse(str(name))).operators = sorted(
            (
                Operator(operator.replace("kernel: ", "tandem::"), us / read.count / 1e6, calls / read.count)
                for operator, (us, calls) in rows[name].items()
            ),
            key=lambda operator: -operator.self_s,
        )


def _thread(event: Mapping[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]


def _spans(trace: Trace, read: _Reading) -> list[SpanUse]:
    marks = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    threads = {(mark["pid"], mark["tid"]): mark["args"]["name"] for mark in marks if mark["pid"] == read.process}
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in read.events:
        if _is(event, "engine: ", "train: ", "record: ") and read.stage(event["ts"]) is not None:
            durations[event["name"], threads.get(_thread(event), ELSEWHERE)].append(event["dur"])
    spans = [
        SpanUse(name, thread, len(each) / read.count, sum(each) / read.count / 1e6)
        for (name, thread), each in durations.items()
    ]
    return sorted(spans, key=lambda span: -span.seconds)


# ------------------------------------------------------------------ as text


def text(table: ProfileTable) -> str:
    """Writes the table as text."""
    gpu = any(stage.gpu_memory for stage in table.stages)
    heads = ["calls", "s/step", "share", "idle", "waits s", "memory", *(["GPU memory"] if gpu else []), "moved"]
    width = max(len(stage.name) for stage in table.stages) + 2
    lines = [f"{'stage':<{width}}" + "".join(f"{head:>12}" for head in heads)]
    for stage in (stage for stage in table.stages if stage.name != ELSEWHERE):
        memory = [_bytes(stage.memory), *([_bytes(stage.gpu_memory)] if gpu else [])]
        cells = [f"{stage.calls:.3g}" if stage.calls else "", f"{stage.seconds:.3f}", f"{stage.seconds / table.step_s:.1%}"]
        cells += [f"{stage.idle:.0%}", f"{stage.waits_s:.3f}" if stage.waits_s else "", *memory, _bytes(stage.moved)]
        lines.append(f"{stage.name:<{width}}" + "".join(f"{cell:>12}" for cell in cells))
    lines.append(f"{'step':<{width}}{'':>12}{table.step_s:>12.3f}{'100.0%':>12}")
    if table.spans:
        lines += ["", f"{'within and beside them':<26}{'thread':<26}{'calls':>8}{'s/step':>10}"]
        lines += [f"{span.name:<26}{span.thread:<26}{span.calls:>8.4g}{span.seconds:>10.3f}" for span in table.spans]
    for stage in table.stages:
        if stage.operators and (stage.seconds >= LITTLE * table.step_s or stage.name == ELSEWHERE):
            lines += ["", *_operators(stage, table)]
    return "\n".join(lines)


def _operators(stage: StageUse, table: ProfileTable) -> Iterable[str]:
    total_s = stage.seconds or table.step_s
    yield f"{stage.name}: {'kernels of the GPU' if table.on_gpu else 'operators'}, by their own time"
    yield f"  {'s/step':>8}{'share':>8}{'calls':>10}"
    rows = list(stage.operators[:SHOWN])
    others = stage.operators[SHOWN:]
    if others:
        rows.append(Operator(f"({len(others)} others)", sum(o.self_s for o in others), sum(o.calls for o in others)))
    for operator in rows:
        yield f"  {operator.self_s:>8.3f}{operator.self_s / total_s:>8.1%}{operator.calls:>10.5g}  {operator.name}"
    if stage.seconds:
        yield f"  {stage.silent_s:>8.3f}{stage.silent_s / total_s:>8.1%}{'':>10}  (no operator: Python, or waiting)"


def _bytes(number: float) -> str:
    if not number:
        return ""
    return f"{number / GIB:.2f} GiB" if number >= 0.1 * GIB else f"{number / MIB:.2f} MiB"
