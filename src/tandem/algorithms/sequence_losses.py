"""Policy losses with a ratio for each trajectory. All tensors ``[T]``: a trajectory's ratio stands at each of its tokens."""

from __future__ import annotations

from tandem.algorithms.policy_losses import CLIP, Result, outside
from tandem.algorithms.ratios import MAX_LOG_RATIO, log_ratio, mean_by_sequence, sum_by
from tandem.algorithms.registry import POLICY_LOSSES
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule

MAX_LOG_SEQUENCE_RATIO = 10.0
SMALLEST_LOG_WEIGHT = -18.420680743952367
"""ln 1e-8."""


def _sequence_ratio(
    policy: torch.Tensor, proximal: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """exp(mean over the trajectory's trained tokens of log ρ), the logarithm at most 10."""
    return mean_by_sequence(log_ratio(policy, proximal, mask), mask, sequence).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, clip_low: float, clip_high: float) -> Result:
    """−min(ratio·A, clip(ratio, 1 − clip_low, 1 + clip_high)·A), 0 outside the mask."""
    gains = advantages.masked_fill(~mask, 0.0)
    losses = -torch.minimum(ratio * gains, ratio.clamp(1 - clip_low, 1 + clip_high) * gains)
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio.detach(), "clip_fraction": outside(ratio, clip_low, clip_high)}


@POLICY_LOSSES.register("gspo", "2507.18071", knobs=CLIP, sequence_ratio=True, proportional=True)
def gspo(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Result:
    """L_t = −min(s_i·A, clip(s_i, 1 − clip_low, 1 + clip_high)·A), s_i = exp(mean of log ρ over the sequence)."""
    ratio = _sequence_ratio(policy, proximal, mask, sequence)
    return _clipped(ratio, advantages, mask, clip_low, clip_high)


@POLICY_LOSSES.register("gspo_token", "2507.18071", knobs=CLIP, sequence_ratio=True, proportional=True)
def gspo_token(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Result:
    """The loss of gspo with sg[s_i]·exp(policy − sg[policy]) for s_i, so that A may differ by token.

    For advantages that differ within a trajectory; with equal ones the gradient is that of `gspo`.
    """
    # policy − sg[policy] is 0, so the factor is 1 with gradient ∇policy: each token gets its own
    inside = policy.masked_fill(~mask, 0.0)
    ratio = _sequence_ratio(policy.detach(), proximal, mask, sequence) * (inside - inside.detach()).exp()
    return _clipped(ratio, advantages, mask, clip_low, clip_high)


@POLICY_LOSSES.register("luspo", "2602.05261", knobs=CLIP, sequence_ratio=True, proportional=True)
def luspo(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    sample_lengths: torch.Tensor,
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
) -> Result:
    """L_t = T_i × the loss of gspo, so that `sequence_mean` favours no short answers."""
    losses, metrics = gspo(policy, proximal, advantages, mask, sequence, clip_low=clip_low, clip_high=clip_high)
    return losses * sample_lengths, metrics


@POLICY_LOSSES.register(
    "gmpo",
    "2507.20673",
    knobs={"clip": KnobRule(above=0.0, meaning="Bound of each token's log-ratio, on the side that A pushes to.")},
    sequence_ratio=True,
    proportional=True,
)
def gmpo(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    clip: float = 0.4,
) -> Result:
    """L_i = −A·exp(mean_t c_t), c_t = min(log ρ_t, +clip) where A > 0, max(log ρ_t, −clip) where A < 0.

    c = min(log ρ, +clip) for A > 0, else max(log ρ, −clip).
    """
    gains = advantages.masked_fill(~mask, 0.0)
    logs = log_ratio(policy, proximal, mask)
    clipped = torch.where(gains > 0, logs.clamp(max=clip), logs.clamp(min=-clip))
    losses = -gains * mean_by_sequence(clipped, mask, sequence).exp()
    metrics = {"ratio": logs.detach().exp(), "clip_fraction": (clipped != logs).float()}
    return losses.masked_fill(~mask, 0.0), metrics


@POLICY_LOSSES.register(
    "vespo",
    "2602.10693",
    knobs={
        "power_positive": KnobRule(low=0.0, meaning="k where A ≥ 0."),
        "rate_positive": KnobRule(above=0.0, meaning="λ where A ≥ 0."),
        "power_negative": KnobRule(low=0.0, meaning="k where A < 0."),
        "rate_negative": KnobRule(above=0.0, meaning="λ where A < 0."),
    },
    no_weight="its weight is made from the ratio to the policy which sampled already",
    corrects_itself=True,
    proportional=True,
)
def vespo(
    policy: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    *,
    power_positive: float = 2.0,
    rate_positive: float = 3.0,
    power_negative: float = 3.0,
    rate_negative: float = 2.0,
) -> Result:
    """L_t = −sg[φ]·A·policy, φ = e^λ·W^k·e^(−λW), W = Π exp(policy − rollout) over the sequence; (k, λ) by the sign of A.

    W is the product of exp(policy − rollout) over the trajectory, its logarithm within [ln 1e-8, 20]: φ is 1 on policy and
    falls on both sides, so this corrects for the behaviour policy itself.
    """
    logs = sum_by(log_ratio(policy.detach(), rollout, mask), sequence).clamp(SMALLEST_LOG_WEIGHT, MAX_LOG_RATIO)
    positive = advantages >= 0
    power = torch.where(positive, power_positive, power_negative).to(logs.dtype)
    rate = torch.where(positive, rate_positive, rate_negative).to(logs.dtype)
    # in log space: W^k alone overflows long before e^(−λW) would bring the product back
    weight = (rate + power * logs - rate * logs.exp()).exp()
    losses = -weight * advantages * policy.masked_fill(~mask, 0.0)
    return losses.masked_fill(~mask, 0.0), {"ratio": logs.exp(), "weight": weight}
