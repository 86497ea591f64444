"""Scores a batch under the newest version of the weights and those that are archived."""

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
    """The first weights of a run, from its model's folder; None if the folder uses other tensor names. Collective."""
    names = {name for name, _ in engine.weights()}
    return FolderSource(folder) if names <= stored_entries(folder).keys() else None


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name


@dataclass(frozen=True)
class Verified:
    """A part of a batch, scored again. All tensors are ``[T]``."""

    batch: TensorDict
    known: torch.Tensor
    """bool, true for a trained token whose version is archived."""

    stamped: torch.Tensor
    """Log-probabilities under the version with which each token is stamped."""

    newest: torch.Tensor
    """Log-probabilities under the weights that are trained now."""

    compared: torch.Tensor
    """Log-probabilities as ``stamped``, computed in float32 if ``exact``."""

    older: torch.Tensor
    """Log-probabilities under the version before the stamped one, computed as ``compared``; NaN if that is not archived."""

    exact: bool
    """True if ``compared`` and ``older`` have no rounding noise."""

    unknown_share: float
    """Share of this part's trained tokens that were not verified, because their version is not archived or they were left
    out."""


class Scorer:
    """Computes log-probabilities in the trainer, with the weights as they were delivered. All methods are collective."""

    def __init__(self, engine: TrainEngine, archive: VersionArchive | None, dtype: torch.dtype, team: Team, *, rounds: bool):
        """Makes a scorer.

        Args:
            archive: on rank 0; None on other ranks.
            dtype: dtype of the delivery.
            rounds: the engine computes in a wider dtype, so its own weights must be rounded to equal the delivered ones.
        """
        self.engine, self._archive, self._dtype, self._team, self._rounds = engine, archive, dtype, team, rounds
        self._names: frozenset[str] | None = None

    def kept(self) -> list[int]:
        """Archived versions that can be scored besides the newest, oldest first."""
        return self._team.share(lambda: self._archive.versions if self._archive is not None else [])

    @property
    def kept_gib(self) -> float:
        """GiB of the archived versions on this machine."""
        return 0.0 if self._archive is None else self._archive.num_bytes / 2**30

    def score(self, batch: TensorDict, number: int | None) -> torch.Tensor:
        """Log-probabilities ``[T]`` under an archived version; None: under the newest, the engine's own weights."""
        if number is None and not self._rounds:
            return self.engine.forward(batch).logprobs
        # an engine that serves float32 merges without rounding: there the adapter itself is nearer than weights in bfloat16
        with self.engine.using(self.tensors(number) if self._rounds or number is None else self._kept(number)):
            return self.engine.forward(batch).logprobs

    def score_in_float32(self, batch: TensorDict, number: int | None) -> torch.Tensor | None:
        """`score` without the rounding noise of a bfloat16 forward pass; None if the engine cannot compute it."""
        served = None if number is None and not self._rounds else self.tensors(number)
        with contextlib.nullcontext() if served is None else self.engine.using(served), self.engine.in_float32() as exact:
            return self.engine.forward(batch).logprobs if exact else None

    def tensors(self, number: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the whole weights of a version as they were served: an adapter is merged into its base, then rounded. A
        tensor is valid until the next is taken."""
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
        """The share of the last delivered adapter that survives rounding in the engine's weights; None if there is no
        adapter, if it changes nothing yet, or if the engine serves float32, which rounds next to nothing away."""
        if self.engine.adapter is None or self._dtype == torch.float32:
            return None
        return self.engine.adapter.surviving(self._dtype)

    def _kept(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of a version as they were delivered, which may be an adapter alone."""
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
