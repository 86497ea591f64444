"""The state that a run's future depends on, and the protocol by which each part of a run gives its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

State = dict[str, Any]
"""Plain data: dicts with text keys, lists, texts, numbers, booleans, None, and tensors at the leaves.

A tensor that is sharded over ranks (a `DTensor`) stands there as it is, and one that is cut in another way as a `Parted`:
whoever writes it gathers it, one after another. Everything else is rank 0's word.
"""


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that one rank has: a block of it, or of the row of all its entries."""

    values: torch.Tensor
    """Empty where another rank gives the same."""

    start: tuple[int, ...]
    """Place of the block's first entry in the whole."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    flat: bool = False
    """True if the block is of the row: ``start`` has one number then."""


@dataclass(frozen=True)
class Parted:
    """A tensor of which each rank has a part."""

    gather: Callable[[], torch.Tensor]
    """Makes it whole; collective."""

    part: Callable[[], TensorPart] | None = None
    """This rank's, its own memory and not a copy; None where it can only be gathered."""


def part_of(tensor: torch.Tensor) -> TensorPart:
    """The part that this rank has of a tensor that may be sharded; of copies, the first one is given."""
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
    """A part of a run whose state decides what comes next.

    What is made from the configuration alone is no state. ``load_state_dict`` of a part that was made from the same
    configuration gives one that goes on as the first would have, to the bit.
    """

    def state_dict(self) -> State:
        """The state of now, without copies: write it before anything goes on. Every rank calls it, in one order."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the place of what is here; copies what it keeps. Every rank calls it with the whole tensors.

        Raises:
            ConfigError: the state is of another model, data set or run; says which.
        """
        ...
