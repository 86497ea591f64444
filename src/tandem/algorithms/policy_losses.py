"""Policy losses with a ratio for each token, ρ = exp(policy − proximal): unreduced, masked before `exp`, all ``[T]``."""

from __future__ import annotations

import math
from typing import TypeAlias

from tandem.algorithms.ratios import log_ratio
from tandem.algorithms.registry import POLICY_LOSSES
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule

Result: TypeAlias = "tuple[torch.Tensor, dict[str, torch.Tensor]]"
TRUNCATION = 2.0
CLIP = {
    "clip_low": KnobRule(low=0.0, high=1.0, meaning="The ratio is clipped at 1 − clip_low from below."),
    "clip_high": KnobRule(low=0.0, meaning="The ratio is clipped at 1 + clip_high from above."),
}


def outside(ratio: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """1 where the ratio left the clipping range, else 0."""
    return ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).float()


@POLICY_LOSSES.register(
    "ppo_clip",
    "1707.06347",
    "2503.14476",
    "1912.09729",
    "2505.07291",
    knobs={
        **CLIP,
        "dual_clip": KnobRule(above=1.0, also=(0.0,), meaning="Cap of the loss where A < 0, in |A|; 0 is off."),
        "two_sided": KnobRule(above=1.0, also=(0.0,), meaning="Cap of the ratio on the unclipped branch; 0 is off."),
    },
    proportional=True,
)
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
    """L_t = −min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high)·A); with dual_clip = c > 1, where A < 0, at most c·|A|; with
    two_sided = δ, min(ρ, δ) on the unclipped branch.

    ``clip_high > clip_low`` is DAPO's clip-higher.

    Raises:
        ValueError: one of them is neither 0 nor above 1.
    """
    for name, value in (("dual_clip", dual_clip), ("two_sided", two_sided)):
        if value and value <= 1:
            raise ValueError(f"{name} must be above 1, or 0 for off, got {value}")
    ratio = log_ratio(policy, proximal, mask).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    bounded = ratio.clamp(max=two_sided) if two_sided else ratio
    # the pessimistic branch: a clip may only remove an incentive, so the minimum is taken after the sign of A
    losses = -torch.minimum(bounded * advantages, clipped * advantages)
    # with A < 0 the loss grows without bound in ρ, and one stale token could dominate the batch
    if dual_clip:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    metrics = {"ratio": ratio.detach(), "clip_fraction": outside(ratio, clip_low, clip_high)}
    return losses.masked_fill(~mask, 0.0), metrics


@POLICY_LOSSES.register("reinforce", proportional=True)
def reinforce(policy: torch.Tensor, proximal: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Result:
    """L_t = −A·policy; from the second optimizer step of a batch on × sg[min(ρ, 2)]."""
    # detached: the ratio is a weight here, and the gradient flows through `policy` alone
    ratio = log_ratio(policy.detach(), proximal, mask).exp()
    losses = -ratio.clamp(max=TRUNCATION) * advantages * policy.masked_fill(~mask, 0.0)
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio, "clip_fraction": (ratio > TRUNCATION).float()}


@POLICY_LOSSES.register("cispo", "2506.13585", knobs=CLIP, proportional=True)
def cispo(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Result:
    """L_t = −sg[clip(ρ, 1 − clip_low, 1 + clip_high)]·A·policy.

    No token's gradient is lost. ``clip_low=1`` is off.
    """
    ratio = log_ratio(policy.detach(), proximal, mask).exp()
    losses = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * policy.masked_fill(~mask, 0.0)
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio, "clip_fraction": outside(ratio, clip_low, clip_high)}


@POLICY_LOSSES.register(
    "sapo",
    "2511.20347",
    knobs={
        "tau_positive": KnobRule(above=0.0, meaning="Sharpness of the gate where A > 0."),
        "tau_negative": KnobRule(above=0.0, meaning="Sharpness of the gate elsewhere."),
    },
    no_weight="its gate is a trust region of its own, which a weight in front of it would move",
    proportional=True,
)
def sapo(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Result:
    """L_t = −(4/τ)·σ(τ(ρ − 1))·A, τ = tau_positive where A > 0, else tau_negative; the gradient at ρ = 1 is −A.

    A soft gate in place of a clip.
    """
    ratio = log_ratio(policy, proximal, mask).exp()
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
    # 4/τ makes the gradient at ρ = 1 equal to −A, because σ' = 1/4 there
    losses = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio.detach()}


@POLICY_LOSSES.register(
    "cpgd",
    "2505.12504",
    knobs={
        "clip": KnobRule(
            high=0.999, above=0.0, meaning="The log-probability is clipped at ln(1 ± clip) off the proximal one."
        ),
        "drift": KnobRule(low=0.0, meaning="Weight of the pull back to the proximal policy."),
        "drift_cap": KnobRule(low=0.0, meaning="Largest ρ − 1 in that pull."),
    },
)
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
    """L_t = −A·min(policy, proximal + ln(1 + clip)) where A > 0, −A·max(policy, proximal + ln(1 − clip)) where A < 0;
    plus drift·sg[min(ρ − 1, drift_cap)]·policy.

    The log-probability is clipped, not the ratio, and the drift pulls it back to the proximal policy.
    """
    # masked first: NaN or −inf at an untrained token would survive a product with 0 in the backward pass
    inside = policy.masked_fill(~mask, 0.0)
    anchor = proximal.masked_fill(~mask, 0.0)
    clipped = torch.where(
        advantages > 0,
        torch.minimum(inside, anchor + math.log(1 + clip)),
        torch.maximum(inside, anchor + math.log(1 - clip)),
    )
    ratio = log_ratio(policy.detach(), proximal, mask).exp()
    # ρ − 1 is detached, so the drift is a force on the log-probability that vanishes at ρ = 1
    losses = -advantages * clipped + drift * (ratio - 1).clamp(max=drift_cap) * inside
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio, "clip_fraction": outside(ratio, clip, clip)}
