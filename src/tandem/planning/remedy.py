"""Changes of a configuration so that its run fits: the fewest, mildest ones, tried in order."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tandem.config.backend import Layout
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.models.shape import BYTES
from tandem.planning.devices import DEVICES
from tandem.planning.items import GIB
from tandem.planning.memory import engine_weights, kv_needed, kv_tokens
from tandem.planning.plan import Plan
from tandem.planning.planned_model import PlannedModel
from tandem.planning.states import state_bytes

SMALLEST_CHUNK = 64
"""Rows of logits below which nothing more is saved."""

RANK = 16
"""Rank of the adapters that are proposed."""

BESIDE = 1.3
"""Times weights and moments: gradients are a third of them."""

MOST_DEVICES = 1024
"""So many are looked at."""


@dataclass(frozen=True)
class Remedy:
    """Keys and their new values, and the plan that they give."""

    settings: dict[str, Any]
    plan: Plan

    def arguments(self) -> str:
        """The changes as they are written on a command line."""
        return " ".join(overrides(self.settings))


def overrides(settings: dict[str, Any]) -> list[str]:
    """Keys and values as a command line takes them."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]


Replan = Callable[[dict[str, Any]], Plan]
"""The plan of the configuration with these keys replaced."""


def nearest(plan: Plan, config: BaseConfig, replan: Replan) -> Remedy | None:
    """The nearest change that fits; None where the plan fits as it is, or nothing here helps.

    Steps are taken in order, mildest first, until it fits; then every step is taken back that is not needed.
    """
    if plan.fits:
        return None
    settings: dict[str, Any] = {}
    for step in steps(plan, config):
        if settings.get("critic.shared"):  # it has no adapters of its own
            step = {key: value for key, value in step.items() if key != "critic.lora.rank"}
        found = _tried(settings | step, replan)
        settings |= step if found is not None else {}
        if found is not None and found.fits:
            break
    else:
        return None
    for key in list(settings):
        fewer = {name: value for name, value in settings.items() if name != key}
        if fewer and _fits(fewer, replan):
            settings = fewer
    for key in list(settings):
        settings = _milder(key, settings, config, replan)
    return Remedy(settings, replan(settings))


def _tried(settings: dict[str, Any], replan: Replan) -> Plan | None:
    """The plan; None where the configuration does not allow these keys together."""
    try:
        return replan(settings)
    except ConfigError:
        return None


def _fits(settings: dict[str, Any], replan: Replan) -> bool:
    found = _tried(settings, replan)
    return found is not None and found.fits


def steps(plan: Plan, config: BaseConfig) -> Iterator[dict[str, Any]]:
    """Changes from the mildest on: those that cost nothing, then time, then another number of devices."""
    job, actor = plan.job, plan.job.actor
    generator = job.generator
    if actor.ranks > plan.machine.count and plan.machine.kind == "gpu":
        yield {"actor.backend": spread_over(actor, plan.machine.count)}
    if generator is not None and generator.foreign is None:
        least = kv_needed(job, generator) / GIB
        if generator.kv_cache_gib < least:
            yield {"rollout.engine.kv_cache_gib": _up(least)}
        held = kv_tokens(job, generator)[1] * BYTES[generator.dtype] * generator.shape.kv_values / GIB
        for share in (0.5, 0.25, 0.125):
            if held * share >= least:
                yield {"rollout.engine.kv_cache_gib": _up(held * share)}
    chunk = actor.chunk_tokens
    while chunk > SMALLEST_CHUNK:
        chunk = max(SMALLEST_CHUNK, chunk // 2)
        yield {"actor.logprob_chunk_tokens": chunk}
    longest = job.lengths.prompt + job.lengths.longest
    most = actor.max_tokens
    while most > longest:
        most = max(longest, most // 2)
        yield {"actor.max_tokens_per_micro_batch": most}
    if actor.fsdp and actor.parts > 1 and not actor.sync_each:
        yield {"actor.gradient_sync": "micro_batch"}
    if not actor.checkpointing:
        yield {"actor.gradient_checkpointing": True}
    if plan.machine.fast_bfloat16:
        if actor.dtype != "bfloat16":
            yield {"actor.dtype": "bfloat16"}
        if generator is not None and generator.delivered != "bfloat16":
            yield {"rollout.dtype": "bfloat16"}
    if isinstance(config, TrainConfig) and job.critic is not None:
        yield {"critic.shared": True}
    if actor.layout.zero in (1, 2) and actor.ranks > 1:
        yield {"actor.backend": f"deepspeed:zero3:d{actor.ranks}"}
    ranks = 2
    while plan.machine.kind == "gpu" and ranks <= plan.machine.count:
        if ranks > actor.ranks or (ranks == actor.ranks and actor.layout.tensor > 1):
            yield {"actor.backend": spread_over(actor, ranks)}
        ranks *= 2
    yield from _last_resorts(plan)


def spread_over(actor: PlannedModel, ranks: int) -> str:
    """The actor's backend over another number of ranks, all of which shard."""
    return f"fsdp:d{ranks}" if actor.layout.zero is None else f"deepspeed:zero3:d{ranks}"


def _last_resorts(plan: Plan) -> Iterator[dict[str, Any]]:
    """Changes that are slow, and those that train something else. With DeepSpeed or tensor parallelism neither goes: ranks
    shard then."""
    actor, machine = plan.job.actor, plan.machine
    backend: dict[str, Any] = {}
    if actor.layout.zero is not None or actor.layout.tensor > 1:
        backend = {"actor.backend": f"fsdp:d{actor.ranks if machine.kind == 'cpu' else machine.count}"}
        yield backend
    if machine.kind == "gpu" and not actor.offload:
        yield backend | {"actor.offload": True}
    if actor.adapters is None:
        yield backend | {"actor.lora.rank": RANK} | ({"critic.lora.rank": RANK} if plan.job.critic is not None else {})


def others(plan: Plan, nearest_one: Remedy | None, replan: Replan) -> list[Remedy]:
    """Other ways by which the run would fit, each alone: checkpointing, adapters, more ranks, offloading. Empty where it
    fits as it is."""
    if plan.fits:
        return []
    actor = plan.job.actor
    ways: list[dict[str, Any]] = []
    if not actor.checkpointing:
        ways.append({"actor.gradient_checkpointing": True})
    if plan.machine.kind == "gpu" and plan.machine.count > 1:
        ways += [{"actor.backend": f"{kind}:d{plan.machine.count}"} for kind in ("fsdp", "deepspeed:zero3")]
    ways += [way for way in _last_resorts(plan) if way not in ways]
    found = []
    for way in ways:
        tried = None if nearest_one is not None and way == nearest_one.settings else _tried(way, replan)
        if tried is not None and tried.fits:
            found.append(Remedy(way, tried))
    return found


def _up(gib: float) -> float:
    """Rounded up to the third decimal."""
    return math.ceil(gib * 1000) / 1000


def _milder(key: str, settings: dict[str, Any], config: BaseConfig, replan: Replan) -> dict[str, Any]:
    """The largest value of a size that still fits, in steps of a power of two above the one that was found."""
    value = settings[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return settings
    before = _get(config, key)
    if before is None:  # there was none, like the rank of adapters
        return settings
    while value * 2 < before and _fits(settings | {key: value * 2}, replan):
        value *= 2
    return settings | {key: value}


def _get(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def engine_gib(plan: Plan) -> float:
    """Weights of the embedded engines, which nothing shards: those they serve, and those of an update beside them."""
    generator = plan.job.generator
    if generator is None or generator.foreign is not None:
        return 0.0
    return 2 * engine_weights(generator, plan.machine) * generator.on_device(plan.machine) / GIB


def _states_gib(plan: Plan, ranks: int) -> float:
    """Weights and moments on each of so many ranks, all of which shard."""
    layout = Layout(data=ranks)
    return sum(state_bytes(replace(model, layout=layout, offload=False)) for model in plan.job.models) / GIB


def least_gib(plan: Plan) -> float:
    """GiB of weights and moments alone on one device, which no length and no micro-batch changes."""
    return _states_gib(plan, 1) + engine_gib(plan)


def devices_needed(plan: Plan) -> int | None:
    """Number of these devices that would hold weights and moments, about; None if more of them would not help."""
    left = plan.usable_gib - plan.machine.process_gib - engine_gib(plan)
    enough = (ranks for ranks in range(1, MOST_DEVICES + 1) if BESIDE * _states_gib(plan, ranks) <= left)
    needed = next(enough, 0) if left > 0 else 0
    return needed if plan.machine.kind == "gpu" and needed > plan.machine.count else None


def larger_devices(gib: float) -> list[str]:
    """Devices of the table with at least so much memory, smallest first."""
    fitting = [(row.memory_gib, name) for name, row in DEVICES.items() if row.memory_gib >= gib]
    return [name for _, name in sorted(fitting)]
