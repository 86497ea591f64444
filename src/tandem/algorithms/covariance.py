"""Policy losses that hold back the few tokens which drive the entropy down: those where advantage and log-probability are
large together (arXiv:2505.22617). All tensors ``[T]``; the tokens are chosen once for the whole batch, from `proximal`."""

from __future__ import annotations

from tandem.algorithms.policy_losses import CLIP, Result, ppo_clip
from tandem.algorithms.ratios import log_ratio
from tandem.algorithms.registry import POLICY_LOSSES, prepared_by
from tandem.algorithms.selection import largest
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule


def covariance(proximal: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(A − mean A)·(proximal − mean proximal), means over the mask; 0 outside it."""
    if not bool(mask.any()):
        return torch.zeros_like(proximal)
    centred = [(x - x[mask].mean()).masked_fill(~mask, 0.0) for x in (advantages.double(), proximal.double())]
    return (centred[0] * centred[1]).to(proximal.dtype)


def _count(share: float, mask: torch.Tensor) -> int:
    """At least one."""
    return max(1, int(share * int(mask.sum())))


def random_high_covariance(
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    noise: torch.Tensor,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> torch.Tensor:
    """1 at a random ``share`` of the tokens, drawn from those with a covariance in (low, high); else 0."""
    found = covariance(proximal, advantages, mask)
    return largest(noise, mask & (found > low) & (found < high), _count(share, mask), noise).float()


def highest_covariance(
    proximal: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor, *, share: float = 2e-4
) -> torch.Tensor:
    """1 at the ``share`` of the tokens with the largest covariance; else 0."""
    return largest(covariance(proximal, advantages, mask), mask, _count(share, mask), noise).float()


@POLICY_LOSSES.register(
    "clip_cov",
    "2505.22617",
    knobs={
        **CLIP,
        "share": KnobRule(above=0.0, high=1.0, meaning="Part of the tokens whose loss is set to 0; at least one."),
        "low": KnobRule(at_most="high", meaning="Tokens of a smaller covariance are left alone."),
        "high": KnobRule(meaning="Tokens of a larger covariance are left alone."),
    },
    proportional=True,
)
@prepared_by(random_high_covariance)
def clip_cov(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    prepared: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Result:
    """The loss of ppo_clip, and 0 for a random part `share` of the tokens that are not clipped and have a covariance (A −
    mean A)·(proximal − mean proximal) in (low, high).

    Clipped is what has no gradient: ρ above the range where A > 0, below it where A < 0.
    """
    losses, metrics = ppo_clip(policy, proximal, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    ratio = metrics["ratio"]
    clipped = torch.where(advantages > 0, ratio > 1 + clip_high, (advantages < 0) & (ratio < 1 - clip_low))
    taken = (prepared > 0) & ~clipped
    return losses.masked_fill(taken, 0.0), metrics | {"dropped": taken.float()}


@POLICY_LOSSES.register(
    "kl_cov",
    "2505.22617",
    knobs={
        "share": KnobRule(above=0.0, high=1.0, meaning="Part of the tokens that are held back; at least one."),
        "coefficient": KnobRule(low=0.0, meaning="Weight of |log ρ| there."),
    },
)
@prepared_by(highest_covariance)
def kl_cov(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    prepared: torch.Tensor,
    *,
    coefficient: float = 1.0,
) -> Result:
    """L_t = −ρA, plus coefficient·|log ρ| at the part `share` of largest such covariance."""
    logs = log_ratio(policy, proximal, mask)
    losses = -logs.exp() * advantages + coefficient * logs.abs() * prepared
    return losses.masked_fill(~mask, 0.0), {"ratio": logs.detach().exp(), "penalised": prepared}
