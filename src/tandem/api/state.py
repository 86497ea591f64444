"""The state from which a run can be resumed, and the protocol by which each part of a run saves and restores its state."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

State = dict[str, Any]
"""Plain data: dicts with text keys, lists, texts, numbers, booleans, None, and tensors at the leaves.

A tensor that is spread over ranks is a `Parted`, of which each rank writes its part into a checkpoint. All other values are
taken from rank 0.
"""


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that one rank has: a block of the tensor, or of its flattened entries."""

    values: torch.Tensor
    """The block. If several ranks hold the same block, one of them gives it here, and the others an empty tensor."""

    start: tuple[int, ...]
    """Index of the block's first entry in the whole tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    flat: bool = False
    """True if the block is a range of the flattened tensor; ``start`` is then one number."""

    @property
    def entries(self) -> tuple[int, ...]:
        """Shape of the tensor in which ``start`` is an index: the whole tensor, flattened if the block is a range of it."""
        return (math.prod(self.shape),) if self.flat else self.shape


@dataclass(frozen=True)
class Parted:
    """A tensor that is spread over the ranks."""

    name: str
    """Name of the tensor, for errors."""

    parts: Callable[[], Sequence[TensorPart]]
    """Returns the parts that this process has, without copying their memory: of a model its own, of a copy on rank 0 all."""

    def whole(self) -> torch.Tensor:
        """Returns the whole tensor. Raises `RuntimeError` if this process does not have all parts."""
        parts = self.parts()
        whole = torch.empty(parts[0].shape, dtype=parts[0].values.dtype)
        missing = whole.numel() - sum(part.values.numel() for part in parts)
        if missing:
            raise RuntimeError(f"the parts of {self.name} are {missing} entries short of the whole, {list(whole.shape)}")
        for part in parts:
            if part.values.numel():
                place = tuple(slice(at, at + size) for at, size in zip(part.start, part.values.shape, strict=True))
                whole.view(part.entries)[place] = part.values
        return whole


def part_of(tensor: torch.Tensor) -> TensorPart:
    """Returns this rank's part of a tensor that may be sharded. If several ranks have the same part, it is empty on all of
    them but the first."""
    if not isinstance(tensor, DTensor):
        return TensorPart(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
    local, coordinate = tensor.to_local(), tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank has no part of it"
    if any(place.is_replicate() and at for place, at in zip(tensor.placements, coordinate, strict=True)):
        local = local.new_empty(0)
    sharded: Any = tensor  # torch declares no types here
    start = tuple(sharded.__create_chunk_list__()[0].offsets)
    return TensorPart(local, start, tuple(tensor.shape))


@runtime_checkable
class Stateful(Protocol):
    """A part of a run whose state a checkpoint must save.

    The state has only what the configuration does not determine. An object constructed from the same configuration that then
    loads the state continues exactly, bit for bit, as the first object would have.
    """

    def state_dict(self) -> State:
        """Returns the current state without copying tensors, so write it before training continues. All ranks call this, for
        all parts in the same order."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the current state by a copy of ``state``. All ranks call it, with whole tensors.

        Raises:
            ConfigError: the state is of another model, data set or run; the message says which.
        """
        ...
