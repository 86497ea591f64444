"""Behaviour correction: importance weights for tokens that another policy sampled, and rules that drop whole sequences.

A dropped token has weight 0 and stays in the denominators.
"""

import torch

from tandem.algorithms.ratios import MAX_LOG_RATIO, log_ratio, mean_by_sequence, sum_by
from tandem.algorithms.registry import IMPORTANCE_WEIGHTS, REJECTIONS


def behaviour_ratio(
    proximal: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor, level: str
) -> torch.Tensor:
    """exp(proximal − rollout) ``[T]``, no gradient: of each token, or at level ``sequence`` its trajectory's product."""
    d = log_ratio(proximal.detach(), rollout, mask)
    if level == "sequence":
        d = sum_by(d, sequence).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d.exp()


@IMPORTANCE_WEIGHTS.register("none")
def no_weight(ratio: torch.Tensor) -> torch.Tensor:
    """1."""
    return torch.ones_like(ratio)


@IMPORTANCE_WEIGHTS.register("truncate")
def truncate(ratio: torch.Tensor, *, high: float = 2.0) -> torch.Tensor:
    """min(w, high): truncated importance sampling."""
    return ratio.clamp(max=high)


@IMPORTANCE_WEIGHTS.register("mask")
def mask_outside(ratio: torch.Tensor, *, low: float = 0.0, high: float = 5.0) -> torch.Tensor:
    """w inside [low, high], else 0 (IcePop, arXiv:2510.18855; decoupled PPO with ``high`` alone, arXiv:2505.24298)."""
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@REJECTIONS.register("none")
def keep_all(mask: torch.Tensor) -> torch.Tensor:
    """Everything."""
    return torch.ones_like(mask)


@REJECTIONS.register("product")
def product(
    proximal: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> torch.Tensor:
    """Trajectories whose product of exp(proximal − rollout) lies in [low, high]. ``[T]`` bool."""
    ratio = behaviour_ratio(proximal, rollout, mask, sequence, "sequence")
    return (ratio >= low) & (ratio <= high)


@REJECTIONS.register("geometric")
def geometric(
    proximal: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    low: float = 0.999,
    high: float = 1.001,
) -> torch.Tensor:
    """Trajectories whose geometric mean of exp(proximal − rollout) lies in [low, high]. ``[T]`` bool."""
    ratio = mean_by_sequence(log_ratio(proximal.detach(), rollout, mask), mask, sequence).exp()
    return (ratio >= low) & (ratio <= high)


@REJECTIONS.register("negative_drift")
def negative_drift(
    policy: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    threshold: float = 0.5,
) -> torch.Tensor:
    """All but tokens with A < 0 whose trajectory has a mean of (rollout − policy) above the threshold (arXiv:2512.02556)."""
    drift = mean_by_sequence(log_ratio(rollout, policy.detach(), mask), mask, sequence)
    return ~((advantages < 0) & (drift > threshold))
