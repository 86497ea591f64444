"""A copy of a state, so that it can be written while what it was taken from goes on."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tandem.api.state import Parted, State


class Snapshots:
    """Copies of one run's state, one at a time: each takes the memory of the one before.

    The tensors' copies are in host memory, as large as the tensors, and are kept for the next one: a copy into memory that
    is there already takes a fraction of the time. What comes from a GPU is copied into locked memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, tree: Mapping[str, Any]) -> State:
        """The tree as it is now, sharing nothing with it that could change. Valid until the next call.

        Raises:
            TypeError: a tensor is one of several ranks'.
        """
        used: dict[str, torch.Tensor] = {}
        copy = {key: self._copied(value, key, used) for key, value in tree.items()}
        self._buffers = used  # what is no part of the state any more is let go of
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copy

    @property
    def num_bytes(self) -> int:
        """Host memory that the copies take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _copied(self, value: Any, name: str, used: dict[str, torch.Tensor]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._copied(item, f"{name}/{key}", used) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._copied(item, f"{name}/{i}", used) for i, item in enumerate(value)]
        if isinstance(value, (Parted, DTensor)):
            raise TypeError(f"the tensor at {name} is spread over ranks; a copy of it would have to be gathered first")
        if not isinstance(value, torch.Tensor):
            return value
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        used[name] = buffer.copy_(value.detach(), non_blocking=True)
        return buffer
