"""The memory of a model in a training engine on each rank: weights, moments, gradients, and what comes and goes with them.

FSDP: what is trained in float32, one part a rank, gathered a layer at a time (`tandem.engines.train.holders`). One process:
the same whole, and a rounded copy to compute with. DeepSpeed: its own flat pieces (`tandem.engines.train.zero`), beside
which stages 1 and 2 keep the whole model in the dtype of the computation; in float32 the masters are in its memory.
"""

from collections.abc import Iterator

from tandem.models.footprint import FLOAT32
from tandem.models.shape import BYTES
from tandem.planning.items import MemoryItem, Place, Room
from tandem.planning.planned_model import PlannedModel

NORM_BYTES = 12
"""Bytes for each number of the largest gradient while its norm is taken: its square in float32, and that in float64."""

BUCKET = 50_000_000
"""Most numbers that DeepSpeed sends at a time, and fetches ahead under stage 3 (`tandem.engines.train.zero_library`)."""


def states(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Weights and moments, which stay through all phases."""
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
    """Stages 1 and 2: the whole model, whose flat form the parameters are views of; stage 3: a part of it, and the buffer
    that gradients are summed into, which a frozen model has too."""
    whole, part, stage = model.masters, model.masters / model.parts, model.layout.zero
    yield room.item(model.role, "parameters", BYTES[model.dtype] * (part if stage == 3 else whole))
    if model.dtype != "float32":  # else they share the memory of the parameters
        yield room.item(model.role, "masters", FLOAT32 * part)
    if stage == 3:
        yield room.item(model.role, "buffer of gradients", FLOAT32 * part)
    if model.trained:
        yield room.item(model.role, "optimizer", 2 * FLOAT32 * part)


def gathered(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Parameters that are whole while it computes: with FSDP everything outside the layers, the layer that computes and the
    next one; with stage 3 what DeepSpeed fetches ahead, too."""
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
    """From the second micro-batch of a step on: summed where they are not divided yet, else a part of them. DeepSpeed sends
    them in buckets, in the dtype of the computation, in float32, and on a CPU in gloo's copy of that."""
    stage = model.layout.zero
    whole = stage == 1 if stage is not None else not model.sync_each
    if stage != 3:  # which has its buffer at all times
        yield gradients(model, room, FLOAT32 * model.masters / (1 if whole else model.parts))
    if stage is not None:
        a_number = BYTES[model.dtype] + (2 + room.shared) * FLOAT32
        yield room.item(model.role, "buckets", float(a_number * min(model.masters, BUCKET)))


def gradients_of_the_step(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """While the optimizer works. DeepSpeed joins the pieces in one tensor beside them."""
    pieces = 2 if model.layout.zero in (1, 2) else 1
    yield gradients(model, room, pieces * FLOAT32 * model.masters / model.parts)
    largest = max(model.piece.embedding, model.piece.hidden * model.piece.intermediate)
    if model.adapters is not None:
        largest = model.adapters.rank * max((max(model.shape.linears[name]) for name in model.adapters.modules), default=0)
    yield room.item(model.role, "norm of the gradients", NORM_BYTES * largest / model.parts, _place(model))


def gradients(model: PlannedModel, room: Room, each: float) -> MemoryItem:
    """``each``: bytes of a rank."""
    return room.item(model.role, "gradients", each, _place(model))


def _place(model: PlannedModel) -> Place:
    return "host" if model.offload else "device"
