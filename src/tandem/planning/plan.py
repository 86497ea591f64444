"""The plan of a run: memory, disk, and whether it fits."""

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.planning.job import Checkpoint, Job, checkpoint_of
from tandem.planning.machine import Machine
from tandem.planning.memory import GIB, Instant, MemoryItem, instants, kv_needed

RESERVE = 0.03
"""Share of the memory that the plan leaves to others: the system, a display, a second process on the GPU."""

GUESSED = ("activations", "logits", "tables", "allocator", "interpreter and libraries")
"""Items that depend on lengths, or on what a library does."""


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
"""Kind of memory → what makes it smaller."""


@dataclass(frozen=True)
class Plan:
    """A job's needs of a machine."""

    job: Job
    machine: Machine
    instants: tuple[Instant, ...]

    def worst_on(self, device: int) -> Instant:
        """The instant at which most of a GPU's memory is taken; ``device`` is 0 on a CPU."""
        return max(self.instants, key=lambda instant: instant.on(device))

    def peak_on(self, device: int) -> float:
        """Memory of one GPU in GiB, at its worst."""
        return self.worst_on(device).on(device) / GIB

    @property
    def devices(self) -> int:
        """GPUs that hold anything; 1 on a CPU."""
        items = (item for instant in self.instants for item in instant.items if item.place == "device")
        return max((item.first + item.devices for item in items), default=1)

    @property
    def fullest(self) -> int:
        """The GPU that holds most at its worst."""
        return max(range(self.devices), key=self.peak_on)

    @property
    def worst(self) -> Instant:
        """The worst instant of the first GPU."""
        return self.worst_on(0)

    @property
    def peak_gib(self) -> float:
        """Memory at that instant."""
        return self.peak_on(0)

    @property
    def host_gib(self) -> float:
        """Host memory beside a GPU, at its worst; 0 on a CPU, where all is one."""
        return max(instant.total("host") for instant in self.instants) / GIB

    def certain_items(self, instant: Instant, device: int) -> Iterator[MemoryItem]:
        """Items that one GPU must hold whatever the lengths of sequences: weights, moments, gradients, servers' shares; no
        activations, and no cache of our own engine, which grows with need."""
        foreign = self.job.generator is not None and self.job.generator.foreign is not None
        guessed = GUESSED if foreign else (*GUESSED, "KV cache")
        yield from (item for item in instant.items if item.on(device) and item.what not in guessed)

    def certain_at(self, instant: Instant, device: int) -> float:
        """Its bytes."""
        return sum(item.num_bytes for item in self.certain_items(instant, device))

    def certain_gib(self, device: int) -> float:
        """The same at the worst instant, in GiB."""
        return max(self.certain_at(instant, device) for instant in self.instants) / GIB

    @property
    def usable_gib(self) -> float:
        """Memory that a plan may take."""
        return self.machine.memory_gib * (1 - RESERVE)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it cannot run as it is; empty where it fits."""
        found = []
        ranks = max(model.ranks for model in self.job.models)
        if self.machine.kind == "gpu" and ranks > self.machine.count:
            found.append(f"it wants {ranks} ranks, and there are {self.machine.count} devices")
        generator = self.job.generator
        if (
            generator is not None
            and generator.foreign is None
            and kv_needed(self.job, generator) > generator.kv_cache_gib * GIB
        ):
            found.append(
                f"one sample of {self.job.lengths.prompt} + {self.job.lengths.longest} tokens needs "
                f"{kv_needed(self.job, generator) / GIB:.3f} GiB of KV cache, and rollout.engine.kv_cache_gib is "
                f"{generator.kv_cache_gib:g} GiB"
            )
        most = self.peak_on(self.fullest)
        if most > self.usable_gib:
            who, phase = f"GPU {self.fullest}" if self.fullest else "it", self.worst_on(self.fullest).phase
            found.append(
                f"{who} needs {most:.2f} GiB while {phase}, and {self.usable_gib:.2f} GiB of "
                f"{self.machine.memory_gib:.2f} GiB can be used"
            )
        return tuple(found)

    @property
    def fits(self) -> bool:
        """True if the machine has enough devices and memory."""
        return not self.problems

    @property
    def advice(self) -> str:
        """A sentence: the largest kind of memory, and what makes it smaller."""
        columns = self.worst_on(self.fullest).columns(self.fullest)
        largest = max(columns, key=lambda head: columns[head])
        return f"Most of it is {largest}, {columns[largest]:.2f} GiB; what helps: {SMALLER[largest]}"

    @property
    def checkpoint(self) -> Checkpoint:
        """The files of one checkpoint."""
        return checkpoint_of(self.job.models, self.job.saves)


def make_plan(job: Job, machine: Machine) -> Plan:
    """A pure function: the same job and machine give the same plan."""
    return Plan(job, machine, instants(job, machine))
