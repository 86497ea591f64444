"""Behaviour correction: importance weights for tokens that another policy sampled, and rules that drop whole sequences.

A dropped token has weight 0 and stays in the denominators.
"""

from __future__ import annotations

from tandem.algorithms.ratios import MAX_LOG_RATIO, log_ratio, mean_by_sequence, sum_by
from tandem.algorithms.registry import IMPORTANCE_WEIGHTS, REJECTIONS
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule


def behaviour_ratio(
    proximal: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor, level: str
) -> torch.Tensor:
    """exp(proximal − rollout) ``[T]``, no gradient: of each token, or at level ``sequence`` its trajectory's product."""
    d = log_ratio(proximal.detach(), rollout, mask)
    if level == "sequence":
        # each log-ratio is clamped already, but a thousand of them still overflow exp
        d = sum_by(d, sequence).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d.exp()


@IMPORTANCE_WEIGHTS.register("none")
def no_weight(ratio: torch.Tensor) -> torch.Tensor:
    """Tokens of older weights count as if they were new."""
    return torch.ones_like(ratio)


@IMPORTANCE_WEIGHTS.register("truncate", knobs={"high": KnobRule(above=0.0, meaning="Largest weight.")})
def truncate(ratio: torch.Tensor, *, high: float = 2.0) -> torch.Tensor:
    """L_t × min(w, high), truncated importance sampling."""
    return ratio.clamp(max=high)


@IMPORTANCE_WEIGHTS.register(
    "mask",
    "2505.24298",
    "2510.18855",
    knobs={
        "low": KnobRule(low=0.0, meaning="Tokens of a smaller ratio are dropped."),
        "high": KnobRule(above=0.0, meaning="Tokens of a larger ratio are dropped."),
    },
    drops_outside=True,
)
def mask_outside(ratio: torch.Tensor, *, low: float = 0.0, high: float = 5.0) -> torch.Tensor:
    """L_t × w where low ≤ w ≤ high, × 0 elsewhere: IcePop; with `high` alone, decoupled PPO."""
    # 0 and not removed: the token stays in the denominators, so dropping tokens does not raise the step
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@REJECTIONS.register("none")
def keep_all(mask: torch.Tensor) -> torch.Tensor:
    """All trajectories are kept."""
    return torch.ones_like(mask)


@REJECTIONS.register(
    "product",
    knobs={
        "low": KnobRule(low=0.0, high=1.0, meaning="Smallest product of exp(proximal − rollout) that is kept."),
        "high": KnobRule(low=1.0, meaning="Largest product that is kept."),
    },
)
def product(
    proximal: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> torch.Tensor:
    """Trajectories whose product of w lies in [low, high]."""
    ratio = behaviour_ratio(proximal, rollout, mask, sequence, "sequence")
    return (ratio >= low) & (ratio <= high)


@REJECTIONS.register(
    "geometric",
    knobs={
        "low": KnobRule(low=0.0, high=1.0, meaning="Smallest geometric mean of exp(proximal − rollout) that is kept."),
        "high": KnobRule(low=1.0, meaning="Largest geometric mean that is kept."),
    },
)
def geometric(
    proximal: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    low: float = 0.999,
    high: float = 1.001,
) -> torch.Tensor:
    """Trajectories whose geometric mean of w lies in [low, high]."""
    ratio = mean_by_sequence(log_ratio(proximal.detach(), rollout, mask), mask, sequence).exp()
    return (ratio >= low) & (ratio <= high)


@REJECTIONS.register(
    "negative_drift",
    "2512.02556",
    knobs={"threshold": KnobRule(low=0.0, meaning="Mean of (rollout − policy) above which bad answers are dropped.")},
)
def negative_drift(
    policy: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    threshold: float = 0.5,
) -> torch.Tensor:
    """All but tokens with A < 0 whose trajectory has a mean of (rollout − policy) above the threshold."""
    # good answers are kept however far the policy has moved from them: pulling towards them is safe
    drift = mean_by_sequence(log_ratio(rollout, policy.detach(), mask), mask, sequence)
    return ~((advantages < 0) & (drift > threshold))
