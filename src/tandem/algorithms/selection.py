"""Choosing some of a batch's tokens: once for the whole batch, and the same ones in whatever order they stand."""

from __future__ import annotations

import math

from tandem.algorithms.registry import TOKEN_FILTERS
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule


def order(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Indices by falling score, equal ones by falling noise. All ``[K]``."""
    by_noise = torch.argsort(noise, descending=True, stable=True)
    return by_noise[torch.argsort(scores[by_noise], descending=True, stable=True)]


def largest(scores: torch.Tensor, among: torch.Tensor, count: int, noise: torch.Tensor) -> torch.Tensor:
    """The ``count`` tokens of largest score among those with ``among [T]``, as ``[T]`` bool."""
    candidates = among.nonzero().flatten()
    chosen = torch.zeros_like(among)
    chosen[candidates[order(scores[candidates], noise[candidates])[:count]]] = True
    return chosen


@TOKEN_FILTERS.register("none")
def keep_all(mask: torch.Tensor) -> torch.Tensor:
    """All trained tokens count."""
    return torch.ones_like(mask)


@TOKEN_FILTERS.register(
    "top_entropy",
    "2506.01939",
    knobs={"share": KnobRule(above=0.0, high=1.0, meaning="Part of the batch's trained tokens that is kept, rounded up.")},
)
def top_entropy(entropy: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor, *, share: float = 0.2) -> torch.Tensor:
    """The part `share` of the batch's tokens with the largest entropy, by the pass before the update; the others get
    weight 0 and stay in the denominators."""
    return largest(entropy, mask, math.ceil(share * int(mask.sum()) - 1e-9), noise)
