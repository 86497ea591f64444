"""Puts parts of the models to sleep and wakes them, as the run's plan says. No other module does this."""

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
from tandem.flow.planned_models import Resident
from tandem.flow.process import Process
from tandem.flow.sleep_plan import ENGINE, GIB, Moves, Part, SleepPlan, SleepState
from tandem.models.allocator import check_room, free_bytes, give_back, mapped_blocks, return_freed_memory, trim_heap
from tandem.tracking.statistics import PhaseTimer

if TYPE_CHECKING:
    from tandem.flow.writing import WritingModel

START = "start"
"""The stage name under which moves during the opening of models are counted."""

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
    """Bytes of weights delivered again, as planned; one figure for all ranks that share memory."""

    seconds: float = 0.0
    optimizer_moved: int = 0
    """The part of ``moved`` that is optimizer state, in bytes."""

    optimizer_s: float = 0.0


class Residency:
    """Keeps the awake parts within `memory_limit_gib`. Without a limit, or if everything fits, it does nothing.

    All ranks make the same calls and decide alike, because decisions follow from the plan alone.
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
            open_model: opens a model; called with the arguments of `open` and ``trunk``.
            team: all ranks; None: this rank alone.
            idle_timeout_s: longest wait for the inference engine to end cancelled requests before it sleeps.
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
        """Bytes of this rank's GPU that servers release when their cache sleeps, and allocate again when it wakes."""

    def add_engine(self, engine: InferenceEngine | None) -> None:
        """Sets the inference engine; None on ranks without one."""
        self._engine = engine

    def deliver_by(self, deliver_again: Callable[[], None]) -> None:
        """Sets the collective function that delivers the served weights to the inference engine again."""
        self._deliver_again = deliver_again

    def open(self, resident: Resident, process: Process, *, optimizer_steps: int = 0) -> TrainEngine:
        """Makes room for a model and opens it. Under a memory limit the model then sleeps until a stage needs it."""
        part = Part(resident.name, "parameters")
        trunk = None if resident.trunk_of is None else self._models[resident.trunk_of]
        sleeps = self.plan is not None and part in self.plan.parts
        if self.plan is not None and sleeps:
            self._do(self.plan.opening(part, self._state))
        frees = sleeps or trunk is not None  # memory of a sleeping model, or weights that the trunk already has
        with mapped_blocks() if frees else contextlib.nullcontext():
            engine = self._open_model(resident, process, optimizer_steps=optimizer_steps, trunk=trunk)
            self._models[resident.name] = engine
            if sleeps:
                self._sleep(part)
        if frees:
            give_back()
        return engine

    def add(self, name: str, model: "WritingModel") -> "WritingModel":
        """Adds a judge or partner that writes text; it sleeps and wakes with the other models, and is asleep at first."""
        self._models[name] = model
        return model

    def enter(self, name: str) -> None:
        """Wakes the parts that a stage needs; other parts sleep to make room. Call before the stage. Collective."""
        if self.plan is None:
            return
        switch = self._switch = self._switches.setdefault(name, _Switch())
        began = time.perf_counter()
        with span(f"wake: {name}"), self._timer("switch"):
            trim_heap()  # the plan does not count the previous stage's gradients and activations
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
        """A block around the stage ``name``. If the stage makes weights anew, each large tensor gets its own memory in the
        block, so that the memory of each old tensor can be freed by itself."""
        with mapped_blocks() if self.plan is not None and self.plan.stage(name).gives else contextlib.nullcontext():
            yield

    def awake_for(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``work`` so that it first wakes the parts that the stage ``name`` needs, for scripts that call stages."""

        @functools.wraps(work)
        def woken(*arguments: Any, **named: Any) -> Any:
            self.enter(name)
            with self.making(name):
                return work(*arguments, **named)

        return woken

    def metrics(self) -> dict[str, float]:
        """Returns seconds and GiB of the moves since the last call: by stage, in total, and of optimizer state; empty if
        nothing needs to sleep. Seconds are those of the slowest rank. GiB are the sum of all ranks if they share memory,
        else those of the GPU that moved most. Collective."""
        if self.plan is None:
            return {}
        switches, self._switches = self._switches, {}
        of_ranks, combined = self._team.gather(switches), sum if self.plan.one_memory else max
        metrics = dict.fromkeys(TOTALS, 0.0)
        for name in switches:
            stage, ranks = name.replace(": ", "_").replace(" ", "_"), [of_rank[name] for of_rank in of_ranks]
            moved = (combined(rank.moved for rank in ranks) + switches[name].delivered) / GIB
            seconds = max(rank.seconds for rank in ranks)
            metrics |= {f"memory/moved_gib/{stage}": moved, f"time/switch_s/{stage}": seconds}
            metrics["memory/moved_gib"] += moved
            metrics["time/switch_s"] += seconds
            metrics["memory/moved_optimizer_gib"] += combined(rank.optimizer_moved for rank in ranks) / GIB
            metrics["time/switch_optimizer_s"] += max(rank.optimizer_s for rank in ranks)
        return metrics

    def _do(self, moves: Moves) -> None:
        """Makes the moves. Parts go to sleep first, to make room for those that wake."""
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
            with self._team.together():  # checked on all ranks before the engine of any rank wakes
                if Part(ENGINE, "kv_cache") in waking:
                    check_room(self._cache_bytes, "the cache of the servers, which wakes", REMEDY)
            with self._team.together():
                for part in waking if self._engine is not None else ():
                    self._engine.wake((part.what,))  # type: ignore[union-attr, arg-type]

    def _give_all_back(self) -> None:
        """Makes every rank release its unused memory before servers on the same devices allocate theirs."""
        with self._team.together():
            give_back()

    def _sleep(self, part: Part) -> None:
        if part.resident in self._models:
            with self._counted(part) as moved:
                moved.append(self._models[part.resident].offload((part.what,), self._scratch))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _counted(self, part: Part) -> Iterator[list[int]]:
        """Measures a block that moves a part. The block appends the moved bytes to the list."""
        moved: list[int] = []
        began = time.perf_counter()
        yield moved
        self._switch.moved += sum(moved)
        if part.what == "optimizer":
            self._switch.optimizer_moved += sum(moved)
            self._switch.optimizer_s += time.perf_counter() - began

    def _sleep_engine(self, parts: tuple[Part, ...]) -> None:
        assert self.plan is not None, "nothing sleeps without a plan"
        with self._team.together():  # every rank measures before the first server sleeps
            before = free_bytes()
        with self._team.together():  # rank 0 puts the servers on all ranks' devices to sleep
            if self._engine is not None:
                self._wait_until_idle(self._engine)
                self._engine.sleep(tuple(part.what for part in parts))  # type: ignore[misc]
        freed = free_bytes() - before  # by servers: this process still reserves the memory that an embedded engine frees
        give_back()
        if Part(ENGINE, "kv_cache") in parts:
            self._cache_bytes = freed - sum(self.plan.parts[part].num_bytes for part in parts if part.what == "weights")

    def _wait_until_idle(self, engine: InferenceEngine) -> None:
        """Waits until the engine is idle: cancelled or surplus requests may still be running."""

        def idle() -> bool:
            counts = engine.statistics()
            return not counts.get("running", 0.0) and not counts.get("waiting", 0.0)

        deadline = time.monotonic() + self._idle_timeout_s
        with waiting("the inference engine to be idle"):
            while not idle() and time.monotonic() < deadline:
                time.sleep(0.01)
        if not idle():
            raise WaitTimeout(f"the inference engine should sleep, and was still busy after {self._idle_timeout_s:g} s")


def free_cache(engine: InferenceEngine) -> None:
    """Releases the KV cache of an idle engine, which allocates it again at its next request."""
    engine.sleep(("kv_cache",))
