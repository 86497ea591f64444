"""The plan of a run: memory, disk, and whether it fits."""

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.planning.disk import Checkpoint, checkpoint_of
from tandem.planning.items import GIB, Instant, MemoryItem
from tandem.planning.job import Job
from tandem.planning.machine import Machine
from tandem.planning.memory import instants, kv_needed

RESERVE = 0.03
"""Share of the memory that the plan leaves to others: the system, a display, a second process on the GPU."""

GUESSED = ("activations", "logits", "tables", "allocator", "heap", "interpreter and libraries")
"""Items that depend on lengths, or on what a library does."""


@dataclass(frozen=True)
class Plan:
    """A job's needs of a machine."""

    job: Job
    machine: Machine
    instants: tuple[Instant, ...]

    @property
    def worst(self) -> Instant:
        """The instant at which most of the device's memory is taken."""
        return max(self.instants, key=lambda instant: instant.total())

    @property
    def peak_gib(self) -> float:
        """Memory at that instant."""
        return self.worst.total() / GIB

    @property
    def devices(self) -> int:
        """GPUs that hold anything; 1 on a CPU."""
        items = (item for instant in self.instants for item in instant.items if item.place == "device")
        return max((item.first + item.devices for item in items), default=1)

    def peak_on(self, device: int) -> float:
        """Memory of one GPU in GiB, at its worst."""
        return max(instant.on(device) for instant in self.instants) / GIB

    @property
    def host_gib(self) -> float:
        """Host memory beside a GPU, at its worst; 0 on a CPU, where all is one."""
        return max(instant.total("host") for instant in self.instants) / GIB

    @property
    def rank_gib(self) -> float:
        """Peak memory of the first rank alone, which holds most."""
        return max(instant.of_first_rank for instant in self.instants) / GIB

    @property
    def machine_gib(self) -> float:
        """Peak memory of all devices together; on a CPU the peak itself."""
        return max(instant.of_machine for instant in self.instants) / GIB

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
        other = max(range(1, self.devices), key=self.peak_on, default=None)
        if other is not None and self.peak_on(other) > self.usable_gib:
            found.append(
                f"GPU {other} needs {self.peak_on(other):.2f} GiB, and {self.usable_gib:.2f} GiB of "
                f"{self.machine.memory_gib:.2f} GiB can be used"
            )
        if self.peak_gib > self.usable_gib:
            found.append(
                f"it needs {self.peak_gib:.2f} GiB while {self.worst.phase}, and {self.usable_gib:.2f} GiB of "
                f"{self.machine.memory_gib:.2f} GiB can be used"
            )
        return tuple(found)

    @property
    def fits(self) -> bool:
        """True if the machine has enough devices and memory."""
        return not self.problems

    @property
    def moved_gib(self) -> float:
        """GiB that wake and go to sleep in one step."""
        return sum(self.moved_gib_by_stage.values())

    @property
    def moved_gib_by_stage(self) -> dict[str, float]:
        """GiB that move before each stage of a step, if any do."""
        done = self.job.sleeping.steady() if self.job.sleeping is not None else []
        return {one.stage.name: one.total / GIB for one in done if one.stage.each_step and one.total}

    @property
    def checkpoint(self) -> Checkpoint:
        """The files of one checkpoint."""
        return checkpoint_of(self.job.models, self.job.saves)

    @property
    def checkpoint_gib(self) -> float:
        """Disk of one checkpoint."""
        return self.checkpoint.total / GIB

    @property
    def kept_gib(self) -> float | None:
        """Disk of those that lie there when the run ends; None where it is not known how many."""
        kept = self.job.saves.kept
        return None if kept is None else kept * self.checkpoint_gib

    @property
    def most_gib(self) -> float | None:
        """Disk at one time: the next one is whole before an older one is removed."""
        most = self.job.saves.most
        return None if most is None else most * self.checkpoint_gib


def make_plan(job: Job, machine: Machine) -> Plan:
    """A pure function: the same job and machine give the same plan."""
    return Plan(job, machine, instants(job, machine))
