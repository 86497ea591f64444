"""Reward shaping: changes to the reward of each sample before advantages are computed. All tensors ``[M]``.

Also the Lagrange multiplier of a limit on the mean cost (Ray, Achiam and Amodei 2019; Safe RLHF, arXiv:2310.12773).
"""

from __future__ import annotations

from tandem.algorithms.registry import SHAPING
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule


@SHAPING.register("scale", knobs={"factor": KnobRule(meaning="The reward is multiplied by this.")})
def scale(rewards: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
    """r ← factor·r."""
    return rewards * factor


@SHAPING.register("bias", knobs={"offset": KnobRule(meaning="This is added to the reward.")})
def bias(rewards: torch.Tensor, *, offset: float = 0.0) -> torch.Tensor:
    """r ← r + offset."""
    return rewards + offset


@SHAPING.register(
    "clip", knobs={"low": KnobRule(at_most="high", meaning="Smallest reward."), "high": KnobRule(meaning="Largest reward.")}
)
def clip(rewards: torch.Tensor, *, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    """r ← r within [low, high]."""
    return rewards.clamp(low, high)


@SHAPING.register(
    "overlong",
    "2503.14476",
    knobs={
        "max_tokens": KnobRule(
            low=1,
            integer=True,
            meaning="Length from which the penalty is full, in tokens; unset takes gconfig.max_new_tokens.",
        ),
        "buffer_tokens": KnobRule(
            low=1,
            integer=True,
            at_most="max_tokens",
            meaning="The penalty grows over this many tokens before max_tokens; unset takes a fifth of max_tokens.",
        ),
    },
)
def overlong(
    rewards: torch.Tensor, lengths: torch.Tensor, *, max_tokens: int, buffer_tokens: int | None = None
) -> torch.Tensor:
    """r ← r + p, p = 0 up to max_tokens − buffer_tokens, then falling linearly to −1 at max_tokens and beyond.

    ``lengths``: trained tokens of the sample. ``buffer_tokens``: None takes a fifth of ``max_tokens``.

    Raises:
        ValueError: the buffer is longer than the limit.
    """
    buffer = max(1, int(max_tokens) // 5) if buffer_tokens is None else buffer_tokens
    if buffer > max_tokens:
        raise ValueError(f"buffer_tokens must be at most max_tokens ({max_tokens}), got {buffer}")
    return rewards + ((max_tokens - buffer - lengths) / buffer).clamp(-1.0, 0.0)


@SHAPING.register("mask_truncated", keeps_rewards=True)
def mask_truncated(rewards: torch.Tensor, truncated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers cut off by the length limit get weight 0; their rewards stay in the group's statistics."""
    return rewards, ~truncated


@SHAPING.register(
    "penalize_truncated", knobs={"penalty": KnobRule(low=0.0, meaning="Subtracted from the reward of truncated samples.")}
)
def penalize_truncated(rewards: torch.Tensor, truncated: torch.Tensor, *, penalty: float = 1.0) -> torch.Tensor:
    """r ← r − penalty for answers cut off by the length limit."""
    return rewards - penalty * truncated


def lagrangian(rewards: torch.Tensor, costs: torch.Tensor, multiplier: float) -> torch.Tensor:
    """J = (R − λ·C) / (1 + λ), the weighted mean of R and −C, so its size does not grow with λ. All ``[N]``."""
    return (rewards - multiplier * costs) / (1.0 + multiplier)


def next_multiplier(
    multiplier: float, cost: float, *, limit: float, step_size: float, low: float = 0.0, high: float
) -> float:
    """λ ← λ + η·(mean cost − limit), clipped to [low, high]: a projected gradient ascent step on the dual problem."""
    return min(high, max(low, multiplier + step_size * (cost - limit)))
