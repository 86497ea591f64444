"""Predicts the memory of a run: the items in memory in each phase, their owners, and the instant of the largest use.

The figures follow the code. A model's memory depends on its layout. FSDP: trained weights in float32, one part per rank,
gathered a layer at a time (`tandem.engines.train.holders`). One process: the whole model in float32, and a rounded copy for
the computation. DeepSpeed: its own flat pieces (`tandem.engines.train.zero`); stages 1 and 2 also keep the whole model in
the dtype of the computation; if that is float32, this copy contains the masters. The embedded engine has its own copy, and a
second one while an update is staged. Under `memory_limit_gib` only awake parts are counted (`tandem.flow.sleep_plan`).

The functions from `states` to `_generation` return bytes by name, for one rank or one engine. `instants` assigns the bytes
to devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.flow.sleep_plan import GIB, Part
from tandem.models.shape import BYTES, FLOAT32, cache_bytes, row_capacity
from tandem.planning.job import Generator, Job
from tandem.planning.machine import Machine
from tandem.planning.planned_model import MicroBatch, PlannedModel, Step, cut_step, head_bytes, kept_by_head, pass_bytes

Bytes = dict[str, float]
"""Name of an item in memory → bytes."""

HEADINGS = {
    "weights": "parameters; parameters, rounded; masters; gathered parameters; shared weights; kept versions; "
    "files of the base",
    "optimizer": "optimizer",
    "gradients": "gradients; gradient of the head; gradient of the embedding; norm of the gradients; "
    "buffer of gradients; buckets",
    "activations": "activations",
    "logits": "logits",
    "KV cache": "KV cache",
    "staged": "staged weights; rounded weights; one whole tensor; weights before; weights to write; copy that is saved",
}
"""Heading of the table → names of the items in its sum; all other items are under `other`."""

HOST = range(0)
"""The devices of an item in host memory beside GPUs: none."""

OFFLOADED = ("parameters", "optimizer", "gradients", "norm of the gradients")
"""Items that are in host memory with `actor.offload`."""


@dataclass(frozen=True)
class MemoryItem:
    """An item in memory: owner, name and size."""

    role: str
    what: str
    num_bytes: float
    """Bytes on each of the item's devices, or in host memory."""

    devices: range = range(1)
    """Indices of the GPUs that each hold ``num_bytes``. 0 also stands for a CPU, and `HOST` for host memory beside GPUs."""


@dataclass(frozen=True)
class Instant:
    """The items of one phase, at the moment when it needs the most memory."""

    phase: str
    items: tuple[MemoryItem, ...]

    def total(self, device: int | None = 0) -> float:
        """Returns the bytes on one device (a GPU's index; 0 for a CPU), or, with None, in host memory beside GPUs."""
        return sum(one.num_bytes for one in self.items if (device in one.devices if device is not None else not one.devices))

    def columns(self, device: int = 0) -> dict[str, float]:
        """Returns a device's GiB under each heading of `HEADINGS`, and under `other`."""
        found = dict.fromkeys([*HEADINGS, "other"], 0.0)
        for item in self.items:
            if device in item.devices:
                head = next((head for head, kinds in HEADINGS.items() if item.what in kinds.split("; ")), "other")
                found[head] += item.num_bytes / GIB
        return found


NORM_BYTES = 12
"""Bytes for each element of the largest gradient while the norm is computed: the square in float32 and in float64."""

BUCKET = 50_000_000
"""Most numbers that DeepSpeed sends at once, and under stage 3 fetches in advance (`tandem.engines.train.zero`)."""

TOKENIZER_BYTES = 1000
"""Bytes of a tokenizer per token of its vocabulary, measured once: 46 MiB for a vocabulary of 49,152."""


def states(model: PlannedModel) -> Bytes:
    """Returns the bytes of weights and moments, which stay in memory in all phases. DeepSpeed's stages 1 and 2 hold the
    whole model, as views of a flat tensor. Stage 3 holds a part, and a buffer to sum gradients, also for a frozen model."""
    stage, part, held = model.layout.zero, model.masters / model.parts, Bytes()
    if not model.own:
        return held
    held["parameters"] = (
        model.weight_bytes if stage is None else BYTES[model.dtype] * (part if stage == 3 else model.masters)
    )
    if model.dtype != "float32" and stage is not None:  # in float32 they share the memory of the parameters
        held["masters"] = FLOAT32 * part
    elif model.dtype != "float32" and not model.fsdp:
        held["parameters, rounded"] = model.rounded_bytes
    if stage == 3:
        held["buffer of gradients"] = FLOAT32 * part
    return held | ({"optimizer": model.optimizer_bytes} if model.trained else {})


def gathered(model: PlannedModel) -> Bytes:
    """Returns the bytes of parameters that are gathered while a model computes. FSDP: all outside the layers, the present
    layer and the next. Stage 3: all outside the layers, one layer, and the parameters that DeepSpeed fetches in advance."""
    root, layer, size = model.piece.root(model.head), model.piece.layer, BYTES[model.dtype]
    if model.adapters is not None:
        layer += model.adapters.rank * model.adapters.widths(model.shape)
    if model.fsdp:
        return {"gathered parameters": size * (root + 2 * layer)}
    whole = model.masters + model.base
    return {"gathered parameters": size * min(whole, root + layer + BUCKET)} if model.layout.zero == 3 else {}


def gradients_between(model: PlannedModel, *, cpu: bool) -> Bytes:
    """Returns the bytes of gradients that are held between the micro-batches of a step: of the whole model, or of one rank's
    part if each micro-batch is summed over ranks. DeepSpeed also has buckets to send gradients, in the dtype of the
    computation and in float32; on a CPU gloo copies them."""
    stage, held = model.layout.zero, Bytes()
    whole = stage == 1 if stage is not None else not model.sync_each
    if stage != 3:  # stage 3 has its buffer at all times
        held["gradients"] = FLOAT32 * model.masters / (1 if whole else model.parts)
    if stage is not None:
        held["buckets"] = float((BYTES[model.dtype] + (2 + cpu) * FLOAT32) * min(model.masters, BUCKET))
    return held


def gradients_of_the_step(model: PlannedModel) -> Bytes:
    """Returns the bytes of gradients while the optimizer works. DeepSpeed's stages 1 and 2 copy them to one more tensor."""
    pieces, adapters = 2 if model.layout.zero in (1, 2) else 1, model.adapters
    largest = max(model.piece.embedding, model.piece.hidden * model.piece.intermediate)
    if adapters is not None:
        largest = adapters.rank * max((max(model.shape.linears[name]) for name in adapters.modules), default=0)
    return {
        "gradients": pieces * FLOAT32 * model.masters / model.parts,
        "norm of the gradients": NORM_BYTES * largest / model.parts,
    }


def step_of(job: Job, model: PlannedModel, mini_batches: int = 1) -> Step:
    """Returns the micro-batches of a pass in which all sequences have full length. Ranks that share the tokens of sequences
    (context parallelism) have one micro-batch together, which is larger by their number."""
    layout, groups = model.layout, -(-job.groups // mini_batches)
    most, prompt, longest = model.config.micro_batch_tokens * layout.context, job.lengths.prompt, job.lengths.longest
    step = cut_step(groups, job.trained, prompt, longest, most=most, ranks=layout.batches, together=job.together)
    if not model.gathers_keys:
        return step
    alone = tuple((prompt, 1) for _, count in step.largest.groups for _ in range(count))  # then prompts are not shared
    return Step(MicroBatch(alone, longest), step.count)


def _scoring(job: Job, model: PlannedModel) -> Bytes:
    """Returns the bytes of a pass without gradients."""
    batch = step_of(job, model).largest
    held = gathered(model) | {"activations": float(pass_bytes(model, batch).scoring)}
    return held | ({"logits": head_bytes(model, batch, backward=False)[0]} if model.head != "scalar" else {})


def _update(job: Job, model: PlannedModel, *, cpu: bool) -> Bytes:
    """Returns the bytes of an update at the moment when it needs the most: the beginning of the backward pass (all
    activations exist), or its end (all gradients exist)."""
    batch, count = step_of(job, model, model.mini_batches)
    between = gradients_between(model, cpu=cpu) if count > 1 or model.layout.zero else None
    moments = [gathered(model) | moment for moment in (_begins(model, batch, between or {}), _ends(model, between, cpu=cpu))]
    return max(moments, key=lambda held: sum(held[what] for what in held if not (model.offload and what in OFFLOADED)))


def _begins(model: PlannedModel, batch: MicroBatch, between: Bytes) -> Bytes:
    layers = pass_bytes(model, batch)
    in_layers = {"activations": float(layers.kept + layers.backward)}
    if model.head == "scalar":
        return between | in_layers
    head, (logits, gradient) = kept_by_head(model, batch), head_bytes(model, batch, backward=True)
    if layers.backward > head + logits + gradient:  # the head's backward pass is over when those of the layers begin
        waits = 0.0 if model.adapters is not None else float(BYTES[model.dtype] * model.piece.embedding)
        return between | in_layers | {"gradient of the head": waits}
    return between | {"activations": float(layers.kept + head), "logits": logits, "gradient of the head": gradient}


def _ends(model: PlannedModel, between: Bytes | None, *, cpu: bool) -> Bytes:
    """Returns the bytes at the end of the backward pass. A tied head's gradient is kept until the embedding's is added; over
    several ranks their sum is reduced in float32, and gloo copies it. ``between``: None if there is one micro-batch."""
    held = between if between is not None else {"gradients": FLOAT32 * model.masters / model.parts}
    if model.adapters is not None:
        return held
    waiting = (2 if model.piece.tied and model.head != "scalar" else 1) * BYTES[model.dtype]
    if model.fsdp or model.layout.zero in (1, 2) or model.dtype != "float32":
        waiting += FLOAT32
    if model.fsdp and model.layout.shards > 1 and cpu:
        waiting += FLOAT32
    return held | {"gradient of the embedding": float(waiting * model.piece.embedding)}


def _verifying(actor: PlannedModel) -> Bytes:
    """Returns the bytes of weight copies with which deliveries are verified; in float32 too if one process rounds."""
    held = {"weights before": (FLOAT32 * actor.masters + BYTES[actor.dtype] * actor.base) / actor.parts}
    if actor.dtype != "float32" and actor.parts == 1:
        held["weights in float32"] = float(FLOAT32 * (actor.masters + actor.base))
    return held


def kv_tokens(generator: Generator) -> tuple[int, int]:
    """Returns (samples that one engine generates at once, tokens of cache that they fill at full length).

    The samples of a prompt share the prompt's keys and values; each sample has its own row for its completion.
    """
    prompt, own, samples = generator.lengths.prompt, generator.lengths.longest, generator.sharing
    wanted = min(-(-generator.sequences // generator.engines), generator.max_running)
    budget = int(generator.kv_cache_gib * GIB) // (BYTES[generator.dtype] * generator.shape.kv_values)
    a_sample = float(row_capacity(generator.lengths.total - 1))
    if samples > 1:
        a_sample = row_capacity(max(1, own - 1)) + row_capacity(prompt) / samples
    running = max(1, min(wanted, int(budget / a_sample)))
    return running, min(budget, int(running * a_sample))


def kv_needed(generator: Generator) -> float:
    """Returns the bytes of cache for one sample of the largest length; an engine with a smaller cache refuses the sample."""
    return cache_bytes(generator.shape, generator.dtype, row_capacity(generator.lengths.total - 1))


def _cache(generator: Generator) -> Bytes:
    return {"KV cache": cache_bytes(generator.shape, generator.dtype, kv_tokens(generator)[1])}


def _generation(generator: Generator) -> Bytes:
    shape, size = generator.shape, BYTES[generator.dtype]
    a_logit = 2 * FLOAT32 + (size if generator.dtype == "bfloat16" else 0)
    width = shape.query + 2 * shape.key + 3 * shape.intermediate + 3 * shape.hidden
    return {
        "logits": float(min(generator.max_running, generator.sequences) * shape.vocab * a_logit),
        "activations": float(size * generator.prefill_chunk * width),
    }


def instants(job: Job, machine: Machine) -> tuple[Instant, ...]:
    """Returns the phases of a step in order, after the first step, when the optimizers have their moments."""
    steady = [*_steady(job, machine)]
    return tuple(_worst(job, machine, phase, steady, coming) for phase, coming in _coming(job, machine))


def _lay(role: str, sizes: Bytes, count: int, apart: range | None, host: Sequence[str] = ()) -> Iterator[MemoryItem]:
    """Yields the items of ``count`` processes, each with ``sizes``: on the devices ``apart``; None: all in one memory."""
    for what, each in sizes.items():
        if what in host:
            yield MemoryItem(role, what, each * count, HOST)
        else:
            yield MemoryItem(role, what, each if apart else each * count, apart or range(1))


def _on_ranks(model: PlannedModel, machine: Machine, sizes: Bytes, role: str = "") -> Iterator[MemoryItem]:
    """Yields the items of a model's ranks. ``role``: the owner, if it is not the model."""
    first = model.layout.first
    apart, host = (None, ()) if machine.cpu else (range(first, first + model.ranks), OFFLOADED if model.offload else ())
    return _lay(role or model.role, sizes, model.ranks, apart, host)


def _on_engines(generator: Generator, sizes: Bytes, role: str = "") -> Iterator[MemoryItem]:
    first = generator.seats[0].devices[0] if generator.seats else 0
    apart = range(first, first + generator.engines) if generator.apart else None
    return _lay(role or generator.role, sizes, generator.engines, apart)


def _beside(machine: Machine, role: str, what: str, num_bytes: float) -> MemoryItem:
    """Returns an item in host memory; without GPUs this is the memory that also holds the models."""
    return MemoryItem(role, what, num_bytes, range(1) if machine.cpu else HOST)


def _steady(job: Job, machine: Machine) -> Iterator[MemoryItem]:
    """Yields the items that stay in memory in all phases unless they sleep: models, engines, processes, and the copy for
    asynchronous saves (masters, moments, and weights rounded to the checkpoint's dtype)."""
    generator, process = job.generator, {"interpreter and libraries": machine.process_gib * GIB}
    for model in job.models:
        if model.role not in job.writers:
            yield from _on_ranks(model, machine, states(model))
    for one in job.writers.values():
        yield from _on_engines(one, {"parameters": one.weights})
    for one in job.partners:
        yield from _on_engines(one, _cache(one))
    if generator is not None:
        yield from _engine(job, generator, machine)
    yield from _on_ranks(job.actor, machine, process, "process")
    if generator is not None and generator.foreign is None and generator.own_process:
        yield from _on_engines(generator, process)
    if machine.cpu:
        tokenizer = {"tokenizer": float(TOKENIZER_BYTES * job.actor.shape.vocab)}
        yield from _on_ranks(job.actor, machine, tokenizer, "process")
        yield MemoryItem("process", "reward workers", machine.worker_gib * GIB * job.workers)
    for model in job.models:
        if model.trained and job.saves.beside:  # for each rank; tensor-parallel ranks count norms each
            each = 3 * FLOAT32 + (BYTES[model.dtype] if model.dtype != "float32" or not machine.cpu else 0)
            copied = float(each * model.masters * model.layout.tensor)
            yield _beside(machine, model.role, "copy that is saved", copied)


def _engine(job: Job, generator: Generator, machine: Machine) -> Iterator[MemoryItem]:
    """Yields the embedded engine's weights and cache. vLLM and SGLang servers reserve a share of each of their GPUs:
    weights, and the remainder as cache."""
    if generator.foreign is not None:
        for seat in generator.seats:
            if seat.memory_share is not None:
                share, devices = seat.memory_share * machine.memory_gib * GIB, range(seat.devices[0], seat.devices[-1] + 1)
                weights = min(share, generator.weights / len(devices))
                yield from _lay(generator.role, {"parameters": weights, "KV cache": share - weights}, 1, devices)
        if generator.opened:
            yield MemoryItem(generator.role, "delivered weights", float(generator.opened))
        return
    whole = generator.shape.parameters()
    yield from _on_engines(generator, {"parameters": generator.weights} | _cache(generator))
    # one delivery: the weights, or only an adapter, which is not rounded
    delivered = float(FLOAT32 * generator.adapter or BYTES[generator.delivered] * whole)
    if generator.adapter and machine.cpu:  # pages of files, mapped at each delivery; the system may free them
        yield MemoryItem("publish", "files of the base", float(generator.shape.stored * whole))
    if generator.own_process:  # the shared memory segment, or the cached pages of the folder
        yield _beside(machine, "engine", "shared weights", delivered)
    if job.kept_versions:
        yield _beside(machine, "verify", "kept versions", delivered * job.kept_versions)


def _coming(job: Job, machine: Machine) -> Iterator[tuple[str, list[MemoryItem]]]:
    """Yields each phase with the items that exist only in this phase."""
    generator = job.generator

    def scoring(model: PlannedModel) -> list[MemoryItem]:
        return [*_on_ranks(model, machine, _scoring(job, model))]

    engines = [generator, *job.partners] if generator is not None and generator.foreign is None else []
    generates = engines or (generator is not None and generator.seats)
    if generates:
        asked = [item for model in job.models if model.role in job.asked for item in scoring(model)]
        yield "generate", [*asked, *(item for one in engines for item in _on_engines(one, _generation(one)))]
    for model in job.models:
        judge = job.writers.get(model.role)
        if judge is not None and judge not in job.partners:  # its cache is freed after it has judged
            yield f"score: {model.role}", [*_on_engines(judge, _cache(judge)), *_on_engines(judge, _generation(judge))]
        elif judge is None and any(model.role == scored for _, scored in job.passes):
            yield f"score: {model.role}", scoring(model)
    if job.kept_versions:
        yield "verify", [*_on_ranks(job.actor, machine, _verifying(job.actor), "verify"), *scoring(job.actor)]
    for model in job.models:
        if model.trained:
            yield f"update: {model.role}", [*_on_ranks(model, machine, _update(job, model, cpu=machine.cpu))]
            yield f"optimizer: {model.role}", [*_on_ranks(model, machine, gradients_of_the_step(model))]
    if generates:
        yield "publish", [*_publishing(job.actor, engines[0])] if engines else []
    yield "save", [*_saving(job, machine)]


def _publishing(actor: PlannedModel, generator: Generator) -> Iterator[MemoryItem]:
    """Yields the items of a delivery: the engine stages the update in addition to the weights that it serves."""
    yield from _on_engines(generator, {"staged weights": generator.weights})
    zero = actor.layout.zero  # in stages 1 and 2 each DeepSpeed rank has the whole model, in the dtype of the computation
    if actor.fsdp or actor.layout.tensor > 1 or zero == 3 or (zero is not None and actor.dtype != "float32"):
        yield MemoryItem("publish", "one whole tensor", float(FLOAT32 * actor.shape.embedding))
    if not generator.adapter and not generator.own_process and generator.delivered != "float32":
        rounded = {"rounded weights": float(BYTES[generator.delivered] * generator.shape.parameters())}
        yield from _on_engines(generator, rounded, "publish")


def _saving(job: Job, machine: Machine) -> Iterator[MemoryItem]:
    """Yields the item of a synchronous save: a copy of one trained model in the dtype of the checkpoint, in host memory. On
    a CPU in float32 no copy is needed, except to merge adapters or to gather weights from several ranks."""
    for model in job.models if not job.saves.beside else ():
        rounded = not machine.cpu or model.dtype != "float32"
        if model.trained and (rounded or model.ranks > 1 or model.adapters is not None):
            yield _beside(machine, "save", "weights to write", float(BYTES[model.dtype] * model.parameters))
            return


PARTS = {"parameters, rounded": "parameters", "KV cache": "kv_cache"}
"""Name of an item → its part in the plan of sleeping parts, if that has another name."""


def _worst(job: Job, machine: Machine, phase: str, steady: Sequence[MemoryItem], coming: Sequence[MemoryItem]) -> Instant:
    """Returns a phase at the stage in which it needs the most memory. Adds the assumed fragmentation to ``coming``, the
    items that exist only in this phase."""
    slack = machine.slack * Instant(phase, tuple(coming)).total()
    if slack:
        coming = [*coming, *_on_ranks(job.actor, machine, {"allocator": slack}, "process")]
    found = [Instant(phase, (*_of_awake(job, machine, steady, awake), *coming)) for awake in job.awake.get(phase, ())]
    return max(found, key=Instant.total, default=Instant(phase, (*steady, *coming)))


def _of_awake(job: Job, machine: Machine, steady: Sequence[MemoryItem], awake: frozenset[Part]) -> Iterator[MemoryItem]:
    """Yields the items that are awake. A sleeping item is on disk if the device is a CPU, else in host memory."""
    assert job.sleeping is not None
    for item in steady:
        in_engine = item.role == "engine" or item.what == "KV cache"
        what = "weights" if item.role == "engine" and item.what == "parameters" else PARTS.get(item.what, item.what)
        part = Part(item.role, what)  # type: ignore[arg-type]
        if part in awake or part not in job.sleeping.parts:
            yield item
        elif not machine.cpu and not in_engine:
            yield replace(item, devices=HOST)
