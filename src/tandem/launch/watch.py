"""Rules that decide whether ranks still make progress, from their reports and the system's counters. No process, no clock.

Three faults, the fastest to detect first:

- *silent*: a rank has reported nothing for `SILENT_S`, and the system says that it is stopped or asleep; or a rank reports
  that another machine is cut off;
- *wedged*: every rank waits for the others, or is idle in the middle of training while they wait, for `WEDGED_S` and far
  longer than ever before; not in the first step, in which kernels are compiled and ranks meet for the first time;
- *stalled*: for `recover.stalled_after_s` no rank has made any progress that counts.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil


@dataclass(frozen=True)
class LaunchEnd:
    """The end of a group of ranks."""

    code: int
    """0, or the exit status of the command."""

    cause: str = ""
    """The reason of a failure, in one sentence; empty for success."""

    rank: int = 0
    """The rank that failed first."""

    stacks: str = ""
    """Stacks of all ranks, if a rank did not answer or made no progress."""

    may_pass: bool = False
    """True if a restart may succeed."""

    step: int = 0
    """The step in which it failed, as far as rank 0 reported it."""

    has_folder: bool = False
    """True if the group had opened the run folder when it failed."""

    at: float = 0.0
    """Time at which the error was raised, in seconds since 1970; 0: no error was raised, the rank was killed."""


Record = Callable[[LaunchEnd, int | None], None]
"""Records how a group failed, and the number of the restart that follows; None: none follows."""


SILENT_S = 15.0
WEDGED_S = 18.0
GAPS = 3.0
"""Ranks are wedged only after this many times the longest gap of any rank so far between two counts of progress in training.
"""

START_S = 600.0
"""Seconds that a rank may take, at least, until its first report."""

WINDOW_S = 2.0
"""Seconds over which processor use is measured."""

IDLE_SHARE = 0.03
"""Share of one core: a rank that uses less, and reads and writes next to nothing, is idle."""

IDLE_BYTES_PER_S = 100_000

OTHER_RANKS = "the other ranks"
"""The words for all other ranks in a rank's report."""

WATCHED = ("train",)
"""Phases in which a rank can wait only for the processor and for other ranks."""

MAX_STEP_S = 1.0
"""Most seconds that one `Watch.look` adds to the clock: after a longer pause the machine slept, not the ranks."""


class Told(NamedTuple):
    """A rank's report about itself, twice a second."""

    count: int = 0
    phase: str = "start"
    step: int = 0
    waits: str = ""
    place: int = 0
    """A number that changes with the place of the main thread in its code."""

    spins: bool = False
    """True if waiting for others uses the processor too, as it does on a GPU."""

    cut_off: str = ""
    """The machine that this rank can no longer reach, in words; empty: it reaches all."""

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> "Told":
        return cls(**{name: words[name] for name in cls._fields if name in words})


@dataclass(frozen=True)
class Fault:
    """The reason why a group of ranks is ended."""

    kind: Literal["silent", "wedged", "stalled"]
    rank: int
    """The rank at fault, as far as one can tell."""

    text: str


class Used(NamedTuple):
    """The system's counters of one rank."""

    seconds: float = 0.0
    """Seconds of processor time so far."""

    moved: int = 0
    """Bytes read and written."""

    below: float | None = None
    """Processor seconds of its child processes, which compile, load or score for it; None: not measured."""

    on_disk: bool = False
    """True if one of the rank's threads waits for a disk."""

    def busy_since(self, before: "Used", window_s: float, spins: bool) -> bool:
        """True if the rank worked in the ``window_s`` seconds since ``before``. ``spins``: its own processor time says
        nothing."""
        own = 0.0 if spins else self.seconds - before.seconds
        below = 0.0 if self.below is None or before.below is None else self.below - before.below
        moves = self.moved - before.moved >= IDLE_BYTES_PER_S * window_s
        return self.on_disk or moves or max(own, below) >= IDLE_SHARE * window_s


@dataclass
class _Rank:
    report: Told | None = None
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
    """Watches the ranks of one group. ``now`` is in seconds, of any clock that never goes back."""

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
            stalled_after_s: bound on a time without progress; None: silence is the only fault.
            first: number of the group's first rank among the ``world`` ranks of the run. Methods number the ranks of the
                group from 0; faults and messages use the numbers of the run.
        """
        self._first, self._world = first, world or count
        self._ranks = [_Rank() for _ in range(count)]
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

    def hear(self, rank: int, report: Told, used: Used) -> None:
        """Takes a rank's newest report and the system's counters of it."""
        state, now = self._ranks[rank], self._clock
        state.heard_at, state.seconds = now, used.seconds
        state.first_step = state.first_step or report.step
        before = state.report
        state.report = report
        if self._first + rank == 0 and report.phase != "start":
            self.step, self.has_folder = max(self.step, report.step), True
        if before is None or (before.count, before.phase) != (report.count, report.phase):
            # the longest honest gap sets the patience of `_wedged`: large models take long between counts
            if before is not None and before.phase in WATCHED:
                state.longest = max(state.longest, now - state.counted_at)
            state.counted_at = state.active_at = now
            state.window = (now, used)
            return
        # Busy waiting uses the processor, so only a main thread that moves in its code shows work.
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
            # An own clock: wall time also passes while the machine sleeps, and that is no rank's fault.
            self._clock += min(MAX_STEP_S, now - self._looked_at)
        self._looked_at = now
        # from the surest to the vaguest: the first names the culprit, the last only a lack of progress
        return self._silent(is_held) or (None if self._stalled_after_s is None else self._wedged() or self._stalled())

    def during(self, rank: int) -> str:
        """The phase and step of a rank's last report, as the end of a sentence; empty while it starts."""
        report = self._ranks[rank].report
        if report is None or report.phase == "start":
            return ""
        return f", last heard of in phase {report.phase!r} of step {report.step}"

    def describe(self) -> str:
        """The present state of every rank, one line each."""
        return "\n".join(f"rank {number}: {self._where(state)}" for number, state in enumerate(self._ranks, self._first))

    def _silent(self, is_held: Callable[[int, float], bool]) -> Fault | None:
        for number, state in enumerate(self._ranks):
            if state.report is not None and state.report.cut_off:
                return Fault("silent", self._first + number, state.report.cut_off)
            name = f"rank {self._first + number} of {self._world}"
            quiet = state.report is not None and self._clock - state.heard_at > self._silent_s
            if quiet and is_held(number, state.seconds):
                return Fault(
                    "silent",
                    self._first + number,
                    f"{name} has not answered for {self._clock - state.heard_at:.0f} s: it is "
                    f"stopped, or the system holds it ({self._where(state)})",
                )
        return None

    def _wedged(self) -> Fault | None:
        ranks: Sequence[tuple[int, _Rank, Told]] = [
            (i, r, r.report) for i, r in enumerate(self._ranks) if r.report is not None
        ]
        if len(self._ranks) == 1 or len(ranks) < len(self._ranks):
            return None
        # kernels compile in a rank's first step, which may take minutes
        if any(not 0 < state.first_step < report.step for _, state, report in ranks):
            return None
        limit = max(self._wedged_s, GAPS * max(state.longest for state in self._ranks))
        if any(self._clock - state.counted_at <= limit for _, state, _ in ranks):
            return None
        # those that do not wait for the others; if nobody is left, all wait for each other
        absent = [(number, state, report) for number, state, report in ranks if report.waits != OTHER_RANKS]
        for _, state, report in absent:
            if report.waits or report.phase not in WATCHED or self._clock - state.active_at <= limit:
                return None
        number = absent[-1][0] if absent else 0
        still = f"rank {number} stands still" if len(absent) == 1 else "none of them gets on"
        return Fault(
            "wedged",
            number,
            f"the {len(self._ranks)} ranks wait for each other since {limit:.0f} s, and {still} "
            f"({self._where(self._ranks[number])})",
        )

    def _stalled(self) -> Fault | None:
        assert self._stalled_after_s is not None
        still = self._clock - max(state.counted_at for state in self._ranks)
        mute = next((number for number, state in enumerate(self._ranks) if state.report is None), None)
        if still <= (self._stalled_after_s if mute is None else max(START_S, self._stalled_after_s)):
            return None
        if mute is not None:
            name = f"rank {self._first + mute} of {self._world}"
            text = f"{name} has said nothing since it was started, and nothing was done for"
            return Fault("stalled", self._first + mute, f"{text} {still:.0f} s (recover.stalled_after_s)")
        number = next((i for i, state in enumerate(self._ranks) if state.report and state.report.waits != OTHER_RANKS), None)
        if number is None and len(self._ranks) < self._world:
            return None  # all wait for ranks elsewhere, who are watched there
        number = number or 0
        state = self._ranks[number]
        assert state.report is not None
        return Fault("stalled", self._first + number, stalled_text(state.report, still))

    def _where(self, state: _Rank) -> str:
        if state.report is None:
            return "has not begun"
        waits = f", waiting for {state.report.waits}" if state.report.waits else ""
        return (
            f"step {state.report.step}, {state.report.phase}{waits}; last heard of {self._clock - state.heard_at:.1f} s "
            f"ago, last progress {self._clock - state.counted_at:.1f} s ago"
        )


def stalled_text(report: Told, seconds: float) -> str:
    """The message about a stalled rank: its phase and step, and what it waits for. ``seconds``: time without progress."""
    waits = f"it waits for {report.waits}" if report.waits else "it does not come out of one piece of work"
    where = f"phase {report.phase!r} of step {report.step}"
    return f"nothing was done for {seconds:.0f} s (recover.stalled_after_s) in {where}: {waits}"


def work_of(pid: int, *, whole: bool = False) -> Used:
    """The system's counters of a process. ``whole``: also those of its child processes and of its disk, which take longer to
    read."""
    process = psutil.Process(pid)
    times, moved, below = process.cpu_times(), 0, None
    with contextlib.suppress(psutil.Error, AttributeError):  # macOS counts no bytes
        io = process.io_counters()
        moved = io.read_chars + io.write_chars
    if whole:
        below = times.children_user + times.children_system  # of those that are gone
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                its = child.cpu_times()
                below += its.user + its.system + its.children_user + its.children_system
    return Used(times.user + times.system, moved, below, whole and waits_for_disk(process))


def waits_for_disk(process: psutil.Process) -> bool:
    """True if a thread of the process waits for a disk."""
    if process.status() == psutil.STATUS_DISK_SLEEP:
        return True
    states = set()
    for path in Path(f"/proc/{process.pid}/task").glob("*/stat"):  # Linux
        with contextlib.suppress(OSError):  # it has just ended
            states.add(path.read_text().rpartition(")")[2].split()[0])
    return "D" in states
