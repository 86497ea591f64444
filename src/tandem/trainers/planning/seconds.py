"""Time of a step, by phase: matrix products at their measured rate, attention, passes over memory, and operations.

A phase's seconds are the sum of those parts, because eager torch does one after the other. Nothing here looks at a machine:
its rates come from `calibrate` or from the table of `devices`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.trainers.planning.batches import MicroBatch, Step, cut
from tandem.trainers.planning.job import Generator, Held, Job
from tandem.trainers.planning.machine import Machine
from tandem.trainers.planning.memory import Batches, batches_of, engine_weights, kv_tokens
from tandem.trainers.planning.shape import BYTES, Dtype, Head, Shape

PRODUCTS, ATTENTION, MEMORY, OPERATIONS, RANKS, HASHES = (
    "matrix products",
    "attention",
    "memory bandwidth",
    "operations",
    "communication",
    "digests",
)

LAYER_OPERATIONS = {"forward": 45, "backward": 70, "prefill": 30, "decode": 32, "decode_shared": 46}
"""Operations that eager torch starts for one layer; counted in transformers' layers and in the embedded engine."""

BACKWARD_ATTENTION = 2.5
"""Products of attention's backward pass for each of the forward pass: five against two."""

STEP_BYTES = 28 + 28 + 8
"""Read and written for each parameter in one optimizer step: AdamW, the norm of the gradients, the clipping."""

ACCUMULATE_BYTES = 12
"""For each parameter and micro-batch after the first: the gradient is added to the sum."""


@dataclass(frozen=True)
class Cost:
    """Seconds by what they are spent on."""

    parts: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        """In all."""
        return sum(seconds for _, seconds in self.parts)

    @property
    def bound(self) -> str:
        """What takes most of it."""
        return max(self.parts, key=lambda part: part[1])[0] if self.parts else "nothing"

    def __mul__(self, times: float) -> "Cost":
        return Cost(tuple((name, seconds * times) for name, seconds in self.parts))


def total(costs: Iterable[Cost]) -> Cost:
    """The sum, part by part."""
    found: dict[str, float] = {}
    for cost in costs:
        for name, seconds in cost.parts:
            found[name] = found.get(name, 0.0) + seconds
    return Cost(tuple(found.items()))


@dataclass(frozen=True)
class Phase:
    """One phase of a step."""

    name: str
    cost: Cost
    tokens: float = 0.0
    """That it computes or draws."""

    @property
    def seconds(self) -> float:
        """Its time."""
        return self.cost.seconds


def layers_forward(shape: Shape, batch: MicroBatch, dtype: Dtype, machine: Machine) -> Cost:
    """The forward pass of all layers over one micro-batch."""
    rows, size = batch.tokens, BYTES[dtype]
    products = machine.product_s(dtype, rows, shape.matrices)
    pairs = [batch.scores(window) for window in shape.windows or (None,) * shape.layers]
    attention = 4 * sum(pairs) * shape.query / machine.attention[dtype]
    moved = elementwise_bytes(shape, dtype) * rows + size * 2 * batch.behind_prompts * 2 * shape.key
    if shape.attention_softcap:
        moved += 8 * (size + 4) * shape.heads * batch.squares()
    operations = LAYER_OPERATIONS["forward"] + (20 * len(batch.groups) if batch.shared else 8 * len(batch.groups))
    return Cost(
        (
            (PRODUCTS, shape.layers * products),
            (ATTENTION, attention),
            (MEMORY, shape.layers * moved / machine.elementwise),
            (OPERATIONS, shape.layers * operations * machine.operation_s),
        )
    )


def elementwise_bytes(shape: Shape, dtype: Dtype) -> float:
    """Bytes that one layer reads and writes of one token between its products, going forward.

    A norm is seven passes in float32 (nine with the casts), a rotation five of queries and keys, a gate two and a half of
    the MLP's width.
    """
    size = BYTES[dtype]
    norm = 28 if dtype == "float32" else 36
    moved = norm * shape.norms * shape.hidden + 6 * size * shape.hidden + 10 * size * (shape.query + shape.key)
    moved += 5 * size * shape.intermediate + 2 * size * shape.query
    return moved + shape.qk_norm * norm * (shape.query + shape.key)


def layers_backward(shape: Shape, batch: MicroBatch, dtype: Dtype, machine: Machine, *, recompute: float = 0.0) -> Cost:
    """The backward pass; ``recompute``: the share of the forward pass that is done again, 1 with checkpointing."""
    forward = dict(layers_forward(shape, batch, dtype, machine).parts)
    operations = LAYER_OPERATIONS["backward"] / LAYER_OPERATIONS["forward"]
    factors = {PRODUCTS: 2.0, ATTENTION: BACKWARD_ATTENTION, MEMORY: 2.0, OPERATIONS: operations}
    return Cost(tuple((name, seconds * (factors[name] + recompute)) for name, seconds in forward.items()))


def head(shape: Shape, batch: MicroBatch, dtype: Dtype, machine: Machine, *, backward: bool, entropy: bool) -> Cost:
    """Log-probabilities of the predicted tokens; going backward the logits are computed again."""
    logits = float(batch.predicted) * shape.vocab
    passes = 3 if backward else 1
    softmaxes = 1.0 + entropy
    moved = (8 if entropy else 0) + ((24 if entropy else 8) + (10 if dtype == "bfloat16" else 0)) * backward
    rows = max(1, batch.predicted)
    return Cost(
        (
            (PRODUCTS, passes * machine.product_s(dtype, rows, shape.embedding)),
            (MEMORY, logits * softmaxes / machine.softmax + logits * moved / machine.stream),
        )
    )


def scoring(model: Held, step: Step, machine: Machine) -> Cost:
    """A pass without gradients over all micro-batches."""
    costs = []
    for batch in step.micro_batches:
        costs.append(layers_forward(model.shape, batch, model.dtype, machine))
        if model.head != "scalar":
            costs.append(head(model.shape, batch, model.dtype, machine, backward=False, entropy=False))
        costs.append(_exchange(model, machine, passes=1))
    return _bounded(total(costs), machine) * step.times


def updating(model: Held, step: Step, machine: Machine, *, recompute: float | None = None) -> Cost:
    """One optimizer step: forward and backward passes, and AdamW."""
    again = float(model.checkpointing) if recompute is None else recompute
    costs, shape = [], model.shape
    for batch in step.micro_batches:
        costs.append(layers_forward(shape, batch, model.dtype, machine))
        costs.append(layers_backward(shape, batch, model.dtype, machine, recompute=again))
        if model.head != "scalar":
            costs += [
                head(shape, batch, model.dtype, machine, backward=backward, entropy=model.entropy)
                for backward in (False, True)
            ]
        costs.append(_exchange(model, machine, passes=3))
    passes = _bounded(total(costs), machine) * step.times
    return total([passes, optimizer(shape, model.head, model.dtype, model.ranks, machine, max(1.0, step.count))])


def optimizer(shape: Shape, kind: Head, dtype: Dtype, ranks: int, machine: Machine, micro_batches: float) -> Cost:
    """Sums of gradients, their norm, AdamW, and the rounded copy of the weights."""
    moved = STEP_BYTES + ACCUMULATE_BYTES * (micro_batches - 1)
    if ranks == 1 and dtype != "float32":
        moved += 6 + 6 * micro_batches  # the copy, and the gradients that are widened
    return Cost(((MEMORY, shape.parameters(kind) * moved / ranks / machine.stream),))


def _exchange(model: Held, machine: Machine, *, passes: int) -> Cost:
    """FSDP: weights are gathered for the forward pass (and again for the backward pass, whose gradients are reduced in
    float32)."""
    if not model.sharded:
        return Cost(())
    weights, layers = BYTES[model.dtype], model.shape.layers * model.shape.layer
    count = model.shape.parameters(model.head)
    moved = weights * count + (weights * layers + 4 * count if passes > 1 else 0)
    return Cost(((RANKS, moved * (model.ranks - 1) / model.ranks / machine.link),))


def _bounded(cost: Cost, machine: Machine) -> Cost:
    """Where communication overlaps, only what the computation does not cover is left of it."""
    parts = dict(cost.parts)
    if machine.overlaps and RANKS in parts:
        rest = sum(seconds for name, seconds in parts.items() if name != RANKS)
        parts[RANKS] = max(0.0, parts[RANKS] - rest)
    return Cost(tuple(parts.items()))


def prefill(job: Job, generator: Generator, machine: Machine) -> tuple[Cost, float]:
    """The prompts of one step, each computed once, and how many tokens they are, in one engine."""
    shape, prompt = generator.shape, job.lengths.prompt
    prompts = -(-job.groups // generator.engines)
    tokens = prompts * prompt
    rows = max(1, min(tokens, generator.prefill_chunk))
    products = shape.layers * machine.product_s(generator.dtype, rows, shape.matrices, packed=True) * tokens / rows
    heads = machine.product_s(generator.dtype, max(1, prompts), shape.embedding, packed=True)
    attention = shape.layers * 4 * (prompt * prompt / 2) * shape.query * prompts / machine.attention[generator.dtype]
    moved = shape.layers * BYTES[generator.dtype] * (20 * shape.hidden + 6 * shape.intermediate) * tokens
    operations = LAYER_OPERATIONS["prefill"] + 8 * prompts / max(1.0, tokens / rows)
    return Cost(
        (
            (PRODUCTS, products + heads),
            (ATTENTION, attention),
            (MEMORY, moved / machine.elementwise),
            (OPERATIONS, shape.layers * operations * machine.operation_s * tokens / rows),
        )
    ), float(tokens)


def decode(job: Job, generator: Generator, machine: Machine) -> tuple[Cost, float]:
    """All completions of one step, token by token, and how many tokens they are, in one engine."""
    shape, size = generator.shape, BYTES[generator.dtype]
    samples = -(-job.groups * job.generated // generator.engines)
    running = min(kv_tokens(job, generator)[0], samples)
    tokens = float(samples * job.lengths.completion)
    steps = max(float(job.lengths.completion), tokens / running)
    rows = max(1, round(tokens / steps))
    products = shape.layers * machine.product_s(generator.dtype, rows, shape.matrices, packed=True)
    products += machine.product_s(generator.dtype, rows, shape.embedding, packed=True)
    shared = job.generated > 1
    keys = rows * job.lengths.completion / 2 + job.lengths.prompt * rows / (job.generated if shared else 1)
    attention = size * 2 * shape.key * keys * shape.layers / machine.decode_attention[generator.dtype]
    logits = float(rows) * shape.vocab
    moved = logits / machine.softmax + logits * 12 / machine.stream
    moved += shape.layers * rows * size * (20 * shape.hidden + 6 * shape.intermediate) / machine.elementwise
    operations = shape.layers * LAYER_OPERATIONS["decode_shared" if shared else "decode"] + 60
    one = Cost(
        (
            (PRODUCTS, products),
            (ATTENTION, attention),
            (MEMORY, moved),
            (OPERATIONS, operations * machine.operation_s),
        )
    )
    return one * steps, tokens


def publishing(job: Job, generator: Generator, machine: Machine) -> Cost:
    """Streaming, hashing at both ends, and laying out anew; see `WeightPublisher`."""
    shape = generator.shape
    sent = BYTES[generator.delivered] * shape.parameters()
    hashing = sent / (2 * machine.digest) + sent / machine.digest  # two threads beside the cast; then tensor by tensor
    if machine.kind == "cpu":
        hashing = sent / (min(2, machine.threads) * machine.digest) + sent / machine.digest
    moved = (4 * shape.parameters() + sent) + (sent + 3 * engine_weights(generator, machine))
    parts = [(HASHES, hashing), (MEMORY, moved / machine.stream)]
    if machine.kind == "gpu":
        parts.append((RANKS, 2 * sent / machine.host_link))  # to the hashing threads and back
    return Cost(tuple(parts))


def phases(job: Job, machine: Machine) -> tuple[Phase, ...]:
    """The phases of one step at the expected lengths, in order."""
    expected = batches_of(job, job.lengths.completion)
    at_once = machine.kind == "cpu" and job.asynchronous
    training = machine.using((0.5 if at_once else 1.0) / (job.actor.ranks if machine.kind == "cpu" else 1))
    generating = machine.using(0.5 if at_once else 1.0)
    found = [*_generating(job, generating), *_training(job, expected, training)]
    generator = job.generator
    if generator is not None and generator.foreign is None:
        found.append(Phase("publish", publishing(job, generator, machine)))
    return tuple(_fitted(phase, machine) for phase in found)


def _generating(job: Job, machine: Machine) -> list[Phase]:
    generator = job.generator
    if generator is None or generator.foreign is not None:
        return []
    if machine.kind == "cpu" and generator.engines > 1:
        machine = machine.using(1 / generator.engines)
    share = generator.engines if machine.kind == "gpu" else 1  # they share the first GPU
    begin, prompt_tokens = prefill(job, generator, machine)
    draw, tokens = decode(job, generator, machine)
    return [
        Phase("prefill", begin * share, prompt_tokens * generator.engines),
        Phase("decode", draw * share, tokens * generator.engines),
    ]


def _training(job: Job, batches: Batches, machine: Machine) -> list[Phase]:
    found = []
    for model in job.models:
        step = batches.score[model.role]
        if not model.trained or model.role == "critic" or (model is job.actor and job.proximal):
            name = "proximal" if model.role == "actor" else "values" if model.role == "critic" else model.role
            found.append(Phase(name, scoring(model, step, machine), step.tokens * model.ranks))
    for model in job.models:
        if model.trained:
            step = batches.update[model.role]
            times = model.mini_batches * model.epochs
            cost = updating(model, step, machine) * times
            found.append(Phase(f"update: {model.role}", cost, step.tokens * model.ranks * times))
    return found


def _fitted(phase: Phase, machine: Machine) -> Phase:
    family = "update" if phase.name.startswith("update") else phase.name
    family = "score" if family in ("proximal", "values", "reference", "teacher") else family
    return Phase(phase.name, phase.cost * machine.factors.get(family, 1.0), phase.tokens)


def dense_step(shape: Shape, *, length: int, sequences: int, ranks: int, machine: Machine, recompute: float) -> Cost:
    """One optimizer step of supervised training on whole sequences, every token predicted; for comparison with what others
    published. ``sequences``: of each rank. ``recompute``: the share of the forward pass that is done again."""
    most = length * sequences
    step = cut(sequences, 1, 0, length, most=most)
    model = Held("actor", shape, "lm", "bfloat16", ranks, True, most, 1024)
    return updating(model, step, machine, recompute=recompute)
