"""Policy losses: per token, unreduced, masked before `exp`."""

import torch

from tandem.algorithms.ratios import log_ratio
from tandem.algorithms.registry import POLICY_LOSSES

TRUNCATION = 2.0


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """−min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high) A) (arXiv:1707.06347); ``clip_high > clip_low`` is DAPO's clip-higher.

    ``dual_clip`` > 1: the loss of a negative advantage is at most ``dual_clip``·|A| (arXiv:1912.09729); 0 is off.
    All tensors ``[T]``.

    Raises:
        ValueError: ``dual_clip`` is neither 0 nor above 1.
    """
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, or 0 for off, got {dual_clip}")
    ratio = log_ratio(policy, proximal, mask).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    metrics = {"ratio": ratio.detach(), "clip_fraction": (ratio != clipped).float()}
    return losses.masked_fill(~mask, 0.0), metrics


@POLICY_LOSSES.register("reinforce")
def reinforce(
    policy: torch.Tensor, proximal: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """−min(ρ, 2)·A·policy, the weight without gradient: 1 at the first optimizer step of a batch. All tensors ``[T]``."""
    ratio = log_ratio(policy.detach(), proximal, mask).exp()
    losses = -ratio.clamp(max=TRUNCATION) * advantages * policy.masked_fill(~mask, 0.0)
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio, "clip_fraction": (ratio > TRUNCATION).float()}
