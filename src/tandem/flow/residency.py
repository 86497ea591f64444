"""Puts parts of the models to sleep and wakes them, as the plan of a run says; the only place that does."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.api.activity import span, waiting
from tandem.api.engines import InferenceEngine, TrainEngine
from tandem.api.failures import WaitTimeout
from tandem.api.team import Team
from tandem.flow.plan import Resident
from tandem.flow.process import Process
from tandem.flow.sleep_plan import GIB, Moves, Part, SleepPlan, SleepState
from tandem.flow.state_parts import ENGINE
from tandem.models.allocator import check_room, free_bytes, give_back, mapped_blocks, return_freed_memory, trim_heap
from tandem.tracking.statistics import PhaseTimer

if TYPE_CHECKING:
    from tandem.flow.writing import WritingModel

START = "start"
"""Stage name under which moves at the opening of models are counted."""

TOTALS = (
    "memory/moved_gib",
    "memory/moved_optimizer_gib",
    "time/switch_s",
    "time/switch_optimizer_s",
)
"""Metrics that are sums over all stages."""

REMEDY = (
    "Lower actor.max_tokens_per_micro_batch, spread the model over more GPUs (actor.backend), set memory_limit_gib so that "
    "models sleep while servers generate, or rollout.fleet.memory_share to less"
)


@dataclass
class _Switch:
    """Time and bytes of the moves before a stage."""

    moved: int = 0
    delivered: int = 0
    """Bytes of weights delivered again; the plan's figure, so for all ranks that share a memory."""

    seconds: float = 0.0
    optimizer_moved: int = 0
    """Bytes of optimizer state among ``moved``."""

    optimizer_s: float = 0.0


class Residency:
    """Keeps the awake parts within `memory_limit_gib`. Without a limit, or if everything fits, it does nothing.

    Several ranks make the same calls and reach the same decisions, because these follow from the plan alone.
    """

    def __init__(
        self,
        plan: SleepPlan | None,
        scratch: Path,
        timer: PhaseTimer,
        open_model: Callable[..., TrainEngine],
        team: Team | None = None,
        *,
        idle_timeout_s: float = 600.0,
    ):
        """Prepares the moves of a plan.

        Args:
            scratch: folder for parts that sleep on disk.
            open_model: opens a model, with the arguments of `open`.
            team: all ranks; None: this one.
            idle_timeout_s: time that the inference engine has to end cancelled requests before it sleeps.
        """
        self._team = team or Team.alone()
        self.plan = plan if plan is not None and plan.sleeps else None
        return_freed_memory(None if self.plan is None else self.plan.limit)
        self._open_model = open_model
        self._scratch, self._timer, self._idle_timeout_s = scratch, timer, idle_timeout_s
        self._state = SleepState(set(self.plan.beginning) if self.plan is not None else set())
        self._models: dict[str, TrainEngine | WritingModel] = {}
        self._engine: InferenceEngine | None = None
        self._deliver_again: Callable[[], None] = lambda: None
        self._switches: dict[str, _Switch] = {}
        self._switch = self._switches.setdefault(START, _Switch())
        self._cache_bytes = 0
        """Bytes of this rank's GPU that servers release when their cache sleeps, and take again."""

    def add_engine(self, engine: InferenceEngine | None) -> None:
        """Sets the inference engine; None on ranks without one."""
        self._engine = engine

    def deliver_by(self, deliver_again: Callable[[], None]) -> None:
        """Sets the function that delivers the served weights to the inference engine again. Collective."""
        self._deliver_again = deliver_again

    def open(self, resident: Resident, process: Process, *, optimizer_steps: int = 0) -> TrainEngine:
        """Makes room for a model and opens it by `open_model`. Under a limit it sleeps until a stage needs it."""
        part = Part(resident.name, "parameters")
        trunk = None if resident.trunk_of is None else self._models[resident.trunk_of]
        sleeps = self.plan is not None and part in self.plan.parts
        if self.plan is not None and sleeps:
            self._do(self.plan.opening(part, self._state))
        gives = sleeps or trunk is not None  # memory back to the system: what sleeps, or what is there already
        with mapped_blocks() if gives else contextlib.nullcontext():
            engine = self._open_model(resident, process, optimizer_steps=optimizer_steps, trunk=trunk)
            self._models[resident.name] = engine
            if sleeps:
                self._sleep(part)
        if gives:
            give_back()
        return engine

    def add(self, name: str, model: "WritingModel") -> "WritingModel":
        """Adds a judge that writes, which sleeps and wakes with the other models; it is asleep now."""
        self._models[name] = model
        return model

    def enter(self, name: str) -> None:
        """Wakes what a stage needs, and puts to sleep what must make room. Call before the stage. Collective."""
        if self.plan is None:
            return
        switch = self._switch = self._switches.setdefault(name, _Switch())
        began = time.perf_counter()
        with span(f"wake: {name}"), self._timer("switch"):
            trim_heap()  # gradients and activations of the stage before are no part of what is planned
            moves = self.plan.moves(name, self._state)
            if moves.again is not None:
                self._do(moves.again)
                self._give_all_back()
                with mapped_blocks():
                    self._deliver_again()
                switch.delivered += self.plan.parts[Part(ENGINE, "weights")].coming
            self._do(moves)
            if any(part.resident == ENGINE for part in self.plan.stage(name).gives):
                self._give_all_back()
        switch.seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def making(self, name: str) -> Iterator[None]:
        """A block around a stage that makes weights again, which are released one by one."""
        with mapped_blocks() if self.plan is not None and self.plan.stage(name).gives else contextlib.nullcontext():
            yield

    def awake_for(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``work`` so that it first wakes what the stage ``name`` needs; for scripts that call stages themselves."""

        @functools.wraps(work)
        def woken(*arguments: Any, **named: Any) -> Any:
            self.enter(name)
            with self.making(name):
                return work(*arguments, **named)

        return woken

    def metrics(self) -> dict[str, float]:
        """Seconds and bytes of moves since the last call, by stage, and of optimizer state alone; empty if nothing needs to
        sleep. Seconds are those of the slowest rank, bytes those of all ranks or of the busiest GPU. Collective."""
        if self.plan is None:
            return {}
        own, self._switches = self._switches, {}
        of_ranks, counted = self._team.gather(own), sum if self.plan.one_memory else max
        found = dict.fromkeys(TOTALS, 0.0)
        for name in own:
            stage, ranks = name.replace(": ", "_").replace(" ", "_"), [switches[name] for switches in of_ranks]
            moved = (counted(rank.moved for rank in ranks) + own[name].delivered) / GIB
            seconds = max(rank.seconds for rank in ranks)
            found |= {f"memory/moved_gib/{stage}": moved, f"time/switch_s/{stage}": seconds}
            found["memory/moved_gib"] += moved
            found["time/switch_s"] += seconds
            found["memory/moved_optimizer_gib"] += counted(rank.optimizer_moved for rank in ranks) / GIB
            found["time/switch_optimizer_s"] += max(rank.optimizer_s for rank in ranks)
        return found

    def _do(self, moves: Moves) -> None:
        """Makes the moves: parts go to sleep first, so that there is room for those that wake."""
        if any(part.resident == ENGINE for part in moves.sleep):
            self._sleep_engine(tuple(part for part in moves.sleep if part.resident == ENGINE))
        for part in moves.sleep:
            self._sleep(part)
        for part in moves.wake:
            if part.resident in self._models:
                with self._counted(part) as moved:
                    moved.append(self._models[part.resident].onload((part.what,)))  # type: ignore[arg-type]
        if waking := [part for part in moves.wake if part.resident == ENGINE]:
            self._give_all_back()
            with self._team.together():  # none wakes where it would not fit
                if Part(ENGINE, "kv_cache") in waking:
                    check_room(self._cache_bytes, "the cache of the servers, which wakes", REMEDY)
            with self._team.together():
                for part in waking if self._engine is not None else ():
                    self._engine.wake((part.what,))  # type: ignore[union-attr, arg-type]

    def _give_all_back(self) -> None:
        """Makes every rank release its unused memory before servers on these devices take theirs."""
        with self._team.together():
            give_back()

    def _sleep(self, part: Part) -> None:
        if part.resident in self._models:
            with self._counted(part) as moved:
                moved.append(self._models[part.resident].offload((part.what,), self._scratch))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _counted(self, part: Part) -> Iterator[list[int]]:
        """A block that moves a part and appends the bytes to the list."""
        moved: list[int] = []
        began = time.perf_counter()
        yield moved
        self._switch.moved += sum(moved)
        if part.what == "optimizer":
            self._switch.optimizer_moved += sum(moved)
            self._switch.optimizer_s += time.perf_counter() - began

    def _sleep_engine(self, parts: tuple[Part, ...]) -> None:
        assert self.plan is not None, "nothing sleeps without a plan"
        with self._team.together():  # each rank has measured before the first server sleeps
            before = free_bytes()
        with self._team.together():  # rank 0 puts servers on the devices of all ranks to sleep
            if self._engine is not None:
                self._wait_until_idle(self._engine)
                self._engine.sleep(tuple(part.what for part in parts))  # type: ignore[misc]
        given = free_bytes() - before  # by servers: what an embedded engine frees is this process' still
        give_back()
        if Part(ENGINE, "kv_cache") in parts:
            self._cache_bytes = given - sum(self.plan.parts[part].num_bytes for part in parts if part.what == "weights")

    def _wait_until_idle(self, engine: InferenceEngine) -> None:
        """Waits until the engine is idle: cancelled requests, or extra ones, may still be under way."""

        def idle() -> bool:
            counts = engine.statistics()
            return not counts.get("running", 0.0) and not counts.get("waiting", 0.0)

        deadline = time.monotonic() + self._idle_timeout_s
        with waiting("the inference engine to be idle"):
            while not idle() and time.monotonic() < deadline:
                time.sleep(0.01)
        if not idle():
            raise WaitTimeout(f"the inference engine was to sleep, and was still busy after {self._idle_timeout_s:g} s")


def free_cache(engine: InferenceEngine) -> None:
    """Releases the cache of an idle engine, which allocates it again at its next request."""
    engine.sleep(("kv_cache",))
