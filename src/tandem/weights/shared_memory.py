"""Weights for engines in other processes of this machine: one segment of memory, overwritten at every update."""

import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tandem.api.shared_memory import SharedMemory, tensor_in
from tandem.api.weights import WeightSource
from tandem.weights.channel import Delivery, Digests, WeightChannel


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in the segment."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor; at least 1, because 0 bytes cannot be mapped."""
        return max(1, torch.Size(self.shape).numel() * self.dtype.itemsize)

    def map(self, fd: int) -> torch.Tensor:
        """Returns the tensor, backed by the segment. It is unmapped when nothing refers to it any more."""
        return tensor_in(mmap.mmap(fd, self.num_bytes, offset=self.offset), self.shape, self.dtype)


@dataclass(frozen=True)
class SharedMemorySource(WeightSource):
    """Describes a segment; another process that unpickles it reads the same memory."""

    path: str
    slots: tuple[Slot, ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all tensors, without copies. Raises `OSError` if the segment is gone."""
        fd = os.open(self.path, os.O_RDWR)
        try:
            for slot in self.slots:
                yield slot.name, slot.map(fd)
        finally:
            os.close(fd)

    def place(self) -> dict[str, Any]:
        named = [[slot.name, list(slot.shape), str(slot.dtype).removeprefix("torch."), slot.offset] for slot in self.slots]
        return {"memory": self.path, "tensors": named}


class SharedMemoryChannel(WeightChannel):
    """Delivers to engines in other processes. Casting and copying are one pass, straight into the segment.

    If an engine still reads an update that the trainer has given up, the digests do not match, and the engine refuses the
    update.
    """

    def __init__(self) -> None:
        self._segment: SharedMemory | None = None
        self._tensors: dict[str, tuple[Slot, torch.Tensor]] = {}

    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Copies tensors into shared memory, cast to ``dtype``. The memory grows in the first update."""
        segment = self._segment = self._segment or SharedMemory("tandem-weights")
        slots: list[Slot] = []
        with Digests(self.key) as digests:
            for name, tensor in named_tensors:
                if name not in self._tensors:
                    slot = Slot(name, tuple(tensor.shape), dtype, segment.size)
                    pages = -(-slot.num_bytes // mmap.ALLOCATIONGRANULARITY)
                    segment.resize(segment.size + pages * mmap.ALLOCATIONGRANULARITY)
                    self._tensors[name] = (slot, slot.map(segment.fd))
                slot, memory = self._tensors[name]
                if (slot.shape, slot.dtype) != (tensor.shape, dtype):
                    raise ValueError(f"tensor {name!r} has another shape or dtype than in the update before")
                memory.copy_(tensor.detach())
                digests.add(name, memory)
                slots.append(slot)
        source = SharedMemorySource(segment.path, tuple(slots))
        return Delivery(source, digests.result(), sum(slot.num_bytes for slot in slots), self.key)

    def close(self) -> None:
        self._segment = None
        self._tensors.clear()
