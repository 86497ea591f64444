"""Derives from a run's plan the parts of its models, their bytes, and the parts that each stage needs."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tandem.api.engines import TrainPart
from tandem.api.lines import aligned
from tandem.config.arithmetic import generating_ranks, servers_sleep
from tandem.config.backend import parse_layout
from tandem.config.devices import TOGETHER
from tandem.config.engine_memory import cache_gib, places
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import Servers, parse_backend
from tandem.config.preference import DistillConfig, PreferenceConfig, may_sleep, training_config
from tandem.config.train_engine import TrainEngineConfig
from tandem.flow.plan import Resident, RunPlan, Stage
from tandem.flow.process import choose_device
from tandem.flow.sleep_plan import AGAIN, BEGIN, GIB, Part, PartCost, SleepPlan, StageNeeds, moved_bytes
from tandem.models.footprint import Footprint, adapters_of, cache_bytes, engine_bytes, row_capacity
from tandem.models.precision import resolve_dtype
from tandem.models.shape import BYTES, Dtype, Shape, read_shape
from tandem.weights.cuda_ipc import staged_bytes

ENGINE = "engine"


@dataclass(frozen=True)
class Where:
    """The device of a run, which may be on another machine."""

    cpu: bool
    dtype: Callable[[str], Dtype]
    """Maps `auto`, `float32` or `bfloat16` to the dtype on that device."""

    fast_bfloat16: bool = True
    """False: the inference engine computes bfloat16 weights in float32."""

    device_gib: float | None = None
    """Memory of one GPU; None on a CPU."""


def here(device: str) -> Where:
    """The device of this machine. ``device``: as `choose_device` returns it."""

    def dtype(name: str) -> Dtype:
        return "bfloat16" if str(resolve_dtype(name, device)) == "torch.bfloat16" else "float32"

    gib = None if device == "cpu" else torch.cuda.get_device_properties(device).total_memory / GIB
    return Where(device == "cpu", dtype, dtype("auto") == "bfloat16", gib)


def footprint(resident: Resident, shape: Shape, where: Where) -> Footprint:
    """The bytes of a resident that has a train engine."""
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
    config: BaseConfig, plan: RunPlan, where: Where, read: Callable[[str], Shape] = read_shape
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
        if training.rollout.weights.terms.on_gpu:  # from one delivery to the next, for a server that is started again
            dtype = getattr(torch, where.dtype(training.rollout.dtype))
            always.append((Part(ENGINE, "delivered weights"), staged_bytes(shape.tensors(), dtype)))
            remedies.append(f"leave rollout.weights.channel={training.rollout.weights.channel} out")
    if any(resident.in_episodes for resident in plan.residents):
        remedies.append("serve the reward model that the episodes ask (tandem serve-reward, remote(url=…))")
    stages = _stages(config, plan, parts, gradients, where)
    stages = (replace(stage, passing=(*stage.passing, *always)) for stage in stages)
    schedule = SleepPlan(parts, tuple(stages), int(training.memory_limit_gib * GIB), one_memory=where.cpu)
    whole = [model.name for model in plan.residents if model.trained and model.engine and model.engine.lora.rank is None]
    schedule.check(", or ".join(remedies), whole=whole)
    return schedule


def _server_plan(config: TrainConfig, plan: RunPlan, where: Where, read: Callable[[str], Shape]) -> SleepPlan:
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
        for stage in _stages(config, plan, parts, defaultdict(int), where)
    )
    return SleepPlan(parts, tuple(stages), one_memory=False)


def sleep_plan_here(config: BaseConfig, plan: RunPlan) -> SleepPlan | None:
    """`sleep_plan` for this machine.

    Raises:
        ConfigError: see `sleep_plan`.
    """
    return sleep_plan(config, plan, here(choose_device(config))) if may_sleep(config) else None


def _parts(resident: Resident, sizes: Footprint, where: Where, ranks: int) -> dict[Part, PartCost]:
    weights, masters = (sizes.weight_bytes + sizes.rounded_bytes) * ranks, 4 * sizes.masters / sizes.parts * ranks
    beside = BYTES[sizes.dtype] * sizes.trunk if sizes.borrows else 0
    written = masters if resident.changes else float(BYTES[sizes.dtype] * sizes.beside_base)
    costs: dict[TrainPart, tuple[float, float, float]]
    if not where.cpu:
        costs = {"parameters": (weights, weights, weights), "optimizer": (sizes.optimizer_bytes,) * 3}
    else:  # what is frozen is read from its folder again, but for an adapter; a rounded copy is made anew
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


def _engine_parts(config: TrainConfig, shape: Shape, where: Where, engines: int) -> dict[Part, PartCost]:
    """The parts of ``engines`` embedded engines: weights, which are delivered again, and the largest possible cache."""
    rollout = config.rollout
    if servers := parse_backend(rollout.backend):
        return _server_parts(config, servers, shape, where)
    dtype = where.dtype(rollout.dtype)
    if dtype == "bfloat16" and not where.fast_bfloat16:
        dtype = "float32"
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


def _server_parts(config: TrainConfig, servers: tuple[Servers, ...], shape: Shape, where: Where) -> dict[Part, PartCost]:
    """The parts of vLLM or SGLang servers on one device: a server takes its share at the start, and can release nearly all
    of it."""
    backend = config.rollout.backend
    if where.device_gib is None:
        raise ConfigError(
            f"memory_limit_gib={config.memory_limit_gib} with rollout.backend={backend} needs GPUs: on a CPU neither vLLM "
            "nor SGLang can give its memory back. Use rollout.backend=embedded, or leave memory_limit_gib out"
        )
    share = round((config.rollout.fleet.memory_share or TOGETHER) * where.device_gib * GIB)
    dtype = where.dtype(config.rollout.dtype)
    weights = max(round(engine_bytes(shape, dtype, cpu=False) / server.tensor) for server in servers)
    return {
        Part(ENGINE, "weights"): PartCost(weights, 0, weights),
        Part(ENGINE, "kv_cache"): PartCost(max(0, share - weights), 0, 0, standing=True),
    }


def _writer_parts(
    config: TrainConfig, name: str, engine: TrainEngineConfig, shape: Shape, where: Where
) -> dict[Part, PartCost]:
    """The parts of a judge that writes: weights, which are read again from its folder, and a cache while it judges."""
    settings = replace(config.rollout.engine, max_model_len=None)
    rollout = replace(config.rollout, backend="embedded", dtype=engine.dtype, engine=settings)
    engines = len(generating_ranks(config)) if where.cpu else 1  # each rank that generates judges its share
    engine_parts = _engine_parts(replace(config, rollout=rollout), shape, where, engines)
    return {
        Part(name, "parameters"): engine_parts[Part(ENGINE, "weights")],
        Part(name, "kv_cache"): engine_parts[Part(ENGINE, "kv_cache")],
    }


def _stages(
    config: BaseConfig, plan: RunPlan, parts: dict[Part, PartCost], gradients: dict[str, int], where: Where
) -> Iterator[StageNeeds]:
    weights = frozenset({Part(ENGINE, "weights")})
    actor = frozenset({Part("actor", "parameters")})
    if weights <= parts.keys():
        yield StageNeeds(AGAIN, actor, gives=weights, each_step=False)
        yield StageNeeds(BEGIN, actor, each_step=False)
    for resident in plan.residents:
        if resident.changes and resident.engine is not None:
            own_parts = frozenset(part for part in parts if part.resident == resident.name)
            trunk = frozenset({Part(resident.trunk_of, "parameters")}) if resident.trunk_of is not None else frozenset()
            yield StageNeeds(f"load {resident.name}", own_parts | trunk, own_parts, each_step=False)
    for stage in plan.stages:
        residents = [_owner(plan, name) for name in stage.awake]
        needs = {part for name in residents for part in _needed(stage, name, config) if part in parts}
        trunks = (plan.resident(name) for name in residents)
        needs |= {
            Part(trunk_model.trunk_of, "parameters")
            for trunk_model in trunks
            if trunk_model is not None and trunk_model.trunk_of is not None
        }
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
            each_step=stage.kind != "keep" or stage.name == "record",
            now_and_then=stage.kind == "keep" and stage.name != "record",
        )


def _owner(plan: RunPlan, name: str) -> str:
    """The resident that owns the memory: a model whose base is another's has none of its own."""
    resident = plan.resident(name)
    assert resident is not None, "stages need residents of the plan"
    return resident.base_of or name


def _needed(stage: Stage, name: str, config: BaseConfig) -> Iterator[Part]:
    if name == ENGINE:
        yield Part(name, "weights")
        if stage.name != "publish":
            yield Part(name, "kv_cache")
        return
    yield Part(name, "parameters")
    yield Part(name, "kv_cache")  # of a judge that writes; no other model has one
    if stage.kind == "update" or (stage.name == "save" and config.checkpoint.resumable):
        yield Part(name, "optimizer")


def describe_sleep(plan: SleepPlan) -> str:
    """The plan in words, for `--dry-run` and `tandem graph`."""
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
