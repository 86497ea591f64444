"""Tells whether a run fits into a machine: the plan, the check before a start, and values for open settings.

The check refuses a run only if weights, moments, gradients and servers' shares exceed the device. If the memory is exceeded
only together with estimates (activations, caches, fragmentation), the check warns.
"""

import bisect
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.train_engine import CHUNK_TOKENS, MICRO_BATCH_TOKENS, TrainEngineConfig
from tandem.models.shape import FLOAT32, Shape, read_shape
from tandem.planning.job import Job, Lengths, job_of, longest_of
from tandem.planning.machine import Machine
from tandem.planning.memory import GIB, Instant, instants, kv_needed

log = logging.getLogger(__name__)

RESERVE = 0.03
"""Share of the memory that the plan leaves free for the system, a display, or a second process on the GPU."""

GUESSED = ("activations", "logits", "allocator", "interpreter and libraries")
"""Items whose size depends on sequence lengths, or on the behaviour of a library."""

LOGITS_SHARE = 32
"""A chunk of logits may take 1/32 of a GPU in float32. Larger chunks need fewer additions to the head's gradient."""

MICRO_BATCHES = (40960, 32768, 24576, 16384, 12288, 8192, MICRO_BATCH_TOKENS)
"""Micro-batch sizes in tokens that `fitting` tries, largest first."""

PROMPT_TOKENS = 256
"""Assumed number of tokens of a prompt if no data is read."""

SPREAD = "more ranks (actor.backend=fsdp:dN), actor.offload=true on a GPU, adapters (actor.lora.rank=16), or a smaller model"
SMALLER = {
    "weights": SPREAD,
    "optimizer": SPREAD,
    "gradients": f"actor.gradient_sync=micro_batch where ranks shard; {SPREAD}",
    "activations": "a smaller actor.max_tokens_per_micro_batch, or actor.gradient_checkpointing=true",
    "logits": "a smaller actor.logprob_chunk_tokens",
    "KV cache": "a smaller rollout.engine.kv_cache_gib, or a smaller rollout.fleet.memory_share of servers",
    "staged": "actor.dtype=bfloat16, adapters (actor.lora.rank=16), or a smaller model",
    "other": "fewer reward_workers, or a larger machine",
}
"""Kind of memory → changes that make it smaller."""


@dataclass(frozen=True)
class Plan:
    """The memory that a job needs on a machine. Depends on nothing else. ``device``: a GPU's index; 0 on a CPU."""

    job: Job
    machine: Machine

    @cached_property
    def instants(self) -> tuple[Instant, ...]:
        """The phases of a step, each at the moment when it needs the most memory."""
        return instants(self.job, self.machine)

    def worst(self, device: int = 0) -> Instant:
        """Returns the instant at which the most memory of a device is in use."""
        return max(self.instants, key=lambda instant: instant.total(device))

    def peak_gib(self, device: int | None = 0) -> float:
        """Returns a device's largest memory use in GiB. None: that of the host beside GPUs; 0 if the device is a CPU."""
        return max(instant.total(device) for instant in self.instants) / GIB

    @property
    def devices(self) -> int:
        """Number of GPUs that the plan uses; 1 on a CPU."""
        return max((item.devices.stop for instant in self.instants for item in instant.items), default=1)

    @property
    def fullest(self) -> int:
        """The device with the largest memory use at any instant."""
        return max(range(self.devices), key=self.peak_gib)

    def certain(self, device: int) -> tuple[Instant, dict[str, float]]:
        """Returns (instant, owner → GiB) of a device's memory that does not depend on sequence lengths (weights, moments,
        gradients, servers' shares), when it is largest. Leaves out the cache of Tandem's engine, which grows on demand."""
        ours = self.job.generator is None or self.job.generator.foreign is None
        guessed = (*GUESSED, "KV cache") if ours else GUESSED

        def held(instant: Instant) -> dict[str, float]:
            owners = dict[str, float]()
            for item in instant.items:
                if device in item.devices and item.what not in guessed:
                    owners[item.role] = owners.get(item.role, 0.0) + item.num_bytes / GIB
            return owners

        return max(((instant, held(instant)) for instant in self.instants), key=lambda row: sum(row[1].values()))

    @property
    def usable_gib(self) -> float:
        """Memory of a device in GiB that a plan may use."""
        return self.machine.memory_gib * (1 - RESERVE)

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Reasons why the job does not fit the machine; empty if it fits."""
        found, lengths, generator, there = [], self.job.lengths, self.job.generator, self.machine.memory_gib
        ranks = max(model.ranks for model in self.job.models)
        if not self.machine.cpu and ranks > self.machine.count:
            found.append(f"it wants {ranks} ranks, and there are {self.machine.count} devices")
        if generator is not None and generator.foreign is None:
            needed = kv_needed(generator) / GIB
            if needed > generator.kv_cache_gib:
                found.append(
                    f"one sample of {lengths.prompt} + {lengths.longest} tokens needs {needed:.3f} GiB of KV cache, and "
                    f"rollout.engine.kv_cache_gib is {generator.kv_cache_gib:g} GiB"
                )
        most = self.peak_gib(self.fullest)
        if most > self.usable_gib:
            found.append(
                f"{f'GPU {self.fullest}' if self.fullest else 'it'} needs {most:.2f} GiB while "
                f"{self.worst(self.fullest).phase}, and {self.usable_gib:.2f} GiB of {there:.2f} GiB can be used"
            )
        return tuple(found)

    @property
    def fits(self) -> bool:
        """True if the machine has enough devices and memory."""
        return not self.problems

    @property
    def advice(self) -> str:
        """A sentence with the largest kind of memory and changes that make it smaller."""
        columns = self.worst(self.fullest).columns(self.fullest)
        largest = max(columns, key=lambda head: columns[head])
        return f"Most of it is {largest}, {columns[largest]:.2f} GiB; what helps: {SMALLER[largest]}"


def check_fit(config: BaseConfig, machine: Machine, read: Callable[[str], Shape] = read_shape) -> Plan:
    """Checks that the models and engines of a run fit into the GPUs, and returns the plan. Warns if only an
    estimate exceeds the memory. ``machine``: may be another machine than this one.

    Raises:
        ConfigError: a GPU is too small; the message has the figures and a remedy.
    """
    plan = _plan(config, machine, read)
    rows = [plan.certain(gpu) for gpu in range(plan.devices)]
    sums = [sum(held.values()) for _, held in rows]
    certain, there, peak = max(sums), machine.memory_gib, plan.fullest
    if certain > there:
        instant, held = rows[gpu := sums.index(certain)]
        owners = sorted(held.items(), key=lambda row: -row[1])
        holders = " + ".join(f"{role} {gib:.2f}" for role, gib in owners if gib >= SMALL_GIB)
        raise ConfigError(
            f"this run does not fit: GPU {gpu} has {there:.2f} GiB ({machine.name}), and {certain:.2f} GiB are needed for "
            f"{holders} while {instant.phase}, before any activations. {_remedy(plan, config)}"
        )
    if plan.peak_gib(peak) > there:
        log.warning(
            "GPU %d has %.2f GiB, and the plan of this run comes to %.2f GiB with activations and cache for prompts of %d "
            "tokens: it may run out of memory. `tandem plan` says when, and what to change",
            peak, there, plan.peak_gib(peak), PROMPT_TOKENS,
        )  # fmt: skip
    return plan


def _remedy(plan: Plan, config: BaseConfig) -> str:
    """Returns a sentence: a setting that may make the run fit, or `Plan.advice`."""
    generator = plan.job.generator
    shares = generator is not None and generator.foreign is not None and any(0 in seat.devices for seat in generator.seats)
    if not shares or not isinstance(config, TrainConfig) or config.memory_limit_gib is not None:
        return plan.advice
    if config.rollout.fleet.sleep is False:
        return "With rollout.fleet.sleep=true the server gives its memory back while training needs it"
    return (
        f"With memory_limit_gib={int(plan.usable_gib)} models and server give memory back in turns; a smaller "
        "rollout.fleet.memory_share is another way"
    )


def _plan(config: BaseConfig, machine: Machine, read: Callable[[str], Shape]) -> Plan:
    """Returns the plan of a run before its data is read."""
    return Plan(job_of(config, machine, Lengths(PROMPT_TOKENS, longest_of(config, PROMPT_TOKENS)), read), machine)


def fitting(config: BaseConfig, machine: Machine, read: Callable[[str], Shape] = read_shape) -> TrainEngineConfig:
    """Returns the actor's configuration with values for the settings that are left open: how often gradients are summed over
    ranks, the size of chunks of logits, and the largest micro-batches that fit into the GPUs.

    The values depend on the configuration and the size of the GPU, not on the memory that is free at present. So every rank,
    `tandem plan` and a resumed run use the same values, and cut batches in the same way.
    """
    actor, settings = config.actor, dict[str, Any]()
    if machine.cpu:
        return actor
    read = functools.cache(read)

    def planned(tokens: int) -> Plan:
        changed = replace(actor, **settings | {"max_tokens_per_micro_batch": tokens})
        job = _plan(replace(config, actor=changed), machine, read).job
        # Assumes two full micro-batches on each rank, because prompt lengths are unknown; gradients are held between them.
        each = 2 * -(-tokens // (job.lengths.prompt + job.trained * job.lengths.longest))
        full = each * max(model.ranks * model.mini_batches for model in job.models)
        return Plan(replace(job, groups=max(job.groups, full)), machine)

    def fits(tokens: int) -> bool:
        return tokens == MICRO_BATCH_TOKENS or planned(tokens).fits

    plan = planned(actor.micro_batch_tokens)
    model = plan.job.actor
    if actor.gradient_sync is None and model.fsdp and model.parts > 1 and not model.sync_each and not plan.fits:
        settings["gradient_sync"] = "micro_batch"

    if actor.logprob_chunk_tokens is None:
        rows = int(machine.memory_gib * GIB) // (LOGITS_SHARE * FLOAT32 * model.piece.vocab)
        settings["logprob_chunk_tokens"] = max(CHUNK_TOKENS, rows)
        if not planned(actor.micro_batch_tokens).fits:
            settings["logprob_chunk_tokens"] = CHUNK_TOKENS

    if actor.max_tokens_per_micro_batch is None:  # a smaller one needs less memory
        settings["max_tokens_per_micro_batch"] = MICRO_BATCHES[bisect.bisect_left(MICRO_BATCHES, True, key=fits)]
    return replace(actor, **settings)


SMALL_GIB = 0.005
"""Items below this size in GiB are left out of the tables."""


@dataclass(frozen=True)
class DeviceUse:
    """Neighbouring devices with the same items in memory."""

    devices: range
    who: str
    """The ranks and servers on them."""

    residents: dict[str, tuple[float, ...]]
    """Role → GiB in each phase of the plan."""


def uses(plan: Plan) -> tuple[DeviceUse, ...]:
    """Returns the use of every device in order; neighbouring devices with the same items are one row."""
    each = ((device, _residents(plan, device)) for device in range(plan.devices))
    found = []
    for residents, group in itertools.groupby(each, key=lambda one: one[1]):
        devices = [device for device, _ in group]
        found.append(DeviceUse(range(devices[0], devices[-1] + 1), _who(plan, devices), residents))
    return tuple(found)


def _residents(plan: Plan, device: int) -> dict[str, tuple[float, ...]]:
    held: dict[str, list[float]] = {}
    for phase, instant in enumerate(plan.instants):
        for item in instant.items:
            if device in item.devices:
                held.setdefault(item.role, [0.0] * len(plan.instants))[phase] += item.num_bytes / GIB
    return {role: tuple(gib) for role, gib in held.items() if max(gib) >= SMALL_GIB}


def _who(plan: Plan, devices: Sequence[int]) -> str:
    if plan.machine.cpu:
        return ""
    ranks = [device for device in devices if device < max(model.ranks for model in plan.job.models)]
    there = [f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"] if ranks else []
    seats = plan.job.generator.seats if plan.job.generator is not None else ()
    return ", ".join([*there, *(seat.words() for seat in seats if set(devices) & set(seat.devices))])


def drawing(plan: Plan) -> Iterator[str]:
    """Yields the lines of a table: a row for each device and role, a column for each phase, GiB in the cells."""
    phases = [instant.phase for instant in plan.instants]
    widths = [max(9, len(phase) + 2) for phase in phases]

    def row(name: str, cells: Sequence[str]) -> str:
        return f"{name:<22}" + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))

    yield row("GiB of each device", phases)
    for use in uses(plan):
        first, last = use.devices[0], use.devices[-1]
        gpus = f"GPU {first}" if first == last else f"GPU {first} to {last}, each"
        yield plan.machine.name if plan.machine.cpu else f"{gpus}: {use.who}"
        total = tuple(map(sum, zip(*use.residents.values(), strict=True)))
        for role, figures in [*use.residents.items(), (f"all, of {plan.machine.memory_gib:.1f}", total)]:
            yield row(f"  {role}", cells(figures)).rstrip()


def cells(figures: Sequence[float]) -> list[str]:
    """Formats figures in GiB; those below `SMALL_GIB` are empty."""
    return ["" if gib < SMALL_GIB else f"{gib:.2f}" for gib in figures]
