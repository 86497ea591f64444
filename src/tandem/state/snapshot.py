"""A copy of a state, so that it can be written while what it was taken from goes on."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tandem.api.failures import NotWritten
from tandem.api.state import Parted, State, TensorPart, part_of
from tandem.api.team import Team
from tandem.state.shared_parts import SharedParts


class Snapshots:
    """Copies of one run's state, one at a time: each takes the memory of the one before.

    The tensors' copies are in host memory, as large as the tensors, and are kept for the next one: a copy into memory that
    is there already takes a fraction of the time. What comes from a GPU is copied into locked memory. Of tensors that are
    spread over ranks each copies what it has (`SharedParts`), and rank 0 puts them together when they are written.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._buffers: dict[str, torch.Tensor] = {}
        self._shared = SharedParts(team)

    def why_not(self, tree: Mapping[str, Any]) -> str | None:
        """Why a copy of this state cannot be taken; None where it can. Collective; rank 0's word counts."""
        spread = dict(_spread(tree))
        reason = self._shared.reachable() if spread and not self._shared.num_bytes else None
        odd = next((name for name, leaf in spread.items() if isinstance(leaf, Parted) and leaf.part is None), None)
        return reason or (None if odd is None else f"of {odd} no rank has a part that could be copied")

    def take(self, tree: Mapping[str, Any]) -> State:
        """The tree as it is now, sharing nothing with it that could change. Valid until the next call. Collective where
        tensors are spread over ranks; rank 0's copy is whole, and the others' is nothing.

        Raises:
            NotWritten: a rank has too little memory for its copy; on every rank.
            TypeError: a tensor's parts are no blocks: see `why_not`.
            RuntimeError: rank 0 cannot read what another rank has copied.
        """
        used: dict[str, torch.Tensor] = {}
        with self._team.together():  # before the next collective call: there may be too little memory on one rank
            spread = dict(_spread(tree))
            if spread:
                try:
                    self._shared.copy({name: _own(name, leaf) for name, leaf in spread.items()})
                except OSError as error:
                    raise NotWritten(f"there is too little memory for a copy of the state: {error}") from error
            copy = {key: self._copied(value, key, used) for key, value in tree.items()} if self._team.main else {}
            self._buffers = used  # what is no part of the state any more is let go of
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        reason = self._shared.share() if spread else None
        if reason is not None:
            raise RuntimeError(reason)
        return copy

    @property
    def num_bytes(self) -> int:
        """Host memory that this rank's copies take."""
        return sum(buffer.nbytes for buffer in self._buffers.values()) + self._shared.num_bytes

    def _copied(self, value: Any, name: str, used: dict[str, torch.Tensor]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._copied(item, f"{name}/{key}", used) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._copied(item, f"{name}/{i}", used) for i, item in enumerate(value)]
        if isinstance(value, (Parted, DTensor)):
            return Parted(partial(self._shared.whole, name))
        if not isinstance(value, torch.Tensor):
            return value
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        used[name] = buffer.copy_(value.detach(), non_blocking=True)
        return buffer


def _spread(value: Any, name: str = "") -> Iterator[tuple[str, Parted | DTensor]]:
    """The tensors of which each rank has a part, by their path."""
    if isinstance(value, (Parted, DTensor)):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _spread(item, f"{name}/{key}" if name else key)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _spread(item, f"{name}/{i}")


def _own(name: str, leaf: Parted | DTensor) -> TensorPart:
    if isinstance(leaf, DTensor):
        return part_of(leaf)
    if leaf.part is None:
        raise TypeError(f"the tensor at {name} is spread over ranks; a copy of it would have to be gathered first")
    return leaf.part()
