"""Weights for engines in other processes of this machine: one segment of memory, overwritten at every update.

The segment is an anonymous memory file: it leaves no file behind, does not count against the size of /dev/shm, and is freed
when the last process that has it open ends, however that happens.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

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
        memory = mmap.mmap(fd, self.num_bytes, offset=self.offset)
        count = torch.Size(self.shape).numel()
        return (
            torch.frombuffer(memory, dtype=self.dtype, count=count).view(self.shape)
            if count
            else torch.empty(self.shape, dtype=self.dtype)
        )


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


class Segment:
    """Memory that other processes of this user can map by its path. It grows as tensors are added."""

    def __init__(self) -> None:
        self._finalize: weakref.finalize[..., Segment]
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("tandem-weights")
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
            self._finalize = weakref.finalize(self, os.close, self._fd)
        else:  # a named file, removed with this object or at the end of the interpreter
            self._fd, self.path = tempfile.mkstemp(prefix="tandem-weights-")
            self._finalize = weakref.finalize(self, _remove, self._fd, self.path)
        self._size = 0
        self._tensors: dict[str, tuple[Slot, torch.Tensor]] = {}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Slot, torch.Tensor] | None:
        """Returns the slot of this name and its memory, made at the first call; None if its shape or dtype differs."""
        if name not in self._tensors:
            slot = Slot(name, shape, dtype, self._size)
            pages = -(-slot.num_bytes // mmap.ALLOCATIONGRANULARITY)
            self._size += pages * mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self._fd, self._size)
            self._tensors[name] = (slot, slot.map(self._fd))
        slot, memory = self._tensors[name]
        return (slot, memory) if (slot.shape, slot.dtype) == (shape, dtype) else None

    def close(self) -> None:
        """Closes the segment; its memory is freed once no process maps it any more."""
        self._tensors.clear()
        self._finalize()


def _remove(fd: int, path: str) -> None:
    os.close(fd)
    os.unlink(path)


class SharedMemoryChannel(WeightChannel):
    """Delivers to engines in other processes. Casting and copying are one pass, straight into the segment.

    If an engine still reads an update that the trainer has given up, the digests do not match, and the engine refuses the
    update.
    """

    def __init__(self) -> None:
        self._segment: Segment | None = None

    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Copies tensors into shared memory, cast to ``dtype``."""
        segment = self._segment = self._segment or Segment()
        slots: list[Slot] = []
        with Digests(self.key) as digests:
            for name, tensor in named_tensors:
                place = segment.tensor(name, tuple(tensor.shape), dtype)
                if place is None:
                    raise ValueError(f"tensor {name!r} has another shape or dtype than in the update before")
                slot, memory = place
                memory.copy_(tensor.detach())
                digests.add(name, memory)
                slots.append(slot)
        source = SharedMemorySource(segment.path, tuple(slots))
        return Delivery(source, digests.result(), sum(slot.num_bytes for slot in slots), self.key)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
