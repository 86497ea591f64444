"""A bound on a mean cost by a Lagrange multiplier (Ray, Achiam and Amodei 2019; Safe RLHF, arXiv:2310.12773)."""

from __future__ import annotations

from tandem.api.lazy_torch import torch


def lagrangian(rewards: torch.Tensor, costs: torch.Tensor, multiplier: float) -> torch.Tensor:
    """J = (R − λ·C) / (1 + λ), a weighted mean of R and −C, so its size does not grow with λ. All ``[N]``."""
    return (rewards - multiplier * costs) / (1.0 + multiplier)


def next_multiplier(
    multiplier: float, cost: float, *, limit: float, step_size: float, low: float = 0.0, high: float
) -> float:
    """λ ← λ + η·(mean cost − limit), within [low, high]: a projected step up the gradient of the dual problem."""
    return min(high, max(low, multiplier + step_size * (cost - limit)))
