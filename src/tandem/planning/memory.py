"""Memory of a run: what exists in each phase, who holds it, and which instant is the worst.

Counted as the code holds it: what a model keeps over its ranks is in `states`, what a pass makes in `activations`; the
embedded engine has a copy of its own, and a second one while an update is staged. Under `memory_limit_gib` each phase has
what is awake in it (`tandem.flow.sleep_plan`); otherwise nothing sleeps between phases.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tandem.api.engines import InferencePart, TrainPart
from tandem.flow.sleep_plan import Part
from tandem.models.footprint import FLOAT32, cache_bytes, engine_bytes, row_capacity
from tandem.models.shape import BYTES
from tandem.planning import activations
from tandem.planning.activations import ActivationSettings
from tandem.planning.batches import Batches, Step, cut_step
from tandem.planning.holes import of_heap, of_what_comes
from tandem.planning.items import GIB, Instant, MemoryItem, Room
from tandem.planning.job import Generator, Job, Writer
from tandem.planning.machine import Machine
from tandem.planning.planned_model import PlannedModel
from tandem.planning.states import (
    BUCKET,
    gathered,
    gradients_at_the_end,
    gradients_between,
    gradients_of_the_step,
    gradients_sent,
    states,
)

TOKENIZER_BYTES = 1000
"""Bytes for each token of the vocabulary: the library held 46 MiB for one of 49,152, measured once."""


def batches_of(job: Job, length: int) -> Batches:
    """The micro-batches of each model's passes when completions have ``length`` tokens."""

    def of(model: PlannedModel, groups: int) -> Step:
        # ranks that share tokens take so many times as many together
        most, layout = model.max_tokens * model.layout.context, model.layout
        return cut_step(
            groups, job.trained, job.lengths.prompt, length, most=most, ranks=layout.batches, together=job.together
        )

    update = {m.role: of(m, -(-job.groups // m.mini_batches)) for m in job.models if m.trained}
    return Batches(update, {m.role: of(m, job.groups) for m in job.models})


def instants(job: Job, machine: Machine) -> tuple[Instant, ...]:
    """Every phase of a step once the optimizers have their moments, in order."""
    worst = batches_of(job, job.lengths.longest)
    room = Room(job.actor.ranks, shared=machine.kind == "cpu")
    rooms = {model.role: replace(room, ranks=model.ranks, first=model.layout.first) for model in job.models}
    steady = [item for model in job.models if model.role not in job.writers for item in states(model, rooms[model.role])]
    steady += [_weights_of(writer.engine, machine) for writer in job.writers.values()] + list(_engine(job, machine))
    partners = [writer for writer in job.writers.values() if writer.in_episodes]
    steady += [item for one in partners for item in _cache_of(job.judging(one), one.engine, machine)]
    steady += [*_processes(job, machine, room), *_copied(job, room)]
    coming: dict[str, tuple[MemoryItem, ...]] = {}

    def add(phase: str, *items: MemoryItem) -> None:
        coming[phase] = items

    asked = [item for m in job.models if m.role in job.asked for item in _scoring(m, worst.score[m.role], rooms[m.role])]
    if job.generator is not None and job.generator.foreign is None:
        beside = [item for writer in partners for item in _generation(writer.engine, machine)]
        add("generate", *_generation(job.generator, machine), *beside, *asked)
    elif job.generator is not None and job.generator.seats:
        add("generate", *asked)
    scoring = {role for _, role in job.passes} - set(job.asked)
    for model in job.models:
        if model.role in job.writers and not job.writers[model.role].in_episodes:
            add(f"score: {model.role}", *_judging(job, job.writers[model.role], machine))
        elif model.role in scoring:
            add(f"score: {model.role}", *_scoring(model, worst.score[model.role], rooms[model.role]))
    if job.verifies:
        before = FLOAT32 * job.actor.masters + BYTES[job.actor.dtype] * job.actor.base
        copy = room.item("verify", "weights before", before / job.actor.parts)
        exact = (
            FLOAT32 * (job.actor.masters + job.actor.base) if job.actor.dtype != "float32" and job.actor.parts == 1 else 0
        )
        in_float32 = room.item("verify", "weights in float32", exact)
        add("verify", copy, in_float32, *_scoring(job.actor, worst.score["actor"], room))
    for model in job.models:
        if model.trained:
            add(f"update: {model.role}", *_update(model, worst.update[model.role], rooms[model.role]))
            add(f"optimizer: {model.role}", *gradients_of_the_step(model, rooms[model.role]))
    if job.generator is not None and job.generator.foreign is None:
        add("publish", *_publishing(job, machine))
    elif job.generator is not None and job.generator.seats:
        add("publish")
    add("save", *_saving(job, room))
    for phase, size in job.begun.items():
        add(phase, *coming.get(phase, ()), MemoryItem("next stage", "parts that begin to wake", float(size)))

    def kept(items: tuple[MemoryItem, ...]) -> Iterator[MemoryItem]:
        # where models sleep, the heap is given back before each stage, and has what comes in that one alone
        return of_heap(job, machine, room, worst, [items] if job.awake else coming.values())

    known = None if job.sleeping is None else job.sleeping.parts
    return tuple(
        _worst(
            phase, steady, (*kept(items), *items, *of_what_comes(items, machine, room)), job.awake.get(phase), known, machine
        )
        for phase, items in coming.items()
    )


PARTS: dict[str, TrainPart] = {"parameters": "parameters", "parameters, rounded": "parameters", "optimizer": "optimizer"}
ENGINE_PARTS: dict[str, InferencePart] = {"parameters": "weights", "KV cache": "kv_cache"}
"""MemoryItem → the part that it sleeps with."""


def _worst(
    phase: str,
    steady: Sequence[MemoryItem],
    coming: tuple[MemoryItem, ...],
    awake: tuple[frozenset[Part], ...] | None,
    known: Collection[Part] | None,
    machine: Machine,
) -> Instant:
    """The phase in that of its stages in which most is awake. ``awake``: of each of them; None: everything. ``known``: parts
    that may sleep; None: all."""
    if awake is None:
        return Instant(phase, (*steady, *coming))
    instants = [Instant(phase, (*_without_sleepers(steady, one, known, machine), *coming)) for one in awake]
    return max(instants, key=lambda instant: instant.total())


def _without_sleepers(
    steady: Sequence[MemoryItem], awake: frozenset[Part], known: Collection[Part] | None, machine: Machine
) -> Iterator[MemoryItem]:
    """The items without those that sleep, which lie on a disk if the device is the host, and in host memory beside a GPU."""
    for item in steady:
        in_engine = item.role == "engine" or item.what == "KV cache"
        what = ENGINE_PARTS.get(item.what) if in_engine else PARTS.get(item.what)
        part = None if what is None else Part(item.role, what)
        if part is None or part in awake or (known is not None and part not in known):
            yield item
        elif machine.kind != "cpu" and not in_engine:
            yield replace(item, place="host", devices=1)


def _engine(job: Job, machine: Machine) -> Iterator[MemoryItem]:
    """The embedded engine's weights and cache, or the servers' shares, which stay through all phases."""
    generator = job.generator
    if generator is None:
        return
    if generator.foreign is not None:
        yield from _shares(generator, machine)
        if generator.opened:
            yield MemoryItem(generator.role, "delivered weights", float(generator.opened))
        return
    yield _weights_of(generator, machine)
    yield from _cache_of(job, generator, machine)
    if generator.adapter and machine.kind == "cpu":  # pages of files, mapped at each update; the system may take them back
        yield MemoryItem("publish", "files of the base", float(generator.shape.stored * generator.shape.parameters()))
    delivered = delivered_bytes(generator)
    if generator.own_process:  # the segment, or the folder's pages
        yield MemoryItem("engine", "shared weights", delivered, "device" if machine.kind == "cpu" else "host")
    if job.kept_versions:
        kept = delivered * job.kept_versions
        yield MemoryItem("verify", "kept versions", kept, "device" if machine.kind == "cpu" else "host")


def _shares(generator: Generator, machine: Machine) -> Iterator[MemoryItem]:
    """The memory that vLLM and SGLang servers take of each of their GPUs: the weights, and the rest for the cache."""
    for seat in generator.seats:
        if seat.memory_share is not None:
            share = seat.memory_share * machine.memory_gib * GIB
            weights = min(share, engine_bytes(generator.shape, generator.dtype, cpu=False) / len(seat.devices))
            where = {"devices": len(seat.devices), "first": seat.devices[0]}
            yield MemoryItem(generator.role, "parameters", weights, **where)
            yield MemoryItem(generator.role, "KV cache", share - weights, **where)


def _weights_of(generator: Generator, machine: Machine) -> MemoryItem:
    return _of_engines(generator, machine, "parameters", engine_weights(generator, machine))


def _cache_of(job: Job, generator: Generator, machine: Machine) -> Iterator[MemoryItem]:
    yield _of_engines(generator, machine, "KV cache", kv_cache(job, generator))
    tables = 1.5 * BYTES[generator.dtype] * generator.max_len * generator.shape.head_dim
    slots = 20.0 * generator.max_running * max(16, job.lengths.longest)
    yield _of_engines(generator, machine, "tables", tables + slots)


def _judging(job: Job, writer: Writer, machine: Machine) -> Iterator[MemoryItem]:
    """A judge writes; its cache is given back when it has."""
    yield from _cache_of(job.judging(writer), writer.engine, machine)
    yield from _generation(writer.engine, machine)


def _of_engines(generator: Generator, machine: Machine, what: str, each: float, role: str | None = None) -> MemoryItem:
    """The items of each of the engines."""
    role = role or generator.role
    if generator.on_ranks:
        return Room(generator.engines, shared=machine.kind == "cpu").item(role, what, each)
    if generator.seats:  # a GPU each
        return MemoryItem(role, what, each, devices=generator.engines, first=generator.seats[0].devices[0])
    return MemoryItem(role, what, each * generator.engines)


def delivered_bytes(generator: Generator) -> float:
    """Bytes of one update: the weights, or an adapter alone, which is not rounded."""
    if generator.adapter:
        return float(FLOAT32 * generator.adapter)
    return float(BYTES[generator.delivered] * generator.shape.parameters())


def engine_weights(generator: Generator, machine: Machine) -> float:
    """Bytes of one copy."""
    return engine_bytes(generator.shape, generator.dtype, cpu=machine.kind == "cpu")


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
    return cache_bytes(generator.shape, generator.dtype, tokens)


def kv_cache(job: Job, generator: Generator) -> float:
    """Bytes of one engine's cache."""
    return cache_bytes(generator.shape, generator.dtype, kv_tokens(job, generator)[1])


def _processes(job: Job, machine: Machine, room: Room) -> Iterator[MemoryItem]:
    generator = job.generator
    yield room.item("process", "interpreter and libraries", machine.process_gib * GIB)
    if machine.kind == "cpu":
        yield room.item("process", "tokenizer", float(TOKENIZER_BYTES * job.actor.shape.vocab))
    if generator is not None and generator.foreign is None and generator.own_process:
        yield _of_engines(generator, machine, "interpreter and libraries", machine.process_gib * GIB)
    if job.workers and machine.kind == "cpu":
        yield room.one("process", "reward workers", machine.worker_gib * GIB * job.workers)


def _generation(generator: Generator, machine: Machine) -> Iterator[MemoryItem]:
    shape, rows = generator.shape, min(generator.max_running, generator.sequences)
    logits = rows * shape.vocab * (2 * FLOAT32 + (BYTES[generator.dtype] if generator.dtype == "bfloat16" else 0))
    yield _of_engines(generator, machine, "logits", float(logits))
    width = shape.query + 2 * shape.key + 3 * shape.intermediate + 3 * shape.hidden
    chunk = BYTES[generator.dtype] * generator.prefill_chunk * width
    yield _of_engines(generator, machine, "activations", float(chunk))


def _scoring(model: PlannedModel, step: Step, room: Room) -> Iterator[MemoryItem]:
    """A pass without gradients."""
    batch, shape, spread = step.largest, model.piece, ActivationSettings.of(model)
    yield from gathered(model, room)
    layer = activations.passing(shape, batch, model.dtype, backward=False, spread=spread)
    yield room.item(model.role, "activations", layer)
    if model.head != "scalar":
        settings = {"context": spread.context, "compiled": _has_compiled_head(model)}
        logits = activations.head_forward(shape, batch, model.chunk_tokens, model.dtype, **settings)
        yield room.item(model.role, "logits", logits)


def _update(model: PlannedModel, step: Step, room: Room) -> Iterator[MemoryItem]:
    """The worst of these moments: the backward pass begins (everything is kept), or ends (all gradients are there), or the
    last bucket is sent. One that is full is sent on the way; and in the heap of a CPU's process none finds room among what
    the layers have left."""
    moments = [_backward_begins(model, step, room), _backward_ends(model, step, room)]
    sent, on_the_way = list(gradients_sent(model, room)), room.shared or model.masters > BUCKET
    if not on_the_way:
        moments.append(sent)
    yield from max(moments, key=lambda items: sum(item.num_bytes for item in items if item.place == "device"))
    if on_the_way:
        yield from sent


def _has_compiled_head(model: PlannedModel) -> bool:
    """True where log-probabilities are computed by compiled kernels, if they can be built; see `models/logit_kernels.py`."""
    return model.on_cpu and model.dtype == "bfloat16" and model.layout.tensor == 1


def _backward_begins(model: PlannedModel, step: Step, room: Room) -> list[MemoryItem]:
    shape, batch, spread = model.piece, step.largest, ActivationSettings.of(model)
    kept = activations.activation_bytes(shape, batch, model.dtype, spread)
    layer = activations.passing(shape, batch, model.dtype, backward=True, spread=spread)
    items = [*gathered(model, room)]
    if step.count > 1:
        items += gradients_between(model, room)
    if model.head == "scalar":
        return [*items, room.item(model.role, "activations", kept + layer)]
    kept += activations.head_kept(shape, batch, model.dtype, context=spread.context)
    frozen = model.adapters is not None
    cut_up = {"context": spread.context, "frozen": frozen, "compiled": _has_compiled_head(model)}
    logits, gradient = activations.head_backward(shape, batch, model.dtype, model.chunk_tokens, **cut_up)
    if layer > logits + gradient:  # the head is done when the layers are
        kept, logits = kept + layer, 0.0
        gradient = 0.0 if frozen else BYTES[model.dtype] * shape.embedding
    return [
        *items,
        room.item(model.role, "activations", kept),
        room.item(model.role, "logits", logits),
        room.item(model.role, "gradient of the head", gradient),
    ]


def _backward_ends(model: PlannedModel, step: Step, room: Room) -> list[MemoryItem]:
    """A tied head's gradient waits for the embedding's; over several ranks the sum of both is reduced in float32, of which
    gloo makes a copy."""
    shape, size = model.piece, BYTES[model.dtype]
    items = [*gathered(model, room), *gradients_at_the_end(model, room, step.count)]
    if model.adapters is not None:
        return items
    copies = 2 if shape.tied and model.head != "scalar" else 1
    waiting = copies * size * shape.embedding
    if model.fsdp or model.layout.zero in (1, 2) or model.dtype != "float32":
        waiting += FLOAT32 * shape.embedding
    if model.fsdp and model.layout.shards > 1 and room.shared:
        waiting += FLOAT32 * shape.embedding
    return [*items, room.item(model.role, "gradient of the embedding", waiting)]


def _publishing(job: Job, machine: Machine) -> Iterator[MemoryItem]:
    """The engine lays the update out beside what it serves."""
    generator = job.generator
    assert generator is not None
    yield _of_engines(generator, machine, "staged weights", engine_weights(generator, machine))
    zero = job.actor.layout.zero  # below stage 3 each rank of DeepSpeed has all of it, but in the dtype of the computation
    parted = zero == 3 or (zero is not None and job.actor.dtype != "float32")
    if job.actor.fsdp or job.actor.layout.tensor > 1 or parted:
        yield MemoryItem("publish", "one whole tensor", float(FLOAT32 * job.actor.shape.embedding))
    if generator.adapter:
        yield _of_engines(generator, machine, "adapter", float(FLOAT32 * generator.adapter), "publish")
    elif not generator.own_process and generator.delivered != "float32":
        rounded = float(BYTES[generator.delivered] * generator.shape.parameters())
        yield _of_engines(generator, machine, "rounded weights", rounded, "publish")


def _copied(job: Job, room: Room) -> Iterator[MemoryItem]:
    """Bytes that a save beside training writes: masters and moments, and their rounding to the dtype of the checkpoint. The
    copy stays for the next save. Each rank copies its part; norms, which ranks that cut matrices all have, count with
    each."""
    for model in job.models if job.saves_beside else ():
        if model.trained:
            each = 3 * FLOAT32 + (BYTES[model.dtype] if model.dtype != "float32" or not room.shared else 0)
            yield room.one(model.role, "copy that is saved", float(each * model.masters * model.layout.tensor), "host")


def _saving(job: Job, room: Room) -> Iterator[MemoryItem]:
    """The largest model in the dtype of the checkpoint, in host memory; on a CPU in float32 the masters themselves, but for
    what is merged or gathered from several ranks."""
    copied = []
    for model in job.models if not job.saves_beside else ():
        merged = model.shape.layers * model.shape.matrices if model.adapters is not None else 0
        if model.trained and (not room.shared or model.dtype != "float32" or model.ranks > 1):
            merged = model.parameters
        if model.trained:
            copied.append(BYTES[model.dtype] * merged)
    if any(copied):
        yield room.one("save", "weights to write", float(max(copied)), "host")
