"""Changes to the reward of each sample before advantages are computed. All tensors ``[M]``."""

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
            low=1, integer=True, meaning="Length of the full penalty; unset takes gconfig.max_new_tokens."
        ),
        "buffer_tokens": KnobRule(
            low=1,
            integer=True,
            at_most="max_tokens",
            meaning="The penalty grows over so many tokens before; unset takes a fifth of max_tokens.",
        ),
    },
)
def overlong(
    rewards: torch.Tensor, lengths: torch.Tensor, *, max_tokens: int, buffer_tokens: int | None = None
) -> torch.Tensor:
    """r ← r + 0 up to max_tokens − buffer_tokens, then falling in a line to −1 at max_tokens and beyond.

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
    """Answers cut by their length get weight 0; their rewards stay in the group's statistics."""
    return rewards, ~truncated


@SHAPING.register(
    "penalize_truncated", knobs={"penalty": KnobRule(low=0.0, meaning="Subtracted from the reward of truncated samples.")}
)
def penalize_truncated(rewards: torch.Tensor, truncated: torch.Tensor, *, penalty: float = 1.0) -> torch.Tensor:
    """r ← r − penalty for answers cut by their length."""
    return rewards - penalty * truncated
