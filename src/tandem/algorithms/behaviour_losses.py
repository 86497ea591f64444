"""Policy losses that look at the policy which sampled: `rollout` log-probabilities. All tensors ``[T]``."""

from __future__ import annotations

from tandem.algorithms.policy_losses import Result
from tandem.algorithms.ratios import log_ratio
from tandem.algorithms.registry import POLICY_LOSSES, prepared_by
from tandem.algorithms.selection import order
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule

LARGEST_RATIO = 20.0
TOTAL_VARIATION, BINARY_KL = 0.15, 0.05
"""Thresholds of `dppo` where none is set."""


def within_second_moment(
    proximal: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    noise: torch.Tensor,
    *,
    threshold: float = 0.04,
) -> torch.Tensor:
    """Tokens that `m2po` keeps: 1, and 0 where the token is dropped.

    Candidates are tokens that an update would push further away from the sampler: A > 0 with proximal > rollout, or A < 0
    with proximal < rollout. Those with the largest (proximal − rollout)² are dropped until its mean over the remaining
    candidates is at most ``threshold``; of equal ones the one of larger noise first.
    """
    d = log_ratio(proximal, rollout, mask)
    candidates = (mask & (advantages * d > 0)).nonzero().flatten()
    squares = d[candidates].double().square()
    ranked = order(squares, noise[candidates])  # the largest first
    tail = squares[ranked].flip(0).cumsum(0).flip(0)  # what is left when those before are dropped
    remaining = torch.arange(len(ranked), 0, -1, device=d.device)
    drops = int((tail / remaining > threshold).sum())  # the mean over what remains falls with every drop
    kept = torch.ones_like(d)
    kept[candidates[ranked[:drops]]] = 0.0
    return kept


@POLICY_LOSSES.register(
    "m2po",
    "2510.01161",
    knobs={
        "threshold": KnobRule(low=0.0, meaning="Largest mean of (proximal − rollout)² over the candidates that are kept.")
    },
    no_weight="its ratio is that to the policy which sampled already",
    corrects_itself=True,
    proportional=True,
)
@prepared_by(within_second_moment)
def m2po(
    policy: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, prepared: torch.Tensor
) -> Result:
    """L_t = −M_t·exp(policy − rollout)·A. Candidates: A > 0 and proximal > rollout, or A < 0 and proximal < rollout; M
    drops those of the largest (proximal − rollout)² until its mean over the remaining ones is at most the threshold.

    M is `within_second_moment` of the whole batch. The ratio is that to the sampler, so no further correction is applied.
    Dropped tokens stay in the denominators.
    """
    ratio = log_ratio(policy, rollout, mask).exp()
    losses = -prepared * ratio * advantages
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio.detach(), "dropped": (prepared == 0).float()}


@POLICY_LOSSES.register(
    "dppo",
    "2602.04879",
    knobs={
        "divergence": KnobRule(choices=("tv", "kl"), meaning="Distance between the token's probabilities."),
        "threshold": KnobRule(above=0.0, meaning="Tokens further away are dropped; unset takes 0.15 for tv, 0.05 for kl."),
    },
    proportional=True,
)
def dppo(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    divergence: str = "tv",
    threshold: float | None = None,
) -> Result:
    """L_t = −A·sg[min(ρ, 20)]·policy·M_t; with p = exp(policy), q = exp(rollout), M drops tokens that A pushes further
    away from q where |p − q| (tv) or the binary KL(q ‖ p) (kl) exceeds the threshold already.

    M drops a token whose probability an update would move further from the sampler's than allowed: A > 0 and
    p_policy − p_rollout > threshold, or A ≤ 0 and p_policy − p_rollout < −threshold (``divergence=tv``); with ``kl`` the
    KL(rollout ‖ policy) of "this token or another" above the threshold, in the same direction. ``threshold``: None is 0.15
    for tv and 0.05 for kl.

    Raises:
        ValueError: another ``divergence``.
    """
    if divergence not in ("tv", "kl"):
        raise ValueError(f"divergence of dppo must be tv or kl, got {divergence!r}")
    p, q = (x.detach().masked_fill(~mask, 0.0).exp() for x in (policy, rollout))
    if divergence == "tv":
        distance = (p - q).abs()
    else:
        distance = _binary_kl(q.double(), p.double()).to(p.dtype)
    limit = threshold if threshold is not None else (TOTAL_VARIATION if divergence == "tv" else BINARY_KL)
    away = torch.where(advantages > 0, p > q, p < q)
    kept = ~(away & (distance > limit))
    ratio = log_ratio(policy.detach(), proximal, mask).exp()
    losses = -ratio.clamp(max=LARGEST_RATIO) * advantages * policy.masked_fill(~mask, 0.0)
    return losses.masked_fill(~(mask & kept), 0.0), {"ratio": ratio, "dropped": (~kept).float()}


def _binary_kl(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """q ln(q/p) + (1 − q) ln((1 − q)/(1 − p)), of probabilities kept away from 0 and 1."""
    tiny = 1e-12
    q, p = q.clamp(tiny, 1 - tiny), p.clamp(tiny, 1 - tiny)
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
