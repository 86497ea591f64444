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
    place = _place(model)
    yield room.item(model.role, "parameters", model.weight_bytes, place)
    if not model.fsdp and model.dtype != "float32":
        yield room.item(model.role, "parameters, rounded", model.rounded_bytes)
    if model.trained:
        yield room.item(model.role, "optimizer", model.optimizer_bytes, place)


def _zero_states(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Stages 1 and 2: the whole model, whose flat form the parameters are views of; stage 3: a part of it, the buffer that
    gradients are summed into, which a frozen model has too, and from the first step on the bucket that they are sent in."""
    whole, stage = model.masters, model.layout.zero
    yield room.item(model.role, "parameters", BYTES[model.dtype] * whole / (model.parts if stage == 3 else 1))
    if model.dtype != "float32":  # else they share the memory of the parameters
        yield room.item(model.role, "masters", FLOAT32 * whole / model.parts)
    if stage == 3:
        yield room.item(model.role, "buffer of gradients", FLOAT32 * whole / model.parts)
    if stage == 3 and model.trained:
        yield room.item(model.role, "bucket", float(BYTES[model.dtype] * bucket(model)))
    if model.trained:
        yield room.item(model.role, "optimizer", 2 * FLOAT32 * whole / model.parts)


def bucket(model: PlannedModel) -> int:
    """Numbers that DeepSpeed sends at a time."""
    return min(model.masters, BUCKET)


def state_bytes(model: PlannedModel) -> float:
    """Bytes of one rank: weights and moments, wherever they lie."""
    return sum(item.num_bytes for item in states(model, Room(1, shared=True)))


def gathered(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Parameters that are whole while it computes: with FSDP everything outside the layers, the layer that computes and the
    next one; with stage 3 what DeepSpeed fetches ahead, too, and of the largest of it the copy that gloo makes."""
    whole = model.masters + model.base
    root, layer = model.piece.root(model.head), model.piece.layer
    if model.adapters is not None:
        layer += model.adapters.rank * model.adapters.widths(model.shape)
    if model.fsdp:
        yield room.item(model.role, "gathered parameters", BYTES[model.dtype] * (root + 2 * layer))
    elif model.layout.zero == 3:
        numbers = min(whole, root + layer + BUCKET) + (model.piece.embedding if room.shared else 0)
        yield room.item(model.role, "gathered parameters", BYTES[model.dtype] * numbers)


def gradients_between(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """From the second micro-batch of a step on: summed where they are not divided yet, else a part of them."""
    if model.layout.zero is None:
        whole = not model.sync_each or model.parts == 1
        yield _gradients(model, room, FLOAT32 * model.masters / (1 if whole else model.parts))
    elif model.layout.zero < 3:  # stage 3 has its buffer at all times
        yield _gradients(model, room, FLOAT32 * model.masters / (1 if model.layout.zero == 1 else model.parts))


def gradients_at_the_end(model: PlannedModel, room: Room, micro_batches: float) -> Iterator[MemoryItem]:
    """When a backward pass ends: of a step with several micro-batches the last but one, which sums nothing over ranks."""
    if model.layout.zero is not None:
        yield from _zero_gradients(model, room)
    elif micro_batches > 1:
        yield from gradients_between(model, room)
    else:
        yield _gradients(model, room, FLOAT32 * model.masters / model.parts)


def _zero_gradients(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Gradients move into a bucket, which is sent in float32, and a part of what comes back is kept. Stage 3 has its bucket
    and its part at all times."""
    if model.layout.zero == 3:
        return
    sent, size = bucket(model), BYTES[model.dtype]
    if model.layout.zero == 1:  # whole ones, of which the bucket takes the place unless it is smaller
        yield _gradients(model, room, FLOAT32 * model.masters * (1 + 1 / model.parts))
        sent = sent if model.masters > BUCKET else 0
    else:
        yield _gradients(model, room, FLOAT32 * model.masters / model.parts)
    rounded = size + FLOAT32 if model.dtype != "float32" else size
    yield room.item(model.role, "buckets", float(rounded * sent))


def gradients_sent(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """Stage 3 sends its bucket when the backward pass is over, or the bucket full: in float32, laid out anew by rank, of
    which gloo makes a copy."""
    if model.layout.zero == 3:
        copies = 1 + room.shared + (model.dtype != "float32")
        yield room.item(model.role, "bucket, laid out", float(copies * FLOAT32 * bucket(model)))


def gradients_of_the_step(model: PlannedModel, room: Room) -> Iterator[MemoryItem]:
    """While the optimizer works. DeepSpeed joins the pieces in one tensor beside them."""
    pieces = 1 if model.layout.zero is None else 1 + (model.layout.zero < 3)
    yield _gradients(model, room, pieces * FLOAT32 * model.masters / model.parts)
    piece = model.piece
    largest = max(piece.embedding, piece.hidden * piece.intermediate)
    if model.adapters is not None:
        largest = model.adapters.rank * max(max(model.shape.linears[name]) for name in model.adapters.modules)
    norm = room.item(model.role, "norm of the gradients", NORM_BYTES * largest / model.parts, _place(model))
    yield norm


def _gradients(model: PlannedModel, room: Room, each: float) -> MemoryItem:
    return room.item(model.role, "gradients", each, _place(model))


def _place(model: PlannedModel) -> Place:
    return "host" if model.offload else "device"
