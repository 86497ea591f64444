"""Changes to the reward of each sample before advantages are computed. All tensors ``[M]``."""

import torch

from tandem.algorithms.registry import SHAPING


@SHAPING.register("scale")
def scale(rewards: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
    """factor · r."""
    return rewards * factor


@SHAPING.register("bias")
def bias(rewards: torch.Tensor, *, offset: float = 0.0) -> torch.Tensor:
    """r + offset."""
    return rewards + offset


@SHAPING.register("clip")
def clip(rewards: torch.Tensor, *, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    """r, but at least low and at most high."""
    return rewards.clamp(low, high)


@SHAPING.register("overlong")
def overlong(
    rewards: torch.Tensor, lengths: torch.Tensor, *, max_tokens: int, buffer_tokens: int | None = None
) -> torch.Tensor:
    """Adds a penalty: 0 up to ``max_tokens − buffer_tokens``, falling to −1 at ``max_tokens`` and beyond (arXiv:2503.14476).

    ``lengths``: trained tokens of the sample. ``buffer_tokens``: None takes a fifth of ``max_tokens``.

    Raises:
        ValueError: the buffer is longer than the limit.
    """
    buffer = max(1, int(max_tokens) // 5) if buffer_tokens is None else buffer_tokens
    if buffer > max_tokens:
        raise ValueError(f"buffer_tokens must be at most max_tokens ({max_tokens}), got {buffer}")
    return rewards + ((max_tokens - buffer - lengths) / buffer).clamp(-1.0, 0.0)


@SHAPING.register("mask_truncated")
def mask_truncated(rewards: torch.Tensor, truncated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated samples get weight 0; their rewards stay in the group's statistics and their tokens in the denominators."""
    return rewards, ~truncated


@SHAPING.register("penalize_truncated")
def penalize_truncated(rewards: torch.Tensor, truncated: torch.Tensor, *, penalty: float = 1.0) -> torch.Tensor:
    """r − penalty where the sample was truncated."""
    return rewards - penalty * truncated
