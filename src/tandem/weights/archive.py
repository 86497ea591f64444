"""Weights of versions that are no longer served, kept so that what they made can be scored again."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tandem.api.weights import FolderSource, WeightSource
from tandem.weights.channel import LocalSource


class VersionArchive:
    """Keeps the versions that somebody will ask for, in the dtype that was delivered.

    In memory each takes as much as the weights; where a disk channel has them in a folder, nothing.
    """

    def __init__(self, wanted: Callable[[int], bool], most: int):
        """``wanted``: whether a version will be asked for once it is not the newest any more. ``most``: the most versions
        that it is behind then."""
        self._wanted, self._most = wanted, most
        self._kept: dict[int, WeightSource] = {}

    def wants(self, number: int) -> bool:
        """True if it will be asked for, and is not kept yet."""
        return number not in self._kept and self._wanted(number)

    def keep(self, number: int, source: WeightSource) -> None:
        """Keeps it, as a copy where it is no folder."""
        if isinstance(source, FolderSource):
            self._kept[number] = source
        else:
            copies = tuple((name, tensor.detach().to("cpu", copy=True)) for name, tensor in source.tensors())
            self._kept[number] = LocalSource(copies)

    def forget(self, newest: int) -> None:
        """Lets go of what nobody will ask for once ``newest`` is published."""
        self._kept = {
            number: kept
            for number, kept in self._kept.items()
            if isinstance(kept, FolderSource) or newest - number <= self._most
        }

    def get(self, number: int) -> WeightSource | None:
        """Its tensors; None where it is not kept, or its folder is gone."""
        found = self._kept.get(number)
        return None if isinstance(found, FolderSource) and not found.folder.is_dir() else found

    def state_dict(self) -> dict[str, Any]:
        """The versions that are kept in memory. What lies in a folder of this process's is not there after it."""
        held = {number: kept for number, kept in self._kept.items() if isinstance(kept, LocalSource)}
        return {str(number): dict(kept.named_tensors) for number, kept in held.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps those too."""
        for number, tensors in state.items():
            copies = tuple((name, tensor.clone()) for name, tensor in tensors.items())
            self._kept[int(number)] = LocalSource(copies)

    @property
    def versions(self) -> list[int]:
        """Those that are kept, oldest first."""
        return [number for number in sorted(self._kept) if self.get(number) is not None]

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        held = [kept for kept in self._kept.values() if isinstance(kept, LocalSource)]
        tensors: list[torch.Tensor] = [tensor for kept in held for _, tensor in kept.named_tensors]
        return sum(tensor.nbytes for tensor in tensors)
