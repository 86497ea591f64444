"""Plans which parts of models sleep and wake between stages, under `memory_limit_gib`. Pure arithmetic.

A part sleeps when its memory is freed. Before each stage the parts that it needs wake; if there is no room for them, other
parts go to sleep first. So the limit must hold only the *largest* stage, not the sum of all models.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from tandem.api.engines import InferencePart, TrainPart
from tandem.api.shared_files import aligned
from tandem.config.arithmetic import generating_ranks, servers_sleep
from tandem.config.devices import TOGETHER
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import Servers, parse_backend
from tandem.config.preference import DistillConfig, PreferenceConfig, may_sleep, training_config
from tandem.config.rollout import cache_gib, places
from tandem.config.train_engine import TrainEngineConfig, parse_layout
from tandem.flow.plan import RunPlan, Stage
from tandem.flow.planned_models import Resident
from tandem.models.hardware import Hardware, choose_device, hardware
from tandem.models.shape import BYTES, Footprint, Shape, adapters_of, cache_bytes, engine_bytes, read_shape, row_capacity
from tandem.weights.cuda_ipc import staged_bytes

GIB = 2**30

AGAIN = "deliver again"
"""Name of the stage that delivers weights again to an inference engine whose weights slept, if nothing is published."""

BEGIN = "begin"
"""Name of the stage after all models are opened, in which the actor's weights are read to compute their digest."""


class Part(NamedTuple):
    """A part of a resident: `Part("actor", "optimizer")`."""

    resident: str
    what: TrainPart | InferencePart | Literal["delivered weights"]

    def __str__(self) -> str:
        return f"{self.resident} {self.what}"


@dataclass(frozen=True)
class PartCost:
    """The bytes of a part, and how many bytes move when it sleeps and wakes."""

    num_bytes: int
    leaving: int
    """Bytes that move when the part goes to sleep after a change; 0 if it is dropped."""

    coming: int
    """Bytes that move when the part wakes."""

    keeps_copy: bool = True
    """True if the copy that was moved out is kept after waking, so that the part is moved out again only after a change."""

    opening: int = 0
    """Additional bytes while the part's model is opened."""

    standing: bool = False
    """True if the part exists before any model is opened, because a server took the memory when it started."""


@dataclass(frozen=True)
class StageNeeds:
    """The memory needs of one stage."""

    name: str
    awake: frozenset[Part] = frozenset()
    """Parts that the stage reads."""

    changes: frozenset[Part] = frozenset()
    """Parts that the stage writes; copies of them that were moved out become invalid."""

    gives: frozenset[Part] = frozenset()
    """Parts that the stage makes anew. They need memory in addition to the old ones, if those are awake."""

    passing: tuple[tuple[Part, int], ...] = ()
    """Parts that exist only during the stage (gradients), and their bytes."""

    away: frozenset[Part] = frozenset()
    """Parts that sleep during the stage even if there is room."""

    each_step: bool = True
    now_and_then: bool = False
    """True if the stage follows only some steps. If this and ``each_step`` are False, it belongs to the start of a run."""


@dataclass(frozen=True)
class Moves:
    """The moves before a stage."""

    sleep: tuple[Part, ...] = ()
    wake: tuple[Part, ...] = ()
    again: "Moves | None" = None
    """Moves before the inference engine's weights are delivered again; the delivery precedes the other moves. None: the
    weights are not delivered again."""

    num_bytes: int = 0


@dataclass
class SleepState:
    """The parts that are awake, and those that were changed since they were last moved out."""

    awake: set[Part]
    changed: set[Part] = field(default_factory=set)
    copied: set[Part] = field(default_factory=set)
    """Parts of which a copy was moved out."""


STEPS = 3
"""Number of steps that are simulated; the last one stands for all later steps."""


@dataclass(frozen=True)
class SleepPlan:
    """The parts and the stages of a run, and its memory limit; see the module's docstring."""

    parts: Mapping[Part, PartCost]
    stages: tuple[StageNeeds, ...]
    limit: int | None = None
    """Most bytes that may be awake at once; None: all parts stay awake, except those in a stage's ``away``."""

    one_memory: bool = True
    """True: all ranks share the limited memory, as processes on a CPU do. False: each rank has its own GPU."""

    def stage(self, name: str) -> StageNeeds:
        """Returns the stage of this name, or a stage without needs if the plan has none."""
        return next((stage for stage in self.stages if stage.name == name), StageNeeds(name))

    @property
    def everything(self) -> int:
        """Most bytes in use at once if no part ever sleeps."""
        return max(self._beside(stage) for stage in self.stages) + sum(cost.num_bytes for cost in self.parts.values())

    @property
    def sleeps(self) -> bool:
        """True if a part ever sleeps: the limit is too small for all parts, or a stage has parts in ``away``."""
        return any(stage.away for stage in self.stages) or (self.limit is not None and self.everything > self.limit)

    @property
    def largest(self) -> StageNeeds:
        """The stage that needs the most bytes by itself."""
        return max(self.stages, key=self.least)

    def least(self, stage: StageNeeds) -> int:
        """Returns the fewest bytes with which the stage can run."""
        return self._total(stage.awake) + self._beside(stage)

    def check(self, remedy: str = "", *, whole: Collection[str] = ()) -> None:
        """Checks that the limit holds each stage by itself. ``remedy``: an additional remedy for the message. ``whole``: the
        models that are trained without adapters; the message proposes adapters for them.

        Raises:
            ConfigError: the largest stage needs more than the limit; the message says how much.
        """
        needed = self.least(self.largest)
        if self.limit is None or needed <= self.limit:
            return
        there = self.largest.awake
        smaller = [f"a LoRA {name}" for name in sorted(whole) if any(part.resident == name for part in there)]
        smaller += ["a smaller rollout.engine.kv_cache_gib"] * any(part.what == "kv_cache" for part in there)
        how = f" ({', '.join(smaller)})" if smaller else ""
        raise ConfigError(
            f"memory_limit_gib={self.limit / GIB:.4g} cannot hold the stage {self.largest.name!r}, which needs "
            f"{needed / GIB:.4g} GiB by itself: {self.arithmetic(self.largest)}; set memory_limit_gib to at least "
            f"{_rounded_up(needed)}, or make the models of that stage smaller{how}"
            f"{', or ' * bool(remedy)}{remedy}"
        )

    def arithmetic(self, stage: StageNeeds) -> str:
        """Returns the bytes of a stage as a sum of its parts in GiB, as text."""
        items = [(str(part), self.parts[part].num_bytes) for part in sorted(stage.awake)]
        items += [(f"{part} (new)", self.parts[part].num_bytes) for part in sorted(stage.gives)]
        items += [(str(part), size) for part, size in stage.passing]
        return " + ".join(f"{name} {size / GIB:.4g}" for name, size in items if size)

    def next_use(self, part: Part, after: str) -> tuple[int, bool]:
        """Returns (number of stages from ``after`` to the next stage that needs the part, whether that stage makes the part
        anew)."""
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
        """Returns the bytes that move if the part goes to sleep now: (bytes now, bytes when the part wakes)."""
        cost, anew = self.parts[part], part in self.stage(stage).gives or self.next_use(part, stage)[1]
        fresh = cost.keeps_copy and part in state.copied and part not in state.changed
        return (0 if fresh else cost.leaving), (0 if anew else cost.coming)

    def moves(self, name: str, state: SleepState) -> Moves:
        """Returns the moves before the stage, and updates ``state`` to the end of the stage."""
        stage, again = self.stage(name), None
        if any(self.parts[part].coming and part.what == "weights" for part in stage.awake - state.awake):
            again = self.moves(AGAIN, state)
        asleep, moved = self._make_room(stage, state), 0
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
        """Returns the moves before a model is opened; after that the model sleeps until a stage needs it."""
        passing = ((part, self.parts[part].opening),)
        stage = StageNeeds(f"open {part}", frozenset({part}), passing=passing, each_step=False)
        asleep = self._make_room(stage, state)
        state.awake -= set(asleep)
        state.copied |= {part for part in (*asleep, part) if self.parts[part].leaving}
        return Moves(asleep)

    def _make_room(self, stage: StageNeeds, state: SleepState) -> tuple[Part, ...]:
        """Returns the parts that go to sleep so that the stage fits into the limit. Without a limit, returns the awake parts
        in the stage's ``away``.

        The parts that move the fewest bytes sleep first; of equal parts the one that is needed last.
        """
        if self.limit is None:
            return tuple(sorted(state.awake & stage.away))
        need = self._total(state.awake | stage.awake) + self._beside(stage)
        if need <= self.limit:
            return ()

        moved = {part: sum(self.cost(part, state, stage.name)) for part in state.awake - stage.awake}

        def rank(part: Part) -> tuple[float, int, int, Part]:
            distance = self.next_use(part, stage.name)[0]
            # a part that the next stage needs makes other parts sleep at once, so its bytes count twice
            return moved[part] * (1 + 1 / distance**2), -distance, -self.parts[part].num_bytes, part

        candidates = sorted(moved, key=rank)
        chosen: list[Part] = []
        for part in candidates:
            if need <= self.limit:
                break
            if self.parts[part].num_bytes:
                chosen.append(part)
                need -= self.parts[part].num_bytes
        # after a large part was chosen, a smaller one that was chosen before may stay awake
        for part in sorted(chosen, key=lambda part: -moved[part]):
            if need + self.parts[part].num_bytes <= self.limit:
                chosen.remove(part)
                need += self.parts[part].num_bytes
        return tuple(sorted(chosen))

    def steps(self, count: int = STEPS) -> list[list["Done"]]:
        """Simulates ``count`` steps from the beginning. Returns the stages of each step, with the moves before a stage and
        the parts awake in it. Stages that follow only some steps are put after the last one."""
        state = SleepState(set(self.beginning))
        steps = [[self._done(stage, state) for stage in self.stages if stage.each_step] for _ in range(count)]
        steps[-1] += [self._done(stage, state) for stage in self.stages if stage.now_and_then]
        return steps

    @property
    def beginning(self) -> frozenset[Part]:
        """Parts that are awake before any other model is opened: those of the inference engine."""
        return frozenset(part for part, cost in self.parts.items() if part.what == "weights" or cost.standing)

    def _done(self, stage: StageNeeds, state: SleepState) -> "Done":
        given = stage.gives & state.awake
        moves = self.moves(stage.name, state)
        old = frozenset(state.awake - (stage.gives - (given - set(moves.sleep))))
        return Done(stage, moves, old, self._total(old) + self._beside(stage))

    def steady(self) -> list["Done"]:
        """Returns the stages of a later step, and the stages that follow only some steps."""
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
    """Awake parts, without those that the stage makes anew and those that exist only during it."""

    peak: int
    """Bytes of all parts in memory during the stage."""

    @property
    def total(self) -> int:
        """Bytes that were moved before the stage."""
        return self.moves.num_bytes + (0 if self.moves.again is None else self.moves.again.num_bytes)


def _rounded_up(num_bytes: int) -> str:
    """Formats bytes in GiB, rounded up to four decimals."""
    return f"{-(-num_bytes * 10_000 // GIB) / 10_000:g}"


def moved_bytes(step: Sequence[Done]) -> int:
    """Returns the bytes that one step moves, without the stages that follow only some steps."""
    return sum(done.total for done in step if done.stage.each_step)


ENGINE = "engine"


def footprint(resident: Resident, shape: Shape, where: Hardware) -> Footprint:
    """Returns the footprint of a model that has a train engine, from which the bytes of the model's parts are computed."""
    config = resident.engine
    assert config is not None and resident.head != "text", f"{resident.name} has no train engine"
    layout = parse_layout(config.backend, resident.key)
    return Footprint(
        shape=shape,
        head=resident.head,
        dtype=where.dtype(config.dtype),
        layout=layout,
        trained=resident.trained,
        adapters=adapters_of(config.lora, shape),
        frozen=not resident.changes and layout.zero is None,
        borrows=resident.trunk_of is not None,
        fixed=shape.tower_parameters(config.freeze),
        offload=config.offload,
    )


def sleep_plan(
    config: BaseConfig, plan: RunPlan, where: Hardware, read: Callable[[str], Shape] = read_shape
) -> SleepPlan | None:
    """Plans which parts sleep in each stage; None if no limit is set and no server sleeps. ``read``: maps a model's path to
    its shape. Without a limit only the servers' parts are planned, because models do not move.

    Raises:
        ConfigError: a model cannot be read, or the limit is too small for the largest stage.
    """
    training = training_config(config) if isinstance(config, DistillConfig) else config
    if not isinstance(training, TrainConfig | PreferenceConfig):
        return None
    if training.memory_limit_gib is None:
        if isinstance(training, PreferenceConfig) or where.cpu or not servers_sleep(training):
            return None
        return _server_plan(training, plan, where, read)
    parts: dict[Part, PartCost] = {}
    gradients: dict[str, int] = {}
    for resident in plan.residents:
        if resident.engine is not None and resident.base_of is None:
            if resident.head == "text" and isinstance(training, TrainConfig):
                parts |= _writer_parts(training, resident.name, resident.engine, read(resident.engine.path), where)
                continue
            sizes = footprint(resident, read(resident.engine.path), where)
            ranks = len(resident.ranks) if where.cpu else 1  # processes of a CPU share its memory
            gradients[resident.name] = round(sizes.gradient_bytes * ranks)
            parts |= _parts(resident, sizes, where, ranks)
    remedies, always = [], []
    if isinstance(training, TrainConfig):
        actor = plan.resident("actor")
        assert actor is not None and actor.engine is not None, "every plan has an actor"
        shape = read(actor.engine.path)
        engines = len(generating_ranks(training)) if where.cpu else 1  # processes of a CPU share its memory
        parts |= _engine_parts(training, shape, where, engines)
        if training.rollout.weights.terms.on_gpu:  # kept until the next delivery, for a server that is started again
            dtype = getattr(torch, where.dtype(training.rollout.dtype))
            always.append((Part(ENGINE, "delivered weights"), staged_bytes(shape.tensors(), dtype)))
            remedies.append(f"leave rollout.weights.channel={training.rollout.weights.channel} out")
    if any(resident.in_episodes for resident in plan.residents):
        remedies.append("serve the reward model that the episodes ask (tandem serve-reward, remote(url=…))")
    stages = _stages(config, plan, parts, gradients)
    stages = (replace(stage, passing=(*stage.passing, *always)) for stage in stages)
    schedule = SleepPlan(parts, tuple(stages), int(training.memory_limit_gib * GIB), one_memory=where.cpu)
    whole = [model.name for model in plan.residents if model.trained and model.engine and model.engine.lora.rank is None]
    schedule.check(", or ".join(remedies), whole=whole)
    return schedule


def _server_plan(config: TrainConfig, plan: RunPlan, where: Hardware, read: Callable[[str], Shape]) -> SleepPlan:
    """Plans only the servers: their cache exists in stages that generate, and sleeps in all others."""
    actor = plan.resident("actor")
    assert actor is not None and actor.engine is not None, "every plan has an actor"
    parts = _engine_parts(config, read(actor.engine.path), where, 1)
    cache = frozenset({Part(ENGINE, "kv_cache")})
    stages = (
        replace(
            stage,
            awake=stage.awake & parts.keys(),
            changes=stage.changes & parts.keys(),
            passing=(),
            away=cache - stage.awake if stage.each_step or stage.now_and_then else frozenset(),
        )
        for stage in _stages(config, plan, parts, defaultdict(int))
    )
    return SleepPlan(parts, tuple(stages), one_memory=False)


def sleep_plan_here(config: BaseConfig, plan: RunPlan) -> SleepPlan | None:
    """Returns the `sleep_plan` for this machine; None if no part of a run of this kind may sleep.

    Raises:
        ConfigError: see `sleep_plan`.
    """
    return (
        sleep_plan(config, plan, hardware(choose_device(config.device, config.actor.backend))) if may_sleep(config) else None
    )


def _parts(resident: Resident, sizes: Footprint, where: Hardware, ranks: int) -> dict[Part, PartCost]:
    weights, masters = (sizes.weight_bytes + sizes.rounded_bytes) * ranks, 4 * sizes.masters / sizes.parts * ranks
    beside = BYTES[sizes.dtype] * sizes.trunk if sizes.borrows else 0
    written = masters if resident.changes else float(BYTES[sizes.dtype] * sizes.beside_base)
    costs: dict[TrainPart, tuple[float, float, float]]
    if not where.cpu:
        costs = {"parameters": (weights, weights, weights), "optimizer": (sizes.optimizer_bytes,) * 3}
    else:  # frozen weights are read from their folder again, except adapters; a rounded copy is made anew
        moments = sizes.optimizer_bytes * ranks
        costs = {
            "parameters": (weights, written, weights - sizes.rounded_bytes * ranks),
            "optimizer": (moments, moments, moments),
        }
    return {
        Part(resident.name, what): PartCost(round(size), round(leaving), round(coming), where.cpu, beside)
        for what, (size, leaving, coming) in costs.items()
        if size
    }


def _engine_parts(config: TrainConfig, shape: Shape, where: Hardware, engines: int) -> dict[Part, PartCost]:
    """Returns the parts of the embedded engines: weights, delivered again on waking, and the largest possible cache."""
    rollout = config.rollout
    if servers := parse_backend(rollout.backend):
        return _server_parts(config, servers, shape, where)
    dtype = where.engine_dtype(rollout.dtype)
    weights = round(engine_bytes(shape, dtype, cpu=where.cpu)) * engines
    samples = config.gconfig.n_samples * max(rollout.batch_size, round(rollout.batch_size * rollout.oversample))
    rows = min(places(rollout.engine), -(-samples // engines))
    longest = row_capacity(rollout.engine.max_model_len or shape.context)
    device, weights_gib = "cpu" if where.cpu else "cuda", weights / GIB
    gib = cache_gib(rollout.engine, device, memory_gib=config.memory_limit_gib, share=TOGETHER, weights_gib=weights_gib)
    cache = min(gib * GIB, cache_bytes(shape, dtype, rows * longest))
    return {
        Part(ENGINE, "weights"): PartCost(weights, 0, weights),
        Part(ENGINE, "kv_cache"): PartCost(round(cache) * engines, 0, 0),
    }


def _server_parts(config: TrainConfig, servers: tuple[Servers, ...], shape: Shape, where: Hardware) -> dict[Part, PartCost]:
    """Returns the parts of vLLM or SGLang servers on one device. A server takes its share of memory when it starts, and can
    free nearly all of it."""
    backend = config.rollout.backend
    if where.cpu:
        raise ConfigError(
            f"memory_limit_gib={config.memory_limit_gib} with rollout.backend={backend} needs GPUs: on a CPU neither vLLM "
            "nor SGLang can give its memory back. Use rollout.backend=embedded, or leave memory_limit_gib out"
        )
    share = round((config.rollout.fleet.memory_share or TOGETHER) * where.memory_gib * GIB)
    dtype = where.dtype(config.rollout.dtype)
    weights = max(round(engine_bytes(shape, dtype, cpu=False) / server.tensor) for server in servers)
    return {
        Part(ENGINE, "weights"): PartCost(weights, 0, weights),
        Part(ENGINE, "kv_cache"): PartCost(max(0, share - weights), 0, 0, standing=True),
    }


def _writer_parts(
    config: TrainConfig, name: str, engine: TrainEngineConfig, shape: Shape, where: Hardware
) -> dict[Part, PartCost]:
    """Returns the parts of a judge that generates text: weights, read again from its folder, and a cache while it judges."""
    settings = replace(config.rollout.engine, max_model_len=None)
    rollout = replace(config.rollout, backend="embedded", dtype=engine.dtype, engine=settings)
    engines = len(generating_ranks(config)) if where.cpu else 1  # each rank that generates judges its share
    engine_parts = _engine_parts(replace(config, rollout=rollout), shape, where, engines)
    return {
        Part(name, "parameters"): engine_parts[Part(ENGINE, "weights")],
        Part(name, "kv_cache"): engine_parts[Part(ENGINE, "kv_cache")],
    }


def _stages(
    config: BaseConfig, plan: RunPlan, parts: dict[Part, PartCost], gradients: dict[str, int]
) -> Iterator[StageNeeds]:
    weights, actor = frozenset({Part(ENGINE, "weights")}), frozenset({Part("actor", "parameters")})
    owners = {
        one.name: one.base_of or one.name for one in plan.residents
    }  # the base of another model is in that model's memory
    if weights <= parts.keys():
        yield StageNeeds(AGAIN, actor, gives=weights, each_step=False)
        yield StageNeeds(BEGIN, actor, each_step=False)
    for resident in plan.residents:
        if resident.changes and resident.engine is not None:
            own_parts = frozenset(part for part in parts if part.resident == resident.name)
            yield StageNeeds(f"load {resident.name}", own_parts | {*_trunk(resident)}, own_parts, each_step=False)
    for stage in plan.stages:
        rarely, residents = stage.kind == "keep" and stage.name != "record", [owners[name] for name in stage.awake]
        needs = {part for name in residents for part in _needed(plan, stage, name, config) if part in parts}
        changes: set[Part] = set()
        if stage.kind == "update":
            changes = {part for part in needs if part.resident in residents}
        elif stage.name == "refresh":
            changes = {Part("reference", "parameters")}
        elif stage.name == "publish":
            needs -= weights
        yield StageNeeds(
            stage.name,
            frozenset(needs),
            frozenset(changes),
            weights if stage.name == "publish" else frozenset(),
            tuple((Part(name, "gradients"), gradients[name]) for name in residents if stage.kind == "update"),
            each_step=not rarely,
            now_and_then=rarely,
        )


def _trunk(resident: Resident | None) -> Iterator[Part]:
    """Yields the part that holds the weights which the resident shares with another model."""
    if resident is not None and resident.trunk_of is not None:
        yield Part(resident.trunk_of, "parameters")


def _needed(plan: RunPlan, stage: Stage, name: str, config: BaseConfig) -> Iterator[Part]:
    if name == ENGINE:
        yield Part(name, "weights")
        if stage.name != "publish":
            yield Part(name, "kv_cache")
        return
    yield Part(name, "parameters")
    yield from _trunk(plan.resident(name))
    yield Part(name, "kv_cache")  # only a judge that generates text has one
    if stage.kind == "update" or (stage.name == "save" and config.checkpoint.resumable):
        yield Part(name, "optimizer")


def describe_sleep(plan: SleepPlan) -> str:
    """Returns the plan as text, for `--dry-run` and `tandem graph`."""
    if plan.limit is None:
        size = plan.parts[Part(ENGINE, "kv_cache")].num_bytes / GIB
        awake = [stage.name for stage in plan.stages if not stage.away and (stage.each_step or stage.now_and_then)]
        return (
            f"Servers on the GPUs of training give the {size:.4g} GiB of their cache back after they have generated "
            f"(awake in: {', '.join(awake)}); rollout.fleet.sleep=false keeps it."
        )
    largest = plan.largest
    lines = [
        f"Memory limit: {plan.limit / GIB:.4g} GiB for what the models keep; everything awake would take "
        f"{plan.everything / GIB:.4g} GiB, and the largest stage, {largest.name}, needs {plan.least(largest) / GIB:.4g} GiB "
        f"({plan.arithmetic(largest)})."
    ]
    if not plan.sleeps:
        return f"{lines[0]} Everything fits, so nothing sleeps."
    rows: list[tuple[str, ...]] = [("stage", "goes to sleep before it", "wakes for it", "moved MiB", "awake MiB")]
    for done in plan.steady():
        moves = done.moves
        sleeps, wakes = list(moves.sleep), [part for part in moves.wake if plan.parts[part].coming]
        if moves.again is not None:
            sleeps, wakes = [*moves.again.sleep, *sleeps], [*moves.again.wake, Part(ENGINE, "weights"), *wakes]
        cells = [", ".join(map(str, dict.fromkeys(some))) or "-" for some in (sleeps, wakes)]
        name = done.stage.name if done.stage.each_step else f"({done.stage.name})"
        rows.append((name, *cells, f"{done.total / 2**20:.1f}", f"{done.peak / 2**20:.1f}"))
    lines += [f"  {line}" for line in aligned(rows)]
    lines.append(f"A step moves {moved_bytes(plan.steady()) / GIB:.4g} GiB, without the stages in brackets.")
    return "\n".join(lines)
