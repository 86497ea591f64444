"""The memory of a run: what each phase holds, who holds it, and which instant is the worst.

The figures follow the code. What a model keeps depends on its layout. FSDP: trained weights in float32, one part per rank,
gathered a layer at a time (`tandem.engines.train.holders`). One process: the whole model in float32, and a rounded copy to
compute with. DeepSpeed: flat pieces of its own (`tandem.engines.train.zero`); stages 1 and 2 also keep the whole model in
the dtype of the computation, which in float32 holds the masters. The embedded engine has its own copy, and a second one
while an update is staged. Under `memory_limit_gib` a phase holds only what is awake in it (`tandem.flow.sleep_plan`);
otherwise nothing sleeps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tandem.api.engines import InferencePart, TrainPart
from tandem.flow.sleep_plan import GIB, Part
from tandem.models.footprint import FLOAT32, cache_bytes, engine_bytes, row_capacity
from tandem.models.shape import BYTES
from tandem.planning.job import Generator, Job
from tandem.planning.machine import Machine
from tandem.planning.planned_model import MicroBatch, PlannedModel, Step, activation_bytes, cut_step, head_bytes, passing

Place = Literal["device", "host"]

COLUMNS = {
    "weights": (
        "parameters",
        "parameters, rounded",
        "masters",
        "gathered parameters",
        "shared weights",
        "kept versions",
        "files of the base",
    ),
    "optimizer": ("optimizer",),
    "gradients": (
        "gradients",
        "gradient of the head",
        "gradient of the embedding",
        "norm of the gradients",
        "buffer of gradients",
        "buckets",
    ),
    "activations": ("activations",),
    "logits": ("logits",),
    "KV cache": ("KV cache",),
    "staged": (
        "staged weights",
        "rounded weights",
        "one whole tensor",
        "adapter",
        "weights before",
        "weights to write",
        "copy that is saved",
    ),
}
"""Heading of the table → the items that it sums up; all others are under `other`."""


@dataclass(frozen=True)
class MemoryItem:
    """A number of bytes and their holder."""

    role: str
    what: str
    num_bytes: float
    """Bytes in its place: a CPU's memory, the first GPU's, or host memory beside GPUs."""

    place: Place = "device"
    devices: int = 1
    """Number of GPUs that each hold as many bytes."""

    first: int = 0
    """Index of the first of these GPUs; 0 on a CPU."""

    def on(self, device: int) -> bool:
        """True if a GPU (or with 0 a CPU's memory) holds the item."""
        return self.place == "device" and self.first <= device < self.first + self.devices


@dataclass(frozen=True)
class Instant:
    """The items of one phase, at its worst moment, on the device (or machine) that holds most."""

    phase: str
    items: tuple[MemoryItem, ...]

    def total(self, place: Place = "device") -> float:
        """Total bytes in ``place``; for a device those of the first GPU."""
        if place == "host":
            return sum(item.num_bytes for item in self.items if item.place == "host")
        return self.on(0)

    def on(self, device: int) -> float:
        """Total bytes on one GPU."""
        return sum(item.num_bytes for item in self.items if item.on(device))

    def columns(self, device: int = 0) -> dict[str, float]:
        """GiB of one GPU under each heading of `COLUMNS`, and `other`."""
        found = dict.fromkeys([*COLUMNS, "other"], 0.0)
        for item in self.items:
            if item.on(device):
                found[next((head for head, kinds in COLUMNS.items() if item.what in kinds), "other")] += item.num_bytes / GIB
        return found


@dataclass(frozen=True)
class Room:
    """The memory of some ranks: on a CPU one memory for all, otherwise a device each beside host memory."""

    ranks: int
    shared: bool
    first: int = 0
    """Number of the first of these ranks."""

    def item(self, role: str, what: str, each: float, place: Place = "device") -> MemoryItem:
        """An item of ``each`` bytes on every one of these ranks."""
        if self.shared or place == "host":
            return self.one(role, what, each * self.ranks, place)
        return MemoryItem(role, what, each, devices=self.ranks, first=self.first)

    def one(self, role: str, what: str, num_bytes: float, place: Place = "device") -> MemoryItem:
        """An item that only the first rank holds, or all ranks together."""
        return MemoryItem(role, what, num_bytes, "device" if self.shared else place)


NORM_BYTES = 12
"""Bytes per number of the largest gradient while its norm is taken: its square in float32 and again in float64."""

BUCKET = 50_000_000
"""Most numbers that DeepSpeed sends at a time, and under stage 3 fetches ahead (`tandem.engines.train.zero_library`)."""


def states(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Weights and moments of a model, which stay through all phases."""
    if not model.own:
        return
    if model.layout.zero is not None:
        yield from _zero_states(model, room)
        return
    yield room.item(model.role, "parameters", model.weight_bytes, _place(model))
    if not model.fsdp and model.dtype != "float32":
        yield room.item(model.role, "parameters, rounded", model.rounded_bytes)
    if model.trained:
        yield room.item(model.role, "optimizer", model.optimizer_bytes, _place(model))


def _zero_states(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Weights and moments under DeepSpeed. Stages 1 and 2: the whole model, as views of a flat tensor. Stage 3: a part of
    it, and the buffer in which gradients are summed, also for a frozen model."""
    whole, part, stage = model.masters, model.masters / model.parts, model.layout.zero
    yield room.item(model.role, "parameters", BYTES[model.dtype] * (part if stage == 3 else whole))
    if model.dtype != "float32":  # else they share the memory of the parameters
        yield room.item(model.role, "masters", FLOAT32 * part)
    if stage == 3:
        yield room.item(model.role, "buffer of gradients", FLOAT32 * part)
    if model.trained:
        yield room.item(model.role, "optimizer", 2 * FLOAT32 * part)


def gathered(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Parameters that are gathered while a model computes. FSDP: everything outside the layers, the present layer and the
    next. Stage 3: also what DeepSpeed fetches ahead."""
    root, layer = model.piece.root(model.head), model.piece.layer
    if model.adapters is not None:
        layer += model.adapters.rank * model.adapters.widths(model.shape)
    if model.fsdp:
        yield room.item(model.role, "gathered parameters", BYTES[model.dtype] * (root + 2 * layer))
    elif model.layout.zero == 3:
        yield room.item(
            model.role, "gathered parameters", BYTES[model.dtype] * min(model.masters + model.base, root + layer + BUCKET)
        )


def gradients_between(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Gradients from the second micro-batch of a step on: whole until they are divided over ranks, then a part. DeepSpeed
    sends them in buckets, in the dtype of the computation and in float32; on a CPU gloo copies them."""
    stage = model.layout.zero
    whole = stage == 1 if stage is not None else not model.sync_each
    if stage != 3:  # which has its buffer at all times
        yield gradients(model, room, FLOAT32 * model.masters / (1 if whole else model.parts))
    if stage is not None:
        a_number = BYTES[model.dtype] + (2 + room.shared) * FLOAT32
        yield room.item(model.role, "buckets", float(a_number * min(model.masters, BUCKET)))


def gradients_of_the_step(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Gradients while the optimizer works. DeepSpeed joins its pieces in one more tensor."""
    pieces = 2 if model.layout.zero in (1, 2) else 1
    yield gradients(model, room, pieces * FLOAT32 * model.masters / model.parts)
    largest = max(model.piece.embedding, model.piece.hidden * model.piece.intermediate)
    if model.adapters is not None:
        largest = model.adapters.rank * max((max(model.shape.linears[name]) for name in model.adapters.modules), default=0)
    yield room.item(model.role, "norm of the gradients", NORM_BYTES * largest / model.parts, _place(model))


def gradients(model: PlannedModel, room: Room, each: float) -> MemoryItem:
    """The gradients of a model, ``each`` bytes on every rank."""
    return room.item(model.role, "gradients", each, _place(model))


def _place(model: PlannedModel) -> Place:
    return "host" if model.offload else "device"


TOKENIZER_BYTES = 1000
"""Bytes per token of the vocabulary: the library held 46 MiB for a vocabulary of 49,152, measured once."""


def step_of(job: Job, model: PlannedModel, mini_batches: int = 1) -> Step:
    """The micro-batches of a pass at full length; ranks that share tokens take as many times more of them together."""
    layout, groups = model.layout, -(-job.groups // mini_batches)
    most, prompt, longest = model.max_tokens * layout.context, job.lengths.prompt, job.lengths.longest
    step = cut_step(groups, job.trained, prompt, longest, most=most, ranks=layout.batches, together=job.together)
    if not model.gathers_keys:
        return step
    alone = tuple((prompt, 1) for _, count in step.largest.groups for _ in range(count))  # prompts are not shared then
    return Step(MicroBatch(alone, longest), step.count)


def instants(job: Job, machine: Machine) -> tuple[Instant, ...]:
    """Every phase of a step once the optimizers have their moments, in order."""
    room = Room(job.actor.ranks, shared=machine.kind == "cpu")
    rooms = {model.role: replace(room, ranks=model.ranks, first=model.layout.first) for model in job.models}
    partners = [one for one in job.writers.values() if one.in_episodes]
    steady = [item for model in job.models if model.role not in job.writers for item in states(model, rooms[model.role])]
    steady += [_of_engines(one, "parameters", engine_weights(one, machine)) for one in job.writers.values()]
    steady += [item for one in partners for item in _cache_of(job, one)]
    steady += [*_engine(job, machine), *_processes(job, machine, room), *_copied(job, room)]
    coming: dict[str, list[MemoryItem]] = {}
    asked = [item for model in job.models if model.role in job.asked for item in _scoring(job, model, rooms[model.role])]
    generator = job.generator
    if generator is not None and (generator.foreign is None or generator.seats):
        coming["generate"] = asked
        if generator.foreign is None:
            coming["generate"] += [item for one in (generator, *partners) for item in _generation(one)]
    scoring = {role for _, role in job.passes} - set(job.asked)
    for model in job.models:
        writing = job.writers.get(model.role)
        if writing is not None and not writing.in_episodes:  # its cache is given back when it has judged
            coming[f"score: {model.role}"] = [*_cache_of(job, writing), *_generation(writing)]
        elif writing is None and model.role in scoring:
            coming[f"score: {model.role}"] = [*_scoring(job, model, rooms[model.role])]
    if job.verifies:
        coming["verify"] = [*_verifying(job.actor, room), *_scoring(job, job.actor, room)]
    for model in job.models:
        if model.trained:
            coming[f"update: {model.role}"] = _update(job, model, rooms[model.role])
            coming[f"optimizer: {model.role}"] = [*gradients_of_the_step(model, rooms[model.role])]
    if generator is not None and (generator.foreign is None or generator.seats):
        coming["publish"] = [*_publishing(job, machine)] if generator.foreign is None else []
    coming["save"] = [*_saving(job, room)]
    return tuple(_worst(job, phase, steady, items, machine, room) for phase, items in coming.items())


PARTS: dict[str, TrainPart] = {"parameters": "parameters", "parameters, rounded": "parameters", "optimizer": "optimizer"}
ENGINE_PARTS: dict[str, InferencePart] = {"parameters": "weights", "KV cache": "kv_cache"}
"""Name of an item → the part of the engine that it sleeps with."""


def _worst(
    job: Job, phase: str, steady: Sequence[MemoryItem], coming: Sequence[MemoryItem], machine: Machine, room: Room
) -> Instant:
    """A phase at that of its stages in which most is awake. The allocator's surplus is added to the ``coming`` items."""
    slack = machine.slack * sum(item.num_bytes for item in coming if item.on(0))
    coming = [*coming, *([room.item("process", "allocator", slack)] if slack else [])]
    sleeping = job.sleeping
    if sleeping is None or not sleeping.sleeps or phase not in job.awake:
        return Instant(phase, (*steady, *coming))
    instants = [Instant(phase, (*_of_awake(job, steady, one, machine), *coming)) for one in job.awake[phase]]
    return max(instants, key=lambda instant: instant.total())


def _of_awake(job: Job, steady: Sequence[MemoryItem], awake: frozenset[Part], machine: Machine) -> Iterator[MemoryItem]:
    """The items that are awake. Sleeping ones lie on disk if the device is the host, and in host memory beside a GPU."""
    assert job.sleeping is not None
    for item in steady:
        in_engine = item.role == "engine" or item.what == "KV cache"
        what = ENGINE_PARTS.get(item.what) if in_engine else PARTS.get(item.what)
        part = None if what is None else Part(item.role, what)
        if part is None or part in awake or part not in job.sleeping.parts:
            yield item
        elif machine.kind != "cpu" and not in_engine:
            yield replace(item, place="host", devices=1)


def _engine(job: Job, machine: Machine) -> Iterator[MemoryItem]:
    """The embedded engine's weights and cache, or the servers' shares, which stay through all phases."""
    generator = job.generator
    place: Place = "device" if machine.kind == "cpu" else "host"
    if generator is None:
        return
    if generator.foreign is not None:
        yield from _shares(generator, machine)
        return
    yield _of_engines(generator, "parameters", engine_weights(generator, machine))
    yield from _cache_of(job, generator)
    # one update: the weights, or an adapter alone, which is not rounded
    delivered = float(FLOAT32 * generator.adapter or BYTES[generator.delivered] * generator.shape.parameters())
    if generator.adapter and machine.kind == "cpu":  # pages of files, mapped at each update; the system may take them back
        yield MemoryItem("publish", "files of the base", float(generator.shape.stored * generator.shape.parameters()))
    if generator.own_process:  # the segment, or the folder's pages
        yield MemoryItem("engine", "shared weights", delivered, place)
    if job.kept_versions:
        yield MemoryItem("verify", "kept versions", delivered * job.kept_versions, place)


def _shares(generator: Generator, machine: Machine) -> Iterator[MemoryItem]:
    """The memory that vLLM and SGLang servers take of each of their GPUs: the weights, and the rest for the cache."""
    for seat in generator.seats:
        if seat.memory_share is not None:
            share = seat.memory_share * machine.memory_gib * GIB
            weights = min(share, engine_bytes(generator.shape, generator.dtype, cpu=False) / len(seat.devices))
            where = {"devices": len(seat.devices), "first": seat.devices[0]}
            yield MemoryItem(generator.role, "parameters", weights, **where)
            yield MemoryItem(generator.role, "KV cache", share - weights, **where)
    if generator.opened:
        yield MemoryItem(generator.role, "delivered weights", float(generator.opened))


def _cache_of(job: Job, generator: Generator) -> Iterator[MemoryItem]:
    yield _of_engines(generator, "KV cache", cache_bytes(generator.shape, generator.dtype, kv_tokens(job, generator)[1]))
    tables = 1.5 * BYTES[generator.dtype] * generator.max_len * generator.shape.head_dim
    yield _of_engines(
        generator, "tables", tables + 20.0 * generator.max_running * max(16, (generator.lengths or job.lengths).longest)
    )


def _of_engines(generator: Generator, what: str, each: float) -> MemoryItem:
    """An item of ``each`` bytes for every engine: on devices of their own, or all in one memory."""
    if generator.apart:
        first = generator.seats[0].devices[0] if generator.seats else 0
        return MemoryItem(generator.role, what, each, devices=generator.engines, first=first)
    return MemoryItem(generator.role, what, each * generator.engines)


def engine_weights(generator: Generator, machine: Machine) -> float:
    """Bytes of one engine's weights."""
    return engine_bytes(generator.shape, generator.dtype, cpu=machine.kind == "cpu")


def kv_tokens(job: Job, generator: Generator) -> tuple[int, int]:
    """Returns (samples that run at once in one engine, tokens of cache that they fill at full length).

    Samples of a prompt share its keys; each has its own row for what it writes.
    """
    lengths = generator.lengths or job.lengths
    prompt, own, samples = lengths.prompt, lengths.longest, 1 if generator.lengths else max(1, job.generated)
    wanted = min(-(-generator.sequences // generator.engines), generator.max_running)
    budget = int(generator.kv_cache_gib * GIB) // (BYTES[generator.dtype] * generator.shape.kv_values)
    a_sample = float(row_capacity(prompt + own - 1))
    if samples > 1:
        a_sample = row_capacity(max(1, own - 1)) + row_capacity(prompt) / samples
    running = max(1, min(wanted, int(budget / a_sample)))
    return running, min(budget, int(running * a_sample))


def kv_needed(job: Job, generator: Generator) -> float:
    """Bytes of cache that the longest sample needs alone; an engine with less refuses it."""
    return cache_bytes(generator.shape, generator.dtype, row_capacity(job.lengths.prompt + job.lengths.longest - 1))


def _processes(job: Job, machine: Machine, room: Room) -> Iterator[MemoryItem]:
    generator, each = job.generator, machine.process_gib * GIB
    yield room.item("process", "interpreter and libraries", each)
    if generator is not None and generator.foreign is None and generator.own_process:
        yield _of_engines(generator, "interpreter and libraries", each)
    if machine.kind == "cpu":
        yield room.item("process", "tokenizer", float(TOKENIZER_BYTES * job.actor.shape.vocab))
        yield room.one("process", "reward workers", machine.worker_gib * GIB * job.workers)


def _generation(generator: Generator) -> Iterator[MemoryItem]:
    shape, size = generator.shape, BYTES[generator.dtype]
    a_logit = 2 * FLOAT32 + (size if generator.dtype == "bfloat16" else 0)
    yield _of_engines(generator, "logits", float(min(generator.max_running, generator.sequences) * shape.vocab * a_logit))
    width = shape.query + 2 * shape.key + 3 * shape.intermediate + 3 * shape.hidden
    yield _of_engines(generator, "activations", float(size * generator.prefill_chunk * width))


def _scoring(job: Job, model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """The items of a pass without gradients."""
    batch = step_of(job, model).largest
    yield from gathered(model, room)
    yield room.item(model.role, "activations", passing(model, batch, backward=False))
    if model.head != "scalar":
        yield room.item(model.role, "logits", head_bytes(model, batch, backward=False)[0])


def _verifying(actor: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Copies of the weights while deliveries are verified; also in float32 if one process rounds them."""
    before = FLOAT32 * actor.masters + BYTES[actor.dtype] * actor.base
    yield room.item("verify", "weights before", before / actor.parts)
    if actor.dtype != "float32" and actor.parts == 1:
        yield room.item("verify", "weights in float32", float(FLOAT32 * (actor.masters + actor.base)))


def _update(job: Job, model: PlannedModel, room: Room) -> list[MemoryItem]:
    """The items of an update at its worst moment: the backward pass begins (all activations are kept), or ends (all
    gradients exist)."""
    moments = [_backward_begins(job, model, room), _backward_ends(job, model, room)]
    return max(moments, key=lambda items: sum(item.num_bytes for item in items if item.place == "device"))


def _backward_begins(job: Job, model: PlannedModel, room: Room) -> list[MemoryItem]:
    batch, count = step_of(job, model, model.mini_batches)
    kept, layer = activation_bytes(model, batch), passing(model, batch, backward=True)
    items = [*gathered(model, room), *(gradients_between(model, room) if count > 1 or model.layout.zero else ())]
    if model.head == "scalar":
        return [*items, room.item(model.role, "activations", kept + layer)]
    logits, gradient = head_bytes(model, batch, backward=True)
    if layer > logits + gradient:  # the head is done when the layers are
        kept, logits = kept + layer, 0.0
        gradient = 0.0 if model.adapters is not None else BYTES[model.dtype] * model.piece.embedding
    named = {"activations": kept, "logits": logits, "gradient of the head": gradient}
    return [*items, *(room.item(model.role, what, each) for what, each in named.items())]


def _backward_ends(job: Job, model: PlannedModel, room: Room) -> list[MemoryItem]:
    """The items at the end of a backward pass. A tied head's gradient waits for the embedding's; over several ranks their
    sum is reduced in float32, which gloo copies."""
    shape, size = model.piece, BYTES[model.dtype]
    several = step_of(job, model, model.mini_batches).count > 1 or model.layout.zero is not None
    items = [*gathered(model, room)]
    items += gradients_between(model, room) if several else [gradients(model, room, FLOAT32 * model.masters / model.parts)]
    if model.adapters is not None:
        return items
    waiting = (2 if shape.tied and model.head != "scalar" else 1) * size
    if model.fsdp or model.layout.zero in (1, 2) or model.dtype != "float32":
        waiting += FLOAT32
    if model.fsdp and model.layout.shards > 1 and room.shared:
        waiting += FLOAT32
    return [*items, room.item(model.role, "gradient of the embedding", float(waiting * shape.embedding))]


def _publishing(job: Job, machine: Machine) -> Iterator[MemoryItem]:
    """The items of a delivery: the engine stages the update beside the weights that it serves."""
    generator, actor = job.generator, job.actor
    assert generator is not None
    yield _of_engines(generator, "staged weights", engine_weights(generator, machine))
    zero = actor.layout.zero  # below stage 3 each rank of DeepSpeed has all of it, but in the dtype of the computation
    if actor.fsdp or actor.layout.tensor > 1 or zero == 3 or (zero is not None and actor.dtype != "float32"):
        yield MemoryItem("publish", "one whole tensor", float(FLOAT32 * actor.shape.embedding))
    if generator.adapter:
        yield replace(_of_engines(generator, "adapter", float(FLOAT32 * generator.adapter)), role="publish")
    elif not generator.own_process and generator.delivered != "float32":
        rounded = float(BYTES[generator.delivered] * generator.shape.parameters())
        yield replace(_of_engines(generator, "rounded weights", rounded), role="publish")


def _copied(job: Job, room: Room) -> Iterator[MemoryItem]:
    """The copy that a background save writes: masters, moments, and their rounding to the checkpoint's dtype. The copy stays
    for the next save. Each rank copies its part; norms, which all ranks of a cut matrix have, count on each."""
    for model in job.models if job.saves_beside else ():
        if model.trained:
            each = 3 * FLOAT32 + (BYTES[model.dtype] if model.dtype != "float32" or not room.shared else 0)
            yield room.one(model.role, "copy that is saved", float(each * model.masters * model.layout.tensor), "host")


def _saving(job: Job, room: Room) -> Iterator[MemoryItem]:
    """The largest model in the dtype of the checkpoint, in host memory; on a CPU in float32 the masters themselves, except
    what is merged or gathered from several ranks."""
    for model in job.models if not job.saves_beside else ():
        if model.trained and (not room.shared or model.dtype != "float32" or model.ranks > 1 or model.adapters is not None):
            yield room.one("save", "weights to write", float(BYTES[model.dtype] * model.parameters), "host")
            return
