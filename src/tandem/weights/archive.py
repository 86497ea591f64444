"""Weights of versions that are no longer served, kept so that what they made can be scored again."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tandem.api.weights import FolderSource, WeightSource
from tandem.weights.channel import LocalSource


class VersionArchive:
    """Keeps the versions that will be scored again, in the dtype of their delivery.

    A copy in memory is as large as the weights. A version that a disk channel has in a folder takes no memory.
    """

    def __init__(self, wanted: Callable[[int], bool], most: int):
        """``wanted``: says whether a version will be needed after a newer one is published. ``most``: how many versions
        back a needed one may be."""
        self._wanted, self._most = wanted, most
        self._kept: dict[int, WeightSource] = {}

    def wants(self, number: int) -> bool:
        """True if this version will be needed later and is not archived yet."""
        return number not in self._kept and self._wanted(number)

    def keep(self, number: int, source: WeightSource) -> None:
        """Archives a version: a folder as it is, anything else as a copy in memory."""
        if isinstance(source, FolderSource):
            self._kept[number] = source
        else:
            copies = tuple((name, tensor.detach().to("cpu", copy=True)) for name, tensor in source.tensors())
            self._kept[number] = LocalSource(copies)

    def forget(self, newest: int) -> None:
        """Drops the copies that nobody needs any more once version ``newest`` is published."""
        self._kept = {
            number: source
            for number, source in self._kept.items()
            if isinstance(source, FolderSource) or newest - number <= self._most
        }

    def get(self, number: int) -> WeightSource | None:
        """The tensors of a version, or None if it is not archived or its folder is gone."""
        source = self._kept.get(number)
        return None if isinstance(source, FolderSource) and not source.folder.is_dir() else source

    def state_dict(self) -> dict[str, Any]:
        """The versions in memory. Folders are left out: they are removed when this process ends."""
        held = {number: source for number, source in self._kept.items() if isinstance(source, LocalSource)}
        return {str(number): dict(source.named_tensors) for number, source in held.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds the versions of ``state`` to the archive."""
        for number, tensors in state.items():
            copies = tuple((name, tensor.clone()) for name, tensor in tensors.items())
            self._kept[int(number)] = LocalSource(copies)

    @property
    def versions(self) -> list[int]:
        """Numbers of the archived versions, oldest first."""
        return [number for number in sorted(self._kept) if self.get(number) is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies in memory."""
        held = [source for source in self._kept.values() if isinstance(source, LocalSource)]
        tensors: list[torch.Tensor] = [tensor for source in held for _, tensor in source.named_tensors]
        return sum(tensor.nbytes for tensor in tensors)
