"""Policy losses with a ratio for each token, ρ = exp(policy − proximal): unreduced, masked before `exp`, all ``[T]``."""

import math

import torch

from tandem.algorithms.ratios import log_ratio
from tandem.algorithms.registry import POLICY_LOSSES

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]
TRUNCATION = 2.0


def outside(ratio: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """1 where the ratio left the clipping range, else 0."""
    return ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).float()


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
    two_sided: float = 0.0,
) -> Result:
    """−min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high) A) (arXiv:1707.06347); ``clip_high > clip_low`` is DAPO's clip-higher.

    ``dual_clip`` > 1: the loss of a negative advantage is at most ``dual_clip``·|A| (arXiv:1912.09729). ``two_sided`` > 1:
    min(ρ, two_sided) on the unclipped branch (arXiv:2505.07291). 0 is off for both.

    Raises:
        ValueError: one of them is neither 0 nor above 1.
    """
    for name, value in (("dual_clip", dual_clip), ("two_sided", two_sided)):
        if value and value <= 1:
            raise ValueError(f"{name} must be above 1, or 0 for off, got {value}")
    ratio = log_ratio(policy, proximal, mask).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    bounded = ratio.clamp(max=two_sided) if two_sided else ratio
    losses = -torch.minimum(bounded * advantages, clipped * advantages)
    if dual_clip:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    metrics = {"ratio": ratio.detach(), "clip_fraction": outside(ratio, clip_low, clip_high)}
    return losses.masked_fill(~mask, 0.0), metrics


@POLICY_LOSSES.register("reinforce")
def reinforce(policy: torch.Tensor, proximal: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Result:
    """−min(ρ, 2)·A·policy, the weight without gradient: 1 at the first optimizer step of a batch."""
    ratio = log_ratio(policy.detach(), proximal, mask).exp()
    losses = -ratio.clamp(max=TRUNCATION) * advantages * policy.masked_fill(~mask, 0.0)
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio, "clip_fraction": (ratio > TRUNCATION).float()}


@POLICY_LOSSES.register("cispo")
def cispo(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Result:
    """−clip(ρ, 1 − clip_low, 1 + clip_high)·A·policy, the weight without gradient (arXiv:2506.13585).

    No token's gradient is lost. ``clip_low=1`` is off.
    """
    ratio = log_ratio(policy.detach(), proximal, mask).exp()
    losses = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * policy.masked_fill(~mask, 0.0)
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio, "clip_fraction": outside(ratio, clip_low, clip_high)}


@POLICY_LOSSES.register("sapo")
def sapo(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Result:
    """−(4/τ)·σ(τ(ρ − 1))·A, a soft gate in place of a clip (arXiv:2511.20347); the gradient at ρ = 1 is −A.

    τ is ``tau_positive`` for A > 0, else ``tau_negative``.
    """
    ratio = log_ratio(policy, proximal, mask).exp()
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
    losses = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio.detach()}


@POLICY_LOSSES.register("cpgd")
def cpgd(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float = 0.2,
    drift: float = 1e-3,
    drift_cap: float = 2.0,
) -> Result:
    """Policy gradient clipped in log-probability, and a pull back to the proximal policy (arXiv:2505.12504).

    −A·min(policy, proximal + ln(1 + clip)) for A > 0, −A·max(policy, proximal + ln(1 − clip)) otherwise, plus
    drift·min(ρ − 1, drift_cap)·policy, the factor without gradient.
    """
    inside = policy.masked_fill(~mask, 0.0)
    anchor = proximal.masked_fill(~mask, 0.0)
    clipped = torch.where(
        advantages > 0,
        torch.minimum(inside, anchor + math.log(1 + clip)),
        torch.maximum(inside, anchor + math.log(1 - clip)),
    )
    ratio = log_ratio(policy.detach(), proximal, mask).exp()
    losses = -advantages * clipped + drift * (ratio - 1).clamp(max=drift_cap) * inside
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio, "clip_fraction": outside(ratio, clip, clip)}
