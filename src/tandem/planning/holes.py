"""Memory that an allocator keeps and nobody uses.

On a CPU freed memory stays in the C library's heap (`tandem.models.allocator`). A block that was freed is cut up by smaller
ones, and is laid anew beside them when it is needed again; sizes differ from one micro-batch to the next. How much is lost
that way depends little on how much comes and goes: the largest block once, and beside it about as much in every run that
was measured, of models from 19 to 135 million parameters. It stays lost for the whole run.
On a GPU it is a share of what comes and goes, for the caching allocator keeps blocks of like sizes together. Assumed there.
"""

from collections.abc import Iterable, Iterator

from tandem.models.footprint import FLOAT32
from tandem.models.shape import BYTES
from tandem.planning.batches import Batches, Step
from tandem.planning.items import GIB, MemoryItem, Room
from tandem.planning.job import Job
from tandem.planning.machine import Machine
from tandem.planning.planned_model import PlannedModel
from tandem.planning.states import bucket

MAPPED = GIB
"""Larger blocks are mapped, and given back when they are freed."""


def of_heap(
    job: Job, machine: Machine, room: Room, batches: Batches, coming: Iterable[Iterable[MemoryItem]]
) -> Iterator[MemoryItem]:
    """Freed memory that the heaps of a CPU's processes keep: one amount for training, one for each embedded engine, each at
    most as much as comes and goes there in one of the phases, and the largest block of training once more."""
    if machine.kind != "cpu":
        return
    phases = [tuple(items) for items in coming]

    def kept(gib: float, *, of_engine: bool) -> float:
        most = max(sum(item.each for item in items if (item.role == "engine") == of_engine) for items in phases)
        return min(gib * GIB, most)

    yield room.item("process", "heap", kept(machine.heap_gib, of_engine=False))
    if job.generator is not None and job.generator.foreign is None:
        yield room.one("engine", "heap", kept(machine.engine_heap_gib, of_engine=True) * job.generator.engines)
    largest = max(largest_block(model, batches) for model in job.models if model.role not in job.writers)
    yield room.item("process", "hole of the largest block", min(largest, float(MAPPED)))


def largest_block(model: PlannedModel, batches: Batches) -> float:
    """Bytes of the largest tensor that comes and goes: logits of a chunk, the gradient of the embedding, what is gathered of
    it, what DeepSpeed sends."""
    step = batches.update.get(model.role) or batches.score[model.role]
    blocks = [0.0] if model.head == "scalar" else [_logits(model, step)]
    if model.trained and model.adapters is None:
        blocks.append(float(FLOAT32 * model.piece.embedding))
    if model.fsdp or model.layout.zero == 3:
        blocks.append(float(BYTES[model.dtype] * max(model.piece.embedding, model.piece.layer)))
    if model.trained and model.layout.zero is not None:
        blocks.append(float(FLOAT32 * bucket(model)))
    return max(blocks)


def _logits(model: PlannedModel, step: Step) -> float:
    rows = min(model.chunk_tokens, -(-step.largest.predicted // model.layout.context))
    return float(FLOAT32 * rows * model.piece.vocab)


def of_what_comes(items: Iterable[MemoryItem], machine: Machine, room: Room) -> Iterator[MemoryItem]:
    """The share of what comes and goes that a GPU's allocator takes beside it."""
    coming = [item for item in items if item.on(0)]
    each = machine.slack * sum(item.each for item in coming if item.every_rank)
    first = machine.slack * sum(item.num_bytes for item in coming if not item.every_rank)
    if each:
        yield room.item("process", "allocator", each)
    if first:
        yield room.one("process", "allocator", first)
