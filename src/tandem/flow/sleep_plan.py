"""The plan of the parts of models that sleep and wake between stages, under `memory_limit_gib`. Pure arithmetic.

A part is asleep when its memory is given back. Before each stage what it needs wakes, and if that does not fit beside what
is awake, something else goes to sleep first. So the most that is awake at once is the *largest* stage, never the sum of all
models. Several orders of choosing are simulated over a few steps, and the one that moves the fewest bytes is taken.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from tandem.api.engines import InferencePart, TrainPart
from tandem.config.errors import ConfigError

GIB = 2**30
AGAIN = "deliver again"
"""Name of the stage that brings slept weights back to the inference engine where nothing is published."""

BEGIN = "begin"
"""Name of what follows the opening of all models: the weights of the actor are read for their digest."""


class Part(NamedTuple):
    """A part of a resident: `Part("actor", "optimizer")`."""

    resident: str
    what: TrainPart | InferencePart | Literal["delivered weights"]

    def __str__(self) -> str:
        return f"{self.resident} {self.what}"


@dataclass(frozen=True)
class PartCost:
    """Bytes of a part, and how many of them move."""

    num_bytes: int
    leaving: int
    """Moved when it goes to sleep after a change; 0 if it is dropped."""

    coming: int
    """Moved when it wakes."""

    keeps_copy: bool = True
    """True if a copy that was moved out is still there at the next sleep, so that it is moved again only after a change."""

    opening: int = 0
    """Bytes that are there besides while its model is opened."""

    standing: bool = False
    """It is there before any model is opened: what a server took when it started."""


@dataclass(frozen=True)
class StageNeeds:
    """One stage, as far as memory is concerned."""

    name: str
    awake: frozenset[Part] = frozenset()
    """Parts that it reads."""

    changes: frozenset[Part] = frozenset()
    """Parts that it writes: their copies outside are worth nothing afterwards."""

    gives: frozenset[Part] = frozenset()
    """Parts that it makes anew beside the old ones, whether those are awake or not."""

    passing: tuple[tuple[Part, int], ...] = ()
    """Parts that exist only while it runs, and their bytes: gradients."""

    away: frozenset[Part] = frozenset()
    """Parts that sleep while it runs even if there is room."""

    each_step: bool = True
    now_and_then: bool = False
    """It follows a step now and then. A stage that does neither belongs to the start of a run."""


@dataclass(frozen=True)
class Moves:
    """The moves before a stage."""

    sleep: tuple[Part, ...] = ()
    wake: tuple[Part, ...] = ()
    again: "Moves | None" = None
    """The moves before the weights of the inference engine are delivered again, which comes first; None: they are not."""

    num_bytes: int = 0


@dataclass
class SleepState:
    """The parts that are awake, and those that were changed since they were last moved out."""

    awake: set[Part]
    changed: set[Part] = field(default_factory=set)
    copied: set[Part] = field(default_factory=set)
    """Parts of which a copy lies outside."""


Order = Callable[[int, int, int], tuple[float, ...]]
"""From stages until its next use, bytes that its sleep and waking move, and its bytes: the part with the largest sleeps."""

ORDERS: tuple[Order, ...] = (
    lambda distance, cost, size: (float(cost == 0), float(distance), float(size)),  # furthest next use first
    lambda distance, cost, size: (-cost / size, float(distance), float(size)),  # the cheapest byte first
    lambda distance, cost, size: (float(-cost), float(distance), float(size)),  # the cheapest part first
    lambda distance, cost, size: (float(cost == 0), distance * size / max(cost, 1), float(size)),
)
STEPS = 3
"""Steps that are simulated: the last one stands for all later ones."""


@dataclass(frozen=True)
class SleepPlan:
    """The parts of a run, its stages, and a budget. See the module."""

    parts: Mapping[Part, PartCost]
    stages: tuple[StageNeeds, ...]
    limit: int | None = None
    """Most bytes awake at once; None: everything stays awake but what a stage wants away."""

    key: str = "memory_limit_gib"
    one_memory: bool = True
    """All ranks share the memory that the limit is for, as the processes of a CPU do. False: each has a GPU of its own."""

    def stage(self, name: str) -> StageNeeds:
        """The stage of this name; one that needs nothing if the plan has none."""
        return next((stage for stage in self.stages if stage.name == name), StageNeeds(name))

    @property
    def everything(self) -> int:
        """Most bytes at once with all parts awake."""
        return max(self._beside(stage) for stage in self.stages) + sum(cost.num_bytes for cost in self.parts.values())

    @property
    def sleeps(self) -> bool:
        """True if anything ever sleeps: the budget does not hold everything, or a stage wants a part away."""
        return any(stage.away for stage in self.stages) or (self.limit is not None and self.everything > self.limit)

    @property
    def largest(self) -> StageNeeds:
        """The stage that needs most bytes by itself."""
        return max(self.stages, key=self.least)

    def least(self, stage: StageNeeds) -> int:
        """Fewest bytes that the stage can do with."""
        return self._total(stage.awake) + self._beside(stage)

    def check(self, remedy: str = "", *, whole: Collection[str] = ()) -> None:
        """Passes if the budget holds each stage by itself. ``remedy``: a further one for the message. ``whole``: the models
        that are trained without adapters, which these would make smaller.

        Raises:
            ConfigError: it does not; says what the largest stage needs.
        """
        needed = self.least(self.largest)
        if self.limit is None or needed <= self.limit:
            return
        there = self.largest.awake
        smaller = [f"a LoRA {name}" for name in sorted(whole) if any(part.resident == name for part in there)]
        smaller += ["a smaller rollout.engine.kv_cache_gib"] * any(part.what == "kv_cache" for part in there)
        how = f" ({', '.join(smaller)})" if smaller else ""
        raise ConfigError(
            f"{self.key}={self.limit / GIB:.4g} cannot hold the stage {self.largest.name!r}, which needs "
            f"{needed / GIB:.4g} GiB by itself: {self.arithmetic(self.largest)}; set {self.key} to at least "
            f"{_rounded_up(needed)}, or make the models of that stage smaller{how}"
            f"{', or ' * bool(remedy)}{remedy}"
        )

    def arithmetic(self, stage: StageNeeds) -> str:
        """The bytes of a stage in words."""
        items = [(str(part), self.parts[part].num_bytes) for part in sorted(stage.awake)]
        items += [(f"{part} (new)", self.parts[part].num_bytes) for part in sorted(stage.gives)]
        items += [(str(part), size) for part, size in stage.passing]
        return " + ".join(f"{name} {size / GIB:.4g}" for name, size in items if size)

    def next_use(self, part: Part, after: str) -> tuple[int, bool]:
        """Stages until one needs the part again, and whether that one makes it anew. ``after``: the stage that begins."""
        steps = [stage for stage in self.stages if stage.each_step or stage.name == after]
        here = next((i for i, stage in enumerate(steps) if stage.name == after), len(steps) - 1)
        for distance in range(1, len(steps) + 1):
            stage = steps[(here + distance) % len(steps)]
            if part in stage.gives:
                return distance, True
            if part in stage.awake and stage.each_step:
                return distance, False
        return len(steps) + 1, False

    def cost(self, part: Part, state: SleepState, stage: str) -> tuple[int, int]:
        """Bytes that move if the part sleeps now: at once, and when it is needed again."""
        cost, anew = self.parts[part], part in self.stage(stage).gives or self.next_use(part, stage)[1]
        fresh = cost.keeps_copy and part in state.copied and part not in state.changed
        return (0 if fresh else cost.leaving), (0 if anew else cost.coming)

    def moves(self, name: str, state: SleepState, order: Order | None = None) -> Moves:
        """The moves before the stage; ``state`` is then as it leaves it."""
        stage, order = self.stage(name), order or self.order
        again = None
        if any(self.parts[part].coming and part.what == "weights" for part in stage.awake - state.awake):
            again = self.moves(AGAIN, state, order)
        asleep, moved = self._make_room(stage, state, order), 0
        for part in asleep:
            moved += self.cost(part, state, name)[0]
            state.awake.discard(part)
            if self.parts[part].leaving:
                state.copied.add(part)
                state.changed.discard(part)
        woken = tuple(sorted(stage.awake - state.awake))
        moved += sum(self.parts[part].coming for part in woken if not self.parts[part].leaving or part in state.copied)
        if name == AGAIN:
            moved += sum(self.parts[part].coming for part in stage.gives)
        state.awake |= stage.awake | stage.gives
        state.changed |= stage.changes
        return Moves(asleep, woken, again, moved)

    def opening(self, part: Part, state: SleepState) -> Moves:
        """The moves before a model is opened, which sleeps again until a stage needs it."""
        passing = ((part, self.parts[part].opening),)
        stage = StageNeeds(f"open {part}", frozenset({part}), passing=passing, each_step=False)
        asleep = self._make_room(stage, state, self.order)
        state.awake -= set(asleep)
        state.copied |= {part for part in (*asleep, part) if self.parts[part].leaving}
        return Moves(asleep)

    def _make_room(self, stage: StageNeeds, state: SleepState, order: Order) -> tuple[Part, ...]:
        """The parts that sleep so that the stage fits, and those that it wants away."""
        if self.limit is None:
            return tuple(sorted(state.awake & stage.away))
        need = self._total(state.awake | stage.awake) + self._beside(stage)
        if need <= self.limit:
            return ()

        def rank(part: Part) -> tuple[float, ...]:
            cost = self.parts[part]
            return order(self.next_use(part, stage.name)[0], sum(self.cost(part, state, stage.name)), cost.num_bytes)

        candidates = sorted(state.awake - stage.awake, key=lambda part: (rank(part), part), reverse=True)
        chosen: list[Part] = []
        for part in candidates:
            if need <= self.limit:
                break
            if self.parts[part].num_bytes:
                chosen.append(part)
                need -= self.parts[part].num_bytes
        # a large part that was chosen last may have made an earlier small one needless
        for part in sorted(chosen, key=lambda part: -sum(self.cost(part, state, stage.name))):
            if need + self.parts[part].num_bytes <= self.limit:
                chosen.remove(part)
                need += self.parts[part].num_bytes
        return tuple(sorted(chosen))

    @cached_property
    def order(self) -> Order:
        """The order of choosing that moves the fewest bytes in a step."""
        return min(ORDERS, key=lambda order: moved_bytes(self.steps(order)[-1]))

    def steps(self, order: Order | None = None, count: int = STEPS) -> list[list["Done"]]:
        """The stages of so many steps from the beginning, each with what happens before it and what is awake in it. Stages
        that follow a step now and then follow the last one."""
        state, order = SleepState(set(self.beginning)), order or self.order
        steps = [[self._done(stage, state, order) for stage in self.stages if stage.each_step] for _ in range(count)]
        steps[-1] += [self._done(stage, state, order) for stage in self.stages if stage.now_and_then]
        return steps

    @property
    def beginning(self) -> frozenset[Part]:
        """Parts that are awake before any other model is opened: those of the inference engine."""
        return frozenset(part for part, cost in self.parts.items() if part.what == "weights" or cost.standing)

    def _done(self, stage: StageNeeds, state: SleepState, order: Order) -> "Done":
        given = stage.gives & state.awake
        moves = self.moves(stage.name, state, order)
        old = frozenset(state.awake - (stage.gives - (given - set(moves.sleep))))
        return Done(stage, moves, old, self._total(old) + self._beside(stage))

    def steady(self) -> list["Done"]:
        """One step of many, and the stages that follow it now and then."""
        return self.steps()[-1]

    def _total(self, parts: Iterable[Part]) -> int:
        return sum(self.parts[part].num_bytes for part in parts)

    def _beside(self, stage: StageNeeds) -> int:
        return self._total(stage.gives) + sum(size for _, size in stage.passing)


@dataclass(frozen=True)
class Done:
    """A stage of a simulated step."""

    stage: StageNeeds
    moves: Moves
    awake: frozenset[Part]
    """Parts that are there besides those that it makes anew and those that pass."""

    peak: int
    """Bytes of all parts while it runs."""

    @property
    def total(self) -> int:
        """Bytes that were moved for it."""
        return self.moves.num_bytes + (0 if self.moves.again is None else self.moves.again.num_bytes)


def _rounded_up(num_bytes: int) -> str:
    """GiB with four digits, never fewer than ``num_bytes``."""
    return f"{-(-num_bytes * 10_000 // GIB) / 10_000:g}"


def moved_bytes(step: Sequence[Done]) -> int:
    """Bytes moved by the stages that each step has."""
    return sum(done.total for done in step if done.stage.each_step)
