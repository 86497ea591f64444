"""Communication between ranks, in bytes that one of them receives: with a micro-batch, and once a step.

A collective over n ranks brings each rank (n − 1)/n of what is gathered, reduced to parts or exchanged, and twice that where
all get the whole sum. Some of it can go on beside the computation (parameters that are fetched ahead, gradients that are
sent behind), some cannot: a layer waits for what tensor and context parallelism exchange in it.
"""

from typing import NamedTuple

from tandem.models.footprint import FLOAT32
from tandem.models.shape import BYTES
from tandem.planning.activations import ActivationSettings
from tandem.planning.batches import MicroBatch
from tandem.planning.machine import Machine
from tandem.planning.planned_model import PlannedModel


class Moved(NamedTuple):
    """Bytes of one rank."""

    beside: float = 0.0
    """Bytes whose transfer may hide behind the computation."""

    between: float = 0.0
    """Bytes that the computation waits for."""

    host: float = 0.0
    """Between the device and host memory."""

    def __add__(self, other: "Moved") -> "Moved":  # type: ignore[override]
        return Moved(*(a + b for a, b in zip(self, other, strict=True)))


def others(ranks: int) -> float:
    """The share of something that lies on the other ranks."""
    return (ranks - 1) / ranks


def of_micro_batch(model: PlannedModel, batch: MicroBatch, machine: Machine, *, backward: bool) -> Moved:
    """One forward pass, and the backward pass behind it."""
    return _of_parameters(model, backward=backward) + _of_activations(model, batch, machine, backward=backward)


def _of_parameters(model: PlannedModel, *, backward: bool) -> Moved:
    """FSDP gathers all for the forward pass, and the layers again for the backward pass; stage 3 all of it twice."""
    size, share, zero = BYTES[model.dtype], others(model.parts), model.layout.zero
    whole = size * (model.masters + model.base)
    if model.fsdp:
        layers = whole - size * model.piece.root(model.head)
        gathered = whole + (layers if backward else 0)
        reduced = FLOAT32 * model.masters * share if backward and model.sync_each else 0.0
        held = FLOAT32 * model.masters + size * model.base if model.own else whole  # the actor's base, which is rounded
        brought = (2 if backward else 1) * held / model.parts if model.offload else 0.0
        sent = FLOAT32 * model.masters / model.parts if model.offload and backward else 0.0
        return Moved(gathered * share + reduced, host=brought + sent)
    if zero == 3:
        return Moved((2 if backward else 1) * whole * share, FLOAT32 * model.masters * share if backward else 0.0)
    if zero == 2 and backward:
        return Moved(between=FLOAT32 * model.masters * share)
    return Moved()


def _of_activations(model: PlannedModel, batch: MicroBatch, machine: Machine, *, backward: bool) -> Moved:
    """Tensor parallelism sums twice a layer and direction (arXiv:1909.08053), context parallelism trades queries, keys,
    values and outputs once a layer and direction (arXiv:2309.14509), or gathers keys and values."""
    layout, shape, size = model.layout, model.piece, BYTES[model.dtype]
    spread = ActivationSettings.of(model)
    tokens = spread.seen(batch).tokens / layout.context
    passes = 1 + backward * (1 + model.checkpointing)
    summed = 2 * others(layout.tensor) * tokens * shape.hidden
    exact = FLOAT32 if machine.kind == "cpu" else size  # on a CPU sums are taken in float32
    moved = summed * exact * (2 * shape.layers * passes + 1)
    if backward and layout.tensor > 1 and model.head != "scalar":
        moved += 2 * others(layout.tensor) * batch.predicted * shape.hidden * FLOAT32
    width = 2 * shape.key * layout.context if model.gathers_keys else 2 * shape.query + 2 * shape.key
    moved += others(layout.context) * tokens * width * size * shape.layers * passes
    return Moved(between=moved)


def of_step(model: PlannedModel) -> Moved:
    """Once a step: gradients are summed over shards, their sums over replicas; DeepSpeed gathers what it has moved."""
    share, zero, replicas = others(model.parts), model.layout.zero, model.layout.replicas
    part = FLOAT32 * model.masters / model.parts
    between = 2 * others(replicas) * part
    if model.fsdp and not model.sync_each:
        return Moved(FLOAT32 * model.masters * share, between)
    if zero in (1, 2):
        between += BYTES[model.dtype] * model.masters * share
        between += FLOAT32 * model.masters * share if zero == 1 else 0.0
    return Moved(between=between)
