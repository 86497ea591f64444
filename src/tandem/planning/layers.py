"""Time of a model's layers and its head over one micro-batch, forward and backward, on one rank."""

from dataclasses import replace

from tandem.models.footprint import Adapters
from tandem.models.shape import BYTES, Dtype, Shape
from tandem.planning.activations import WHOLE, ActivationSettings
from tandem.planning.batches import MicroBatch
from tandem.planning.cost import ATTENTION, MEMORY, OPERATIONS, PRODUCTS, Cost, total
from tandem.planning.machine import Machine

LAYER_OPERATIONS = {"forward": 45, "backward": 70, "prefill": 30, "decode": 32, "decode_shared": 46}
"""Operations that eager torch starts for one layer; counted in transformers' layers and in the embedded engine."""

STEP_OPERATIONS = 60
"""Operations of one decode step beside its layers: sampling and its preparation."""

ADAPTER_OPERATIONS = 4
"""Operations of one adapter going forward: two products, the scaling, the sum."""

BACKWARD_ATTENTION = 2.5
"""Products of attention's backward pass for each of the forward pass: five against two."""


def decode_operations(layers: int, *, shared: bool) -> int:
    """Number of operations of one decode step. ``shared``: prompts have several samples."""
    return layers * LAYER_OPERATIONS["decode_shared" if shared else "decode"] + STEP_OPERATIONS


def layers_forward(
    shape: Shape, batch: MicroBatch, dtype: Dtype, machine: Machine, spread: ActivationSettings = WHOLE
) -> Cost:
    """The forward pass of all layers over one micro-batch, on one rank. ``shape``: what it computes with."""
    batch, share = spread.seen(batch), 1 / spread.context
    rows, size = batch.tokens * share, BYTES[dtype]
    products = machine.product_s(dtype, max(1, round(rows)), shape.matrices)
    pairs = [batch.scores(window) * share for window in shape.windows or (None,) * shape.layers]
    attention = 4 * sum(pairs) * shape.query / machine.attention[dtype]
    moved = elementwise_bytes(shape, dtype) * rows + size * 2 * batch.behind_prompts * 2 * shape.key * share
    if shape.attention_softcap:
        moved += 8 * (size + 4) * shape.heads * batch.squares() * share
    operations = LAYER_OPERATIONS["forward"] + (20 * len(batch.groups) if batch.shared else 8 * len(batch.groups))
    own = Cost(
        (
            (PRODUCTS, shape.layers * products),
            (ATTENTION, attention),
            (MEMORY, shape.layers * moved / machine.elementwise),
            (OPERATIONS, shape.layers * operations * machine.operation_s),
        )
    )
    return own if spread.adapters is None else total([own, adapters_forward(shape, rows, dtype, machine, spread.adapters)])


def adapters_forward(shape: Shape, rows: float, dtype: Dtype, machine: Machine, adapters: Adapters) -> Cost:
    """``x A`` and ``(…) B`` of every layer, and the sum with what the frozen matrix gives: thin products, which read the
    input and write the output, and three passes over it."""
    ends = [shape.linears[name] for name in adapters.modules]
    work = 2 * rows * adapters.rank * adapters.widths(shape)
    moved = BYTES[dtype] * rows * sum(inputs + 4 * outputs + 4 * adapters.rank for inputs, outputs in ends)
    return Cost(
        (
            (PRODUCTS, shape.layers * work / machine.rate(dtype, max(1, round(rows)))),
            (MEMORY, shape.layers * moved / machine.elementwise),
            (OPERATIONS, shape.layers * ADAPTER_OPERATIONS * len(ends) * machine.operation_s),
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


def layers_backward(
    shape: Shape,
    batch: MicroBatch,
    dtype: Dtype,
    machine: Machine,
    spread: ActivationSettings = WHOLE,
    *,
    recompute: float | None = None,
) -> Cost:
    """The backward pass; ``recompute``: the share of the forward pass that is done again, where it is not what ``spread``
    says: all of it with checkpointing, and without products and attention where that is selective.

    A product's backward pass is two products; beside adapters, whose own are two, that of a frozen matrix is one.
    """
    bare = replace(spread, adapters=None)
    again = float(spread.checkpointing) if recompute is None else recompute
    kept = again if not spread.selective else 0.0
    operations = LAYER_OPERATIONS["backward"] / LAYER_OPERATIONS["forward"]
    factors = {PRODUCTS: 2.0 + kept, ATTENTION: BACKWARD_ATTENTION + kept, MEMORY: 2.0 + again}
    factors[OPERATIONS] = operations + again
    found = dict(layers_forward(shape, batch, dtype, machine, bare).parts)
    frozen = 0.0 if spread.adapters is None else found[PRODUCTS]
    own = Cost((*((name, seconds * factors[name]) for name, seconds in found.items()), (PRODUCTS, -frozen)))
    if spread.adapters is None:
        return total([own])
    rows = spread.seen(batch).tokens / spread.context
    thin = adapters_forward(shape, rows, dtype, machine, spread.adapters).parts
    return total([own, Cost(tuple((name, seconds * factors[name]) for name, seconds in thin))])


def head(
    shape: Shape,
    batch: MicroBatch,
    dtype: Dtype,
    machine: Machine,
    *,
    backward: bool,
    entropy: bool,
    context: int = 1,
    frozen: bool = False,
) -> Cost:
    """Log-probabilities of the predicted tokens; going backward the logits are computed again, and where the head is
    ``frozen`` its own gradient is not."""
    predicted = batch.predicted / context
    logits = predicted * shape.vocab
    passes = 3 - frozen if backward else 1
    softmaxes = 1.0 + entropy
    moved = (8 if entropy else 0) + ((24 if entropy else 8) + (10 if dtype == "bfloat16" else 0)) * backward
    rows = max(1, round(predicted))
    return Cost(
        (
            (PRODUCTS, passes * machine.product_s(dtype, rows, shape.embedding)),
            (MEMORY, logits * softmaxes / machine.softmax + logits * moved / machine.stream),
        )
    )
