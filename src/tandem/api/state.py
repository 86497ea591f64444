"""What a run's future depends on, and how each part of a run says so."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

State = dict[str, Any]
"""Plain data: dicts with text keys, lists, texts, numbers, booleans, None, and tensors at the leaves.

A tensor that is sharded over ranks (a `DTensor`) stands there as it is, and one that is cut in another way as a `Parted`:
whoever writes it gathers it, one after another. Everything else is rank 0's word.
"""


@dataclass(frozen=True)
class Parted:
    """A tensor of which each rank has a part."""

    gather: Callable[[], torch.Tensor]
    """Makes it whole; collective."""


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
