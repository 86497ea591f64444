"""Measures how far an optimizer step moves the weights: the metric ``actor/update_ratio``."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.engines.train.holders import Holder
from tandem.engines.train.spread import Ranks, sum_over_ranks

LOOKED_AT = 4096
"""About this many weights of each master are sampled."""


class StepSize:
    """Norm of the last step / norm of the weights, over a fixed sample of the float32 masters of all ranks."""

    def __init__(self, holder: Holder, ranks: Ranks):
        self._holder, self._ranks = holder, ranks
        self._squares: torch.Tensor | None = None
        """Σ step² and Σ weight² of the sampled weights over all ranks, ``[2]``, on the device; None: not measured."""

    def forget(self) -> None:
        """Drops the measurement of the step before."""
        self._squares = None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Context manager around a step. The host does not wait for the device."""
        before = self._sample()
        yield
        after = self._sample()
        if before is not None and after is not None:
            sums = torch.stack([(after - before).double().square().sum(), before.double().square().sum()])
            self._squares = sum_over_ranks(sums.to(self._holder.device), self._ranks.group)

    def metrics(self) -> dict[str, float]:
        """Returns the metric; empty if the last step changed nothing or was not measured."""
        moved, size = (0.0, 0.0) if self._squares is None else self._squares.tolist()
        return {"actor/update_ratio": math.sqrt(moved / size)} if size else {}

    def _sample(self) -> torch.Tensor | None:
        """Returns the sampled weights of this rank's masters, ``[K]``; None if masters are not float32."""
        pieces = self._holder.local_masters()
        if any(x.dtype != torch.float32 for x in pieces):
            return None
        return torch.cat([x.detach().flatten()[:: x.numel() // LOOKED_AT + 1] for x in pieces])
