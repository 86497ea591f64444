"""Reads a trace of `tandem profile`: where time, memory, bytes and idle went, by stage, and the operators within each."""

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy

from tandem.api.profile import Trace
from tandem.tracking.profiler import Use

BETWEEN = "between stages"
ELSEWHERE = "engine's process"
"""The row for the operators of another process, which works beside the stages."""

SHOWN = 5
"""Operators that are shown of each stage."""

LITTLE = 0.02
"""Stages with less of a step are shown without their operators."""

GIB, MIB = 2**30, 2**20


class Piece(NamedTuple):
    """A time in which a span or an operator was the innermost of its thread; in microseconds."""

    start: float
    end: float
    name: str


class Operator(NamedTuple):
    """One operator within a stage; seconds and calls are those of a step."""

    name: str
    self_s: float
    calls: float


@dataclass
class StageUse:
    """One stage; seconds, calls and bytes are those of a step."""

    name: str
    calls: float = 0.0
    seconds: float = 0.0
    idle: float = 0.0
    """Share of its time in which the cores of this rank, or its GPU, did nothing for the run."""

    waits_s: float = 0.0
    """Seconds in which the main thread waited for others."""

    memory: int = 0
    gpu_memory: int = 0
    """The largest of all steps, in bytes."""

    moved: float = 0.0
    silent_s: float = 0.0
    """Seconds in which no operator ran in this process: Python, waiting, or programs of others."""

    operators: list[Operator] = field(default_factory=list)
    """Those with the most time first; kernels of the GPU where it has one."""


class SpanUse(NamedTuple):
    """A span that is no stage, such as a decode step of the engine; calls and seconds are those of a step."""

    name: str
    thread: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class ProfileTable:
    """All stages of the recorded steps, whose seconds add up to those of a step."""

    stages: list[StageUse]
    spans: list[SpanUse]
    step_s: float
    on_gpu: bool


def innermost(spans: Iterable[tuple[float, float, str]]) -> list[Piece]:
    """The pieces of nested spans (start, end, name) of one thread."""
    pieces: list[Piece] = []
    opened: list[tuple[float, str]] = []
    at = 0.0
    for start, end, name in sorted(spans, key=lambda one: (one[0], -one[1])):
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
    """Microseconds of each piece in which at least one of the intervals lasted."""
    curve: list[tuple[float, float]] = []  # the time that is covered up to an instant: straight between two of them
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
    """The growth of a curve in each piece."""
    if not at:
        return numpy.zeros(len(pieces))
    starts, ends = ([getattr(piece, name) for piece in pieces] for name in ("start", "end"))
    return numpy.interp(ends, at, values) - numpy.interp(starts, at, values)


def _is(event: Mapping[str, Any], *kinds: str) -> bool:
    return event.get("cat") == "user_annotation" and event["name"].startswith(kinds)


def _span(event: Mapping[str, Any]) -> tuple[float, float, str]:
    return event["ts"], event["ts"] + event["dur"], event["name"]


class _Reading:
    """The pieces of the recorded steps, and who began in which of them."""

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
        """The stage at an instant; None outside of the recorded steps."""
        place = bisect.bisect_right(self.starts, at) - 1
        return self.names[place] if place >= 0 and at < self.pieces[place].end else None

    def stage_of(self, event: Mapping[str, Any]) -> str | None:
        """The stage that an event belongs to; of the GPU's, the one that asked for it."""
        return self.stage(self._launched.get(event["args"].get("correlation"), event["ts"]))


def _stage_name(span: str) -> str:
    return BETWEEN if span.startswith("step: ") else span.removeprefix("stage: ")


def tabulate(trace: Trace, uses: Sequence[Use], cores: float, moved: Mapping[str, float]) -> ProfileTable:
    """The table of a trace. ``uses``: what was used meanwhile, of so many ``cores``; ``moved``: bytes of a step by stage,
    besides those that the trace knows."""
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
    for piece, name in zip(read.pieces, read.names, strict=True):  # with the instants just before and after it
        first, last = numpy.searchsorted(times, (piece.start, piece.end))
        for use in shifted[max(0, first - 1) : last + 1]:
            stages[name].memory = max(stages[name].memory, use.memory)
            stages[name].gpu_memory = max(stages[name].gpu_memory, use.gpu_memory)
    for event in (event for event in read.main if _is(event, "wait: ")):
        if (name := read.stage(event["ts"])) is not None:
            stages[name].waits_s += event["dur"] / read.count / 1e6
    for event in read.gpu:
        if (name := read.stage_of(event)) is not None:
            stages[name].moved += event["args"].get("bytes", 0) / read.count
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
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in read.events:
        if _is(event, "engine: ", "train: ", "record: ") and read.stage(event["ts"]) is not None:
            found[event["name"], threads.get(_thread(event), ELSEWHERE)].append(event["dur"])
    spans = [
        SpanUse(name, thread, len(each) / read.count, sum(each) / read.count / 1e6) for (name, thread), each in found.items()
    ]
    return sorted(spans, key=lambda span: -span.seconds)


# ------------------------------------------------------------------ as text


def text(table: ProfileTable) -> str:
    """The table for people."""
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
    whole = stage.seconds or table.step_s
    yield f"{stage.name}: {'kernels of the GPU' if table.on_gpu else 'operators'}, by the time that is their own"
    yield f"  {'s/step':>8}{'share':>8}{'calls':>10}"
    rows = list(stage.operators[:SHOWN])
    rest = stage.operators[SHOWN:]
    if rest:
        rows.append(Operator(f"({len(rest)} others)", sum(o.self_s for o in rest), sum(o.calls for o in rest)))
    for operator in rows:
        yield f"  {operator.self_s:>8.3f}{operator.self_s / whole:>8.1%}{operator.calls:>10.5g}  {operator.name}"
    if stage.seconds:
        yield f"  {stage.silent_s:>8.3f}{stage.silent_s / whole:>8.1%}{'':>10}  (no operator: Python, or waiting)"


def _bytes(number: float) -> str:
    if not number:
        return ""
    return f"{number / GIB:.2f} GiB" if number >= 0.1 * GIB else f"{number / MIB:.2f} MiB"
