"""Weights to a server on the trainer's own GPU: a version is copied within that GPU's memory, and the server opens it there.

The server opens handles of CUDA's inter-process communication (IPC); no tensor leaves the device. On a CPU the same code
passes torch's shared memory, which only tests use.
"""

import base64
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tandem.api.weights import WeightSource
from tandem.weights.channel import Delivery, Digests, WeightChannel

BUCKET_BYTES = 64 << 20
"""Bytes of memory that one handle opens, unless a single tensor is larger."""

ALIGNED = 16
"""Each tensor of a bucket begins at a multiple of this many bytes, as every dtype allows."""

COUNTER = slice(4, 6)
"""Parts of a CUDA handle that name torch's counter of the processes that have it open."""


class BucketSlot(NamedTuple):
    """The place of one tensor, in types that JSON has."""

    name: str
    shape: list[int]
    dtype: str
    bucket: int
    offset: int


class BucketLayout:
    """Assigns tensors to consecutive places in buckets; pure arithmetic."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES):
        self._bucket_bytes, self._end = bucket_bytes, 0
        self.sizes: list[int] = []
        """Bytes of each bucket."""

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> BucketSlot:
        """Returns the place of the next tensor."""
        count = -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNED) * ALIGNED
        if not self.sizes or self._end + count > self.sizes[-1]:
            self.sizes.append(max(count, self._bucket_bytes))
            self._end = 0
        slot = BucketSlot(name, list(shape), str(dtype).removeprefix("torch."), len(self.sizes) - 1, self._end)
        self._end += count
        return slot


def staged_bytes(numbers: Iterable[int], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Returns the bytes of all buckets of one version. ``numbers``: number of elements of each tensor, in order."""
    layout = BucketLayout(bucket_bytes)
    for count in numbers:
        layout.add("", (count,), dtype)
    return sum(layout.sizes)


class Staged:
    """The tensors of one version, copied into buckets of the device's memory."""

    def __init__(self, device: torch.device, bucket_bytes: int):
        self._device, self._layout, self._lock = device, BucketLayout(bucket_bytes), threading.Lock()
        self._buckets: list[torch.Tensor] = []
        self._slots: list[BucketSlot] = []
        self._handles: list[tuple[Any, ...]] = []
        self._dropped = False

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copies a tensor into a bucket, cast to ``dtype``; returns the copy."""
        slot = self._layout.add(name, tuple(tensor.shape), dtype)
        if slot.bucket == len(self._buckets):
            self._buckets.append(torch.empty(self._layout.sizes[-1], dtype=torch.uint8, device=self._device))
        self._slots.append(slot)
        copy = self._view(slot)
        copy.copy_(tensor.detach())
        return copy

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields views of all tensors. Raises `OSError` after `drop`."""
        for slot in self._slots:
            with self._lock:  # the next version may drop this one between two tensors
                self._check()
                view = self._view(slot)
            yield slot.name, view

    def place(self) -> dict[str, Any]:
        """Returns the handles of the buckets, made once, and the tensors in them. Raises `OSError` after `drop`."""
        with self._lock:
            self._check()
            self._handles = self._handles or [_handle(bucket) for bucket in self._buckets]
            return {"handles": [_json(handle) for handle in self._handles], "tensors": [list(slot) for slot in self._slots]}

    def drop(self) -> None:
        """Frees the memory. Torch itself would keep it for a process that never opened its handle, or died with it open."""
        with self._lock:
            self._dropped, handles = True, self._handles
            self._buckets, self._handles = [], []
        if self._device.type == "cuda":
            for handle in handles:
                name, offset = handle[COUNTER]
                torch.UntypedStorage._release_ipc_counter(name, offset, device=self._device.index)
            torch.cuda.ipc_collect()

    def _view(self, slot: BucketSlot) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, slot.dtype)
        count = torch.Size(slot.shape).numel() * dtype.itemsize
        return self._buckets[slot.bucket][slot.offset : slot.offset + count].view(dtype).view(slot.shape)

    def _check(self) -> None:
        if self._dropped:
            raise OSError("the update's memory on the GPU was given back: a newer update is on its way")


@dataclass(frozen=True)
class CudaIpcSource(WeightSource):
    """A version on the GPU of this process."""

    staged: Staged

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all tensors, without copies."""
        return self.staged.tensors()

    def place(self) -> Mapping[str, Any]:
        return self.staged.place()


class CudaIpcChannel(WeightChannel):
    """Delivers to a server on this process's GPU. Holds the memory of one version, until the next version comes."""

    for_adapters = False

    def __init__(self, device: str, bucket_bytes: int = BUCKET_BYTES):
        self._device, self._bucket_bytes = torch.device(device), bucket_bytes
        self._staged: Staged | None = None

    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Copies the tensors into buckets, cast to ``dtype``; returns once the copies are complete."""
        self.close()
        staged = self._staged = Staged(self._device, self._bucket_bytes)
        num_bytes = 0
        with Digests(self.key) as digests:
            for name, tensor in named_tensors:
                copy = staged.add(name, tensor, dtype)
                num_bytes += copy.nbytes
                digests.add(name, copy)
        if self._device.type == "cuda":  # the server does not synchronise with this process's streams
            torch.cuda.synchronize(self._device)
        return Delivery(CudaIpcSource(staged), digests.result(), num_bytes, self.key)

    def withdraw(self) -> None:
        self.close()

    def close(self) -> None:
        if self._staged is not None:
            self._staged.drop()
            self._staged = None


def _handle(bucket: torch.Tensor) -> tuple[Any, ...]:
    """Returns the parts of a handle to a tensor's memory, as torch makes and reads them."""
    storage: Any = bucket.untyped_storage()
    return tuple(storage._share_cuda_() if bucket.is_cuda else storage._share_filename_cpu_())


def _json(handle: tuple[Any, ...]) -> list[Any]:
    """Returns a handle in types that JSON has: bytes become text in base 64."""
    return [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in handle]
