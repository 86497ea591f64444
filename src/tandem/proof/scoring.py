"""Scoring a batch under versions of the weights: the newest one, and those that are kept."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict

from tandem.api.engines import TrainEngine
from tandem.api.team import Team
from tandem.api.weight_files import stored_entries
from tandem.api.weights import FolderSource
from tandem.weights.archive import VersionArchive


def beginning(folder: Path, engine: TrainEngine) -> FolderSource | None:
    """The weights that a run began with, from its model's folder; None where that has other names for them. Collective."""
    names = {name for name, _ in engine.weights()}
    return FolderSource(folder) if names <= stored_entries(folder).keys() else None


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name


@dataclass(frozen=True)
class Verified:
    """A part of a batch, scored again. All tensors are ``[T]`` of it."""

    batch: TensorDict
    known: torch.Tensor
    """bool: a trained token whose version is kept."""

    stamped: torch.Tensor
    """Log-probabilities under the version that each token is stamped with."""

    newest: torch.Tensor
    """Under the weights that train now."""

    compared: torch.Tensor
    """Log-probabilities as ``stamped``, computed in float32 if ``exact``."""

    older: torch.Tensor
    """Under the version before the stamped one, computed as ``compared``; NaN where that is not kept."""

    exact: bool
    """True if ``compared`` and ``older`` have no rounding noise."""

    unknown_share: float
    """Trained tokens of this part that were not verified: their version is not kept, or they are left out on purpose."""


class Scorer:
    """Log-probabilities by the trainer, with the weights as they were delivered. All methods are collective."""

    def __init__(self, engine: TrainEngine, archive: VersionArchive | None, dtype: torch.dtype, team: Team, *, rounds: bool):
        """``archive``: on rank 0. ``dtype``: of the delivery. ``rounds``: the engine computes in a wider one, so that its
        own weights have to be rounded before they are what was delivered."""
        self.engine, self._archive, self._dtype, self._team, self._rounds = engine, archive, dtype, team, rounds
        self._names: frozenset[str] | None = None

    def kept(self) -> list[int]:
        """Versions that can be scored beside the newest one, oldest first."""
        return self._team.share(lambda: self._archive.versions if self._archive is not None else [])

    @property
    def kept_gib(self) -> float:
        """Memory that kept versions take here."""
        return 0.0 if self._archive is None else self._archive.num_bytes / 2**30

    def score(self, batch: TensorDict, number: int | None) -> torch.Tensor:
        """``[T]`` under a kept version; None is the newest one, the engine's own."""
        if number is None and not self._rounds:
            return self.engine.forward(batch).logprobs
        # an engine that serves float32 merges without rounding: there the adapter itself is nearer than weights in bfloat16
        with self.engine.using(self.tensors(number) if self._rounds or number is None else self._kept(number)):
            return self.engine.forward(batch).logprobs

    def score_in_float32(self, batch: TensorDict, number: int | None) -> torch.Tensor | None:
        """`score` without the rounding noise of a forward pass in bfloat16; None if the engine cannot."""
        served = None if number is None and not self._rounds else self.tensors(number)
        with contextlib.nullcontext() if served is None else self.engine.using(served), self.engine.in_float32() as exact:
            return self.engine.forward(batch).logprobs if exact else None

    def tensors(self, number: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole weights of a version, as they were served: of an adapter merged into its base, and rounded then. Each is
        valid until the next is asked for."""
        if number is None:
            for name, tensor in self.engine.weights():
                yield name, tensor.to(self._dtype)
            return
        stream, adapter = self._kept(number), self.engine.adapter
        first = next(stream, None)
        if first is not None:
            stream = itertools.chain([first], stream)
        if adapter is None or first is None or not _is_of_adapter(first[0]):
            yield from stream
            return
        for name, tensor in adapter.merged(dict(stream)):
            yield name, tensor.to(self._dtype)

    def surviving(self) -> float | None:
        """The share of the adapter that was delivered last which is in the engine's weights; None where there is none, or
        where it changes nothing yet, or where the engine serves float32, which rounds next to nothing away."""
        if self.engine.adapter is None or self._dtype == torch.float32:
            return None
        return self.engine.adapter.surviving(self._dtype)

    def _kept(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a version, as delivered: perhaps those of an adapter alone."""
        if self._names is None:
            adapter = () if self.engine.adapter is None else self.engine.adapter.weights()
            self._names = frozenset(name for stream in (self.engine.weights(), adapter) for name, _ in stream)
        names, archive = self._names, self._archive
        source = None if archive is None else archive.get(number)
        stream = () if source is None else source.tensors()
        # the folder that a run began with may hold tied tensors twice, and in another dtype
        yield from self._team.spread((name, self._delivered(name, tensor)) for name, tensor in stream if name in names)

    def _delivered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if _is_of_adapter(name) else tensor.to(self._dtype)
