"""The state from which a run can be resumed, and the protocol by which each part of a run saves and restores its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

State = dict[str, Any]
"""Plain data: dicts with text keys, lists, texts, numbers, booleans, None, and tensors at the leaves.

A tensor that is spread over ranks is a `Parted`; the writer of a checkpoint gathers these one at a time. All other values
are taken from rank 0.
"""


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that one rank has: a block of the tensor, or of its flattened entries."""

    values: torch.Tensor
    """The block; empty if another rank has the same block."""

    start: tuple[int, ...]
    """Index of the block's first entry in the whole tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    flat: bool = False
    """True if the block is a range of the flattened tensor; ``start`` is then one number."""


@dataclass(frozen=True)
class Parted:
    """A tensor that is spread over the ranks."""

    gather: Callable[[], torch.Tensor]
    """Returns the whole tensor; collective."""

    part: Callable[[], TensorPart]
    """Returns this rank's part, without copying its memory."""


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
