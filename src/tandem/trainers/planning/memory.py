"""Memory of a run: what exists in each phase, who holds it, and which instant is the worst.

Counted as the code holds it: masters are float32, with a copy in the compute dtype beside them in one process (`Replica`)
and gathered a layer at a time over several (`Sharded`); AdamW has two float32 moments; frozen models hold float32 masters
too; the embedded engine has a copy of its own, and a second one while an update is staged. Nothing sleeps between phases.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tandem.trainers.planning import activations
from tandem.trainers.planning.batches import Step, cut
from tandem.trainers.planning.job import Generator, Held, Job
from tandem.trainers.planning.machine import Machine
from tandem.trainers.planning.shape import BYTES

GIB = 2**30
FLOAT32 = 4
NORM_BYTES = 12
"""Of each number of the largest gradient while its norm is taken: its square in float32, and that in float64."""

SMALLEST_ROW = 32
"""Smallest row of the KV cache, tokens."""

Place = Literal["device", "host"]


@dataclass(frozen=True)
class Item:
    """Bytes that somebody holds."""

    role: str
    what: str
    num_bytes: float
    place: Place = "device"


@dataclass(frozen=True)
class Instant:
    """The items of one phase, at its worst moment, on the device (or machine) that holds most."""

    phase: str
    items: tuple[Item, ...]

    def total(self, place: Place = "device") -> float:
        """Bytes."""
        return sum(item.num_bytes for item in self.items if item.place == place)


@dataclass(frozen=True)
class Batches:
    """The largest micro-batches of each model, at full length."""

    update: dict[str, Step]
    score: dict[str, Step]


def batches_of(job: Job, length: int) -> Batches:
    """How each model's passes are cut when completions have ``length`` tokens."""

    def of(model: Held, groups: int) -> Step:
        return cut(
            groups, job.trained, job.lengths.prompt, length, most=model.max_tokens, ranks=model.ranks, together=job.together
        )

    update = {m.role: of(m, -(-job.groups // m.mini_batches)) for m in job.models if m.trained}
    return Batches(update, {m.role: of(m, job.groups) for m in job.models})


def instants(job: Job, machine: Machine) -> tuple[Instant, ...]:
    """Every phase of a step once the optimizers have their moments, in order."""
    worst = batches_of(job, job.lengths.longest)
    cpu = machine.kind == "cpu"
    ranks = job.actor.ranks if cpu else 1  # on a CPU all ranks share the memory
    steady = [item for model in job.models for item in _states(model, ranks)] + list(_engine(job, machine))
    steady += [*_processes(job, machine, ranks), *_copied(job, machine)]
    found = []

    def add(phase: str, *items: Item) -> None:
        everything = [*steady, *items]
        holes = machine.slack * sum(item.num_bytes for item in items if item.place == "device")
        if holes:
            everything.append(Item("process", "allocator", holes))
        found.append(Instant(phase, tuple(everything)))

    if job.generator is not None and job.generator.foreign is None:
        add("generate", *_generation(job.generator))
    for model in job.models:
        if not model.trained or model.role == "critic" or job.proximal:
            add(f"score: {model.role}", *_scoring(model, worst.score[model.role], ranks))
    if job.verifies:
        copy = Item("verify", "weights before", FLOAT32 * _parameters(job.actor) / job.actor.ranks * ranks)
        add("verify", copy, *_scoring(job.actor, worst.score["actor"], ranks))
    for model in job.models:
        if model.trained:
            add(f"update: {model.role}", *_update(model, worst.update[model.role], ranks))
            add(f"optimizer: {model.role}", *_optimizer(model, ranks))
    if job.generator is not None and job.generator.foreign is None:
        add("publish", *_publishing(job, machine))
    add("save", *_saving(job, machine))
    return tuple(found)


def _parameters(model: Held) -> int:
    return model.shape.parameters(model.head)


def _states(model: Held, ranks: int) -> Iterator[Item]:
    """Weights and moments, of all ranks that share the memory."""
    count, share = _parameters(model), ranks / model.ranks
    yield Item(model.role, "parameters", FLOAT32 * count * share)
    if not model.sharded and model.dtype != "float32":
        yield Item(model.role, "parameters, rounded", BYTES[model.dtype] * count * share)
    if model.trained:
        yield Item(model.role, "optimizer", 2 * FLOAT32 * count * share)


def _gathered(model: Held, ranks: int) -> Iterator[Item]:
    """What FSDP gathers: everything outside the layers, the layer that computes and the next one."""
    if model.sharded:
        count = model.shape.root(model.head) + 2 * model.shape.layer
        yield Item(model.role, "gathered parameters", BYTES[model.dtype] * count * ranks)


def _engine(job: Job, machine: Machine) -> Iterator[Item]:
    """The embedded engine's weights and cache, which stay through all phases."""
    generator = job.generator
    if generator is None or generator.foreign is not None:
        return
    yield Item("engine", "parameters", engine_weights(generator, machine) * generator.engines)
    yield Item("engine", "KV cache", kv_cache(job, generator) * generator.engines)
    tables = 1.5 * BYTES[generator.dtype] * generator.max_len * generator.shape.head_dim
    slots = 20.0 * generator.max_running * max(16, job.lengths.longest)
    yield Item("engine", "tables", (tables + slots) * generator.engines)
    if generator.own_process:  # the segment, or the folder's pages
        delivered = BYTES[generator.delivered] * generator.shape.parameters()
        yield Item("engine", "shared weights", delivered, "device" if machine.kind == "cpu" else "host")
    if job.kept_versions:
        kept = BYTES[generator.delivered] * generator.shape.parameters() * job.kept_versions
        yield Item("verify", "kept versions", kept, "device" if machine.kind == "cpu" else "host")


def engine_weights(generator: Generator, machine: Machine) -> float:
    """Bytes of one copy; on a CPU a tied head is laid out anew for its kernels."""
    shape = generator.shape
    packed_head = shape.embedding if shape.tied and machine.kind == "cpu" else 0
    return BYTES[generator.dtype] * (shape.parameters() + packed_head)


def row_capacity(tokens: int) -> int:
    """Tokens of the KV cache row that holds so many: see `KVCache.capacity_for`."""
    step = SMALLEST_ROW
    while tokens > 4 * step:
        step *= 2
    return -(-tokens // step) * step


def kv_tokens(job: Job, generator: Generator) -> tuple[int, int]:
    """(samples that run at once in one engine, tokens of cache that they hold at full length).

    Samples of a prompt share its keys; each has a row of its own for what it writes.
    """
    samples = max(1, job.generated)
    wanted = min(-(-generator.sequences // generator.engines), generator.max_running)
    prompt, own = job.lengths.prompt, job.lengths.longest
    budget = int(generator.kv_cache_gib * GIB) // (BYTES[generator.dtype] * generator.shape.kv_values)
    if samples > 1:
        a_sample = row_capacity(max(1, own - 1)) + row_capacity(prompt) / samples
    else:
        a_sample = float(row_capacity(prompt + own - 1))
    running = max(1, min(wanted, int(budget / a_sample)))
    return running, min(budget, int(running * a_sample))


def kv_needed(job: Job, generator: Generator) -> float:
    """Bytes of cache that the longest sample needs alone; with less the engine refuses it."""
    tokens = row_capacity(job.lengths.prompt + job.lengths.longest - 1)
    return float(tokens * BYTES[generator.dtype] * generator.shape.kv_values)


def kv_cache(job: Job, generator: Generator) -> float:
    """Bytes of one engine's cache."""
    return kv_tokens(job, generator)[1] * BYTES[generator.dtype] * generator.shape.kv_values


def _processes(job: Job, machine: Machine, ranks: int) -> Iterator[Item]:
    generator = job.generator
    embedded = generator is not None and generator.foreign is None and generator.own_process
    count = ranks + (generator.engines if embedded and generator is not None else 0)
    yield Item("process", "interpreter and libraries", machine.process_gib * GIB * count)
    if job.workers and machine.kind == "cpu":
        yield Item("process", "reward workers", machine.worker_gib * GIB * job.workers)


def _generation(generator: Generator) -> Iterator[Item]:
    shape, rows = generator.shape, min(generator.max_running, generator.sequences)
    logits = rows * shape.vocab * (2 * FLOAT32 + (BYTES[generator.dtype] if generator.dtype == "bfloat16" else 0))
    yield Item("engine", "logits", float(logits * generator.engines))
    width = shape.query + 2 * shape.key + 3 * shape.intermediate + 3 * shape.hidden
    chunk = BYTES[generator.dtype] * generator.prefill_chunk * width
    yield Item("engine", "activations", float(chunk * generator.engines))


def _scoring(model: Held, step: Step, ranks: int) -> Iterator[Item]:
    """A pass without gradients."""
    batch = step.largest
    yield from _gathered(model, ranks)
    layer = activations.passing(model.shape, batch, model.dtype, backward=False)
    yield Item(model.role, "activations", layer * ranks)
    if model.head != "scalar":
        logits = activations.head_forward(model.shape, batch, model.dtype, model.chunk_tokens)
        yield Item(model.role, "logits", logits * ranks)


def _update(model: Held, step: Step, ranks: int) -> Iterator[Item]:
    """The worst of two moments: the backward pass begins (everything is kept), or ends (all gradients are there)."""
    begins, ends = _backward_begins(model, step, ranks), _backward_ends(model, step, ranks)
    yield from max(begins, ends, key=lambda items: sum(item.num_bytes for item in items))


def _gradients(model: Held, ranks: int) -> Item:
    return Item(model.role, "gradients", FLOAT32 * _parameters(model) / model.ranks * ranks)


def _backward_begins(model: Held, step: Step, ranks: int) -> list[Item]:
    shape, batch = model.shape, step.largest
    kept = activations.kept(shape, batch, model.dtype, checkpointing=model.checkpointing)
    layer = activations.passing(shape, batch, model.dtype, backward=True)
    items = [*_gathered(model, ranks)]
    if step.count > 1:
        items.append(_gradients(model, ranks))
    if model.head == "scalar":
        return [*items, Item(model.role, "activations", (kept + layer) * ranks)]
    kept += activations.head_kept(shape, batch, model.dtype)
    logits, gradient = activations.head_backward(shape, batch, model.dtype, model.chunk_tokens)
    if layer > logits + gradient:  # the head is done when the layers are
        kept, logits, gradient = kept + layer, 0.0, BYTES[model.dtype] * shape.embedding
    items += [
        Item(model.role, "activations", kept * ranks),
        Item(model.role, "logits", logits * ranks),
        Item(model.role, "gradient of the head", gradient * ranks),
    ]
    return items


def _backward_ends(model: Held, step: Step, ranks: int) -> list[Item]:
    """A tied head's gradient waits for the embedding's; over several ranks the sum of both is reduced in float32."""
    shape, size = model.shape, BYTES[model.dtype]
    copies = 2 if shape.tied and model.head != "scalar" else 1
    waiting = copies * size * shape.embedding
    if model.sharded or model.dtype != "float32":
        waiting += FLOAT32 * shape.embedding
    return [
        *_gathered(model, ranks),
        _gradients(model, ranks),
        Item(model.role, "gradient of the embedding", waiting * ranks),
    ]


def _optimizer(model: Held, ranks: int) -> Iterator[Item]:
    yield _gradients(model, ranks)
    largest = max(model.shape.embedding, model.shape.hidden * model.shape.intermediate)
    yield Item(model.role, "norm of the gradients", NORM_BYTES * largest / model.ranks * ranks)


def _publishing(job: Job, machine: Machine) -> Iterator[Item]:
    """The engine lays the update out beside what it serves."""
    generator = job.generator
    assert generator is not None
    yield Item("engine", "staged weights", engine_weights(generator, machine) * generator.engines)
    if job.actor.sharded:
        yield Item("publish", "one whole tensor", float(FLOAT32 * job.actor.shape.embedding))
    if not generator.own_process and generator.delivered != "float32":
        yield Item("publish", "rounded weights", float(BYTES[generator.delivered] * generator.shape.parameters()))


def _copied(job: Job, machine: Machine) -> Iterator[Item]:
    """What a save beside training writes: masters and moments, and their rounding to the dtype of the checkpoint. The copy
    stays for the next save."""
    for model in job.models if job.saves_beside else ():
        if model.trained:
            place: Place = "device" if machine.kind == "cpu" else "host"
            each = 3 * FLOAT32 + (BYTES[model.dtype] if model.dtype != "float32" or place == "host" else 0)
            yield Item(model.role, "copy that is saved", float(each * _parameters(model)), place)


def _saving(job: Job, machine: Machine) -> Iterator[Item]:
    """The largest model in the dtype of the checkpoint, in host memory; on a CPU in float32 the masters themselves."""
    copied = [
        BYTES[model.dtype] * _parameters(model)
        for model in job.models
        if model.trained and (machine.kind == "gpu" or model.dtype != "float32" or model.sharded) and not job.saves_beside
    ]
    if copied:
        place: Place = "device" if machine.kind == "cpu" else "host"
        yield Item("save", "weights to write", float(max(copied)), place)
