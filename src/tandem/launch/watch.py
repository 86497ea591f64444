"""Rules that decide whether ranks still make progress, from their reports and the system's counters. They start no process
and read no clock.

Three faults, the fastest to detect first:

- *silent*: a rank has reported nothing for `SILENT_S`, and the system says that it is stopped or asleep; or a rank reports
  that it cannot reach another machine;
- *wedged*: every rank waits for the others, or is idle in the middle of training while they wait, for `WEDGED_S` and far
  longer than ever before; not in the first step, in which kernels are compiled and ranks meet for the first time;
- *stalled*: for `recover.stalled_after_s` no rank has made any progress that counts.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil


@dataclass(frozen=True)
class LaunchEnd:
    """The end of a group of ranks."""

    code: int
    """The exit status of the command; 0: success."""

    cause: str = ""
    """The reason of a failure, in one sentence; empty for success."""

    rank: int = 0
    """The rank that failed first."""

    stacks: str = ""
    """Stacks of all ranks, if a rank did not answer or made no progress."""

    may_pass: bool = False
    """True if a restart may succeed."""

    step: int = 0
    """The step in which the group failed, as far as rank 0 reported it."""

    has_folder: bool = False
    """True if the group had opened the run folder when it failed."""

    at: float = 0.0
    """Time at which the error was raised, in seconds since 1970; 0: no error was raised, the rank was killed."""


Record = Callable[[LaunchEnd, int | None], None]
"""Records how a group failed, and the number of the restart that follows; None: none follows."""


SILENT_S = 15.0
WEDGED_S = 18.0
GAPS = 3.0
"""Ranks count as wedged only if they have waited for this many times the longest gap that any rank had between two counts of
progress in training."""

START_S = 600.0
"""Shortest time limit for the first report of a rank, in seconds."""

WINDOW_S = 2.0
"""Seconds over which processor use is measured."""

IDLE_SHARE = 0.03
"""Share of one core. A rank that uses less processor time, and reads and writes less than `IDLE_BYTES_PER_S`, is idle."""

IDLE_BYTES_PER_S = 100_000

OTHER_RANKS = "the other ranks"
"""Value of `RankReport.waits` if a rank waits for all other ranks."""

WATCHED = ("train",)
"""Phases in which a rank can wait only for the processor and for other ranks."""

MAX_STEP_S = 1.0
"""Most seconds that one `Watch.look` adds to the clock, because after a longer pause the whole machine was asleep."""


class RankReport(NamedTuple):
    """A rank's report about itself, twice a second."""

    count: int = 0  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    phase: str = "start"
    step: int = 0
    waits: str = ""
    place: int = 0
    """A number that changes with the place of the main thread in its code."""

    spins: bool = False
    """True if waiting for others uses the processor too, as it does on a GPU."""

    cut_off: str = ""
    """A sentence about the machine that this rank can no longer reach; empty if it reaches all machines."""

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> "RankReport":
        return cls(**{name: words[name] for name in cls._fields if name in words})


@dataclass(frozen=True)
class Fault:
    """The reason why a group of ranks is ended."""

    kind: Literal["silent", "wedged", "stalled"]
    rank: int
    """The rank that most probably caused the fault."""

    text: str


class Used(NamedTuple):
    """The operating system's counters of one rank."""

    seconds: float = 0.0
    """Seconds of processor time so far."""

    moved: int = 0
    """Bytes read and written."""

    below: float | None = None
    """Processor seconds of its child processes, which compile, load or score for it; None: not measured."""

    on_disk: bool = False
    """True if one of the rank's threads waits for a disk."""

    def busy_since(self, before: "Used", window_s: float, spins: bool) -> bool:
        """True if the rank worked in the ``window_s`` seconds since ``before``. ``spins``: ignore its own processor time,
        because waiting uses the processor too."""
        own_s = 0.0 if spins else self.seconds - before.seconds
        below_s = 0.0 if self.below is None or before.below is None else self.below - before.below
        moves = self.moved - before.moved >= IDLE_BYTES_PER_S * window_s
        return self.on_disk or moves or max(own_s, below_s) >= IDLE_SHARE * window_s


@dataclass
class _Rank:
    number: int
    """Its number in the run."""

    report: RankReport | None = None
    heard_at: float = 0.0
    seconds: float = 0.0
    counted_at: float = 0.0
    active_at: float = 0.0
    longest: float = 0.0
    """Longest gap between two counts of progress in training, in seconds."""

    first_step: int = 0
    """The first step that it reported; 0: none yet."""

    window: tuple[float, "Used"] = field(default_factory=lambda: (0.0, Used()))
    """Beginning of the measured window, and the system's counters at that time."""


class Watch:
    """Watches the ranks of one group. Times ``now`` are in seconds, from any clock that never goes back."""

    def __init__(
        self,
        count: int,
        stalled_after_s: float | None,
        *,
        silent_s: float = SILENT_S,
        wedged_s: float = WEDGED_S,
        first: int = 0,
        world: int | None = None,
    ):
        """Begins to watch ``count`` ranks.

        Args:
            count: number of ranks in the group.
            stalled_after_s: longest time without progress; None: silence is the only fault.
            silent_s: see `SILENT_S`.
            wedged_s: see `WEDGED_S`.
            first: number of the group's first rank among the ``world`` ranks of the run. Methods number the ranks of the
                group from 0; faults and messages use the numbers of the run.
        """
        self._world = world or count
        self._ranks = [_Rank(number) for number in range(first, first + count)]
        self._stalled_after_s, self._silent_s, self._wedged_s = stalled_after_s, silent_s, wedged_s
        self._clock = 0.0
        self._looked_at: float | None = None
        self.step = 0
        """The last step that rank 0 reported."""

        self.has_folder = False
        """True if rank 0 has opened the run folder."""

    def stands(self, rank: int) -> bool:
        """True if a rank has made no progress for `WINDOW_S`, so that the work of its child processes matters."""
        return self._clock - self._ranks[rank].counted_at > WINDOW_S

    def hear(self, rank: int, report: RankReport, used: Used) -> None:
        """Processes a rank's newest report and the system's counters of the rank."""
        state, now = self._ranks[rank], self._clock
        state.heard_at, state.seconds = now, used.seconds
        state.first_step = state.first_step or report.step
        before = state.report
        state.report = report
        if state.number == 0 and report.phase != "start":
            self.step, self.has_folder = max(self.step, report.step), True
        if before is None or (before.count, before.phase) != (report.count, report.phase):
            # the longest normal gap sets the limit of `_wedged`, because large models take long between counts
            if before is not None and before.phase in WATCHED:
                state.longest = max(state.longest, now - state.counted_at)
            state.counted_at = state.active_at = now
            state.window = (now, used)
            return
        # Busy waiting uses the processor, so only a change of the main thread's place in its code shows work.
        if report.spins and before.place != report.place:
            state.active_at = now
        began, then = state.window
        if now - began >= WINDOW_S:
            state.active_at = now if used.busy_since(then, now - began, report.spins) else state.active_at
            state.window = (now, used)

    def look(self, now: float, is_held: Callable[[int, float], bool] = lambda rank, seconds: True) -> Fault | None:
        """Returns the first fault, or None. Call it often: only times between calls close to each other count.

        ``is_held(rank, seconds)``: True if a silent rank is stopped or asleep, and not busy in a call that keeps its other
        threads from reporting. ``seconds``: its processor time at its last report.
        """
        if self._looked_at is not None:
            # A separate clock, because wall time also passes while the machine sleeps, which is not a rank's fault.
            self._clock += min(MAX_STEP_S, now - self._looked_at)
        self._looked_at = now
        # from the most to the least specific: `_silent` names the cause, `_stalled` only a lack of progress
        return self._silent(is_held) or (None if self._stalled_after_s is None else self._wedged() or self._stalled())

    def during(self, rank: int) -> str:
        """Returns the phase and step of a rank's last report, as the end of a sentence; empty while the rank starts."""
        report = self._ranks[rank].report
        if report is None or report.phase == "start":
            return ""
        return f", last heard of in phase {report.phase!r} of step {report.step}"

    def describe(self) -> str:
        """Describes the present state of every rank, one line each."""
        return "\n".join(f"rank {state.number}: {self._where(state)}" for state in self._ranks)

    def _silent(self, is_held: Callable[[int, float], bool]) -> Fault | None:
        for index, state in enumerate(self._ranks):
            if state.report is None:
                continue
            if state.report.cut_off:
                return Fault("silent", state.number, state.report.cut_off)
            quiet_s = self._clock - state.heard_at
            if quiet_s > self._silent_s and is_held(index, state.seconds):
                return Fault(
                    "silent",
                    state.number,
                    f"{self._name(state)} has not answered for {quiet_s:.0f} s: it is stopped, or blocked by the system "
                    f"({self._where(state)})",
                )
        return None

    def _wedged(self) -> Fault | None:
        ranks = [(state, state.report) for state in self._ranks if state.report is not None]
        if len(self._ranks) == 1 or len(ranks) < len(self._ranks):
            return None
        # kernels compile in a rank's first step, which may take minutes
        if any(not 0 < state.first_step < report.step for state, report in ranks):
            return None
        limit = max(self._wedged_s, GAPS * max(state.longest for state in self._ranks))
        if any(self._clock - state.counted_at <= limit for state in self._ranks):
            return None
        # ranks that do not wait for the others; if there are none, all wait for each other
        absent = [(state, report) for state, report in ranks if report.waits != OTHER_RANKS]
        for state, report in absent:
            if report.waits or report.phase not in WATCHED or self._clock - state.active_at <= limit:
                return None
        cause = absent[-1][0] if absent else self._ranks[0]
        state_words = f"rank {cause.number} makes no progress" if len(absent) == 1 else "none of them makes progress"
        return Fault(
            "wedged",
            cause.number,
            f"the {len(self._ranks)} ranks have waited for each other for {limit:.0f} s, and {state_words} "
            f"({self._where(cause)})",
        )

    def _stalled(self) -> Fault | None:
        assert self._stalled_after_s is not None
        still = self._clock - max(state.counted_at for state in self._ranks)
        unheard = next((state for state in self._ranks if state.report is None), None)
        if still <= (self._stalled_after_s if unheard is None else max(START_S, self._stalled_after_s)):
            return None
        if unheard is not None:
            text = f"{self._name(unheard)} has reported nothing since it was started, and no rank made progress for"
            return Fault("stalled", unheard.number, f"{text} {still:.0f} s (recover.stalled_after_s)")
        reports = [(state.number, state.report) for state in self._ranks if state.report is not None]
        own = [(number, report) for number, report in reports if report.waits != OTHER_RANKS]
        if not own and len(self._ranks) < self._world:
            return None  # all wait for ranks on other machines, which are watched there
        number, report = (own or reports)[0]
        return Fault("stalled", number, stalled_text(report, still))

    def _name(self, state: _Rank) -> str:
        return f"rank {state.number} of {self._world}"

    def _where(self, state: _Rank) -> str:
        if state.report is None:
            return "has not started"
        waits = f", waiting for {state.report.waits}" if state.report.waits else ""
        return (
            f"step {state.report.step}, {state.report.phase}{waits}; last heard of {self._clock - state.heard_at:.1f} s "
            f"ago, last progress {self._clock - state.counted_at:.1f} s ago"
        )


def stalled_text(report: RankReport, seconds: float) -> str:
    """Returns the message about a stalled rank: its phase and step, and what it waits for. ``seconds``: time without
    progress."""
    waits = f"it waits for {report.waits}" if report.waits else "it does not finish its present piece of work"
    where = f"phase {report.phase!r} of step {report.step}"
    return f"no progress for {seconds:.0f} s (recover.stalled_after_s) in {where}: {waits}"


def work_of(pid: int, *, whole: bool = False) -> Used:
    """Reads the operating system's counters of a process. ``whole``: also the processor time of its child processes, and
    whether it waits for a disk, which take longer to read."""
    process = psutil.Process(pid)
    times, moved, below = process.cpu_times(), 0, None
    with contextlib.suppress(psutil.Error, AttributeError):  # macOS counts no bytes
        io = process.io_counters()
        moved = io.read_chars + io.write_chars
    if whole:
        below = times.children_user + times.children_system  # of child processes that have ended
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child_times = child.cpu_times()
                below += child_times.user + child_times.system + child_times.children_user + child_times.children_system
    return Used(times.user + times.system, moved, below, whole and waits_for_disk(process))


def waits_for_disk(process: psutil.Process) -> bool:
    """True if a thread of the process waits for a disk."""
    if process.status() == psutil.STATUS_DISK_SLEEP:
        return True
    states = set()
    for path in Path(f"/proc/{process.pid}/task").glob("*/stat"):  # Linux
        with contextlib.suppress(OSError):  # the thread has just ended
            states.add(path.read_text().rpartition(")")[2].split()[0])
    return "D" in states
