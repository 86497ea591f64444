"""Weight versions, and how an update is described on its way."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WeightVersion:
    """Which weights: number of updates published so far, and a digest of all tensors."""

    number: int
    digest: str = ""
    run: str = ""
    model: str = "actor"


class WeightSource(ABC):
    """The receiving end of a channel. Picklable where the engine lives in another process."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, tensor) for every tensor of the update, each valid until the next is asked for."""


@dataclass(frozen=True)
class WeightUpdate:
    """One update: version, where its tensors are, and the digest of each."""

    version: WeightVersion
    source: WeightSource
    digests: Mapping[str, str]
    """Hugging Face name → hex digest of the bytes in the dtype that is delivered."""
