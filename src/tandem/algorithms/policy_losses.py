"""Token filters and policy losses. Losses are unreduced ``[T]``, and log-ratios are masked before `exp`.

In this order: losses with a ratio per token, ρ = exp(policy − proximal); losses that restrain the few tokens with large
advantage and large log-probability, which reduce the entropy most (arXiv:2505.22617); losses that use the log-probabilities
of the policy that sampled (`rollout`); losses with one ratio per trajectory, repeated at each of its tokens.

If a loss selects tokens, it does so once for the whole batch, from `proximal`, independent of the order of the tokens.
In formulas, sg[x] is x without gradient.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from tandem.algorithms.kl import MAX_LOG_RATIO, log_ratio, mean_by_sequence, sum_by
from tandem.algorithms.registry import POLICY_LOSSES, TOKEN_FILTERS, prepared_by
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule


def order(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Returns the indices that sort by descending score, equal scores by descending noise. All ``[K]``."""
    by_noise = torch.argsort(noise, descending=True, stable=True)
    return by_noise[torch.argsort(scores[by_noise], descending=True, stable=True)]


def largest(scores: torch.Tensor, among: torch.Tensor, count: int, noise: torch.Tensor) -> torch.Tensor:
    """Selects the ``count`` tokens with the largest score among those in ``among`` (``[T]`` bool); returns ``[T]`` bool."""
    candidates = among.nonzero().flatten()
    chosen = torch.zeros_like(among)
    chosen[candidates[order(scores[candidates], noise[candidates])[:count]]] = True
    return chosen


@TOKEN_FILTERS.register("none")
def keep_all(mask: torch.Tensor) -> torch.Tensor:
    """All trained tokens count."""
    return torch.ones_like(mask)


@TOKEN_FILTERS.register(
    "top_entropy",
    "2506.01939",
    knobs={"share": KnobRule(above=0.0, high=1.0, meaning="Part of the batch's trained tokens that is kept, rounded up.")},
)
def top_entropy(entropy: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor, *, share: float = 0.2) -> torch.Tensor:
    """The share `share` of the batch's tokens with the largest entropy before the update; the others get weight 0 and stay
    in the denominators."""
    return largest(entropy, mask, math.ceil(share * int(mask.sum()) - 1e-9), noise)


Result: TypeAlias = "tuple[torch.Tensor, dict[str, torch.Tensor]]"
TRUNCATION = 2.0
CLIP = {
    "clip_low": KnobRule(low=0.0, high=1.0, meaning="The ratio is clipped at 1 − clip_low from below."),
    "clip_high": KnobRule(low=0.0, meaning="The ratio is clipped at 1 + clip_high from above."),
}


def outside(ratio: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """1 where the ratio is outside the clipping range, else 0; ``[T]``."""
    return ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).float()


@POLICY_LOSSES.register(
    "ppo_clip",
    "1707.06347",
    "2503.14476",
    "1912.09729",
    "2505.07291",
    knobs={
        **CLIP,
        "dual_clip": KnobRule(
            above=1.0, also=(0.0,), meaning="Upper bound of the loss where A < 0, as a multiple of |A|; 0 is no bound."
        ),
        "two_sided": KnobRule(
            above=1.0, also=(0.0,), meaning="Upper bound of the ratio on the unclipped branch; 0 is no bound."
        ),
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
        ValueError: ``dual_clip`` or ``two_sided`` is neither 0 nor above 1.
    """
    for name, value in (("dual_clip", dual_clip), ("two_sided", two_sided)):
        if value and value <= 1:
            raise ValueError(f"{name} must be above 1, or 0 for off, got {value}")
    ratio = log_ratio(policy, proximal, mask).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    bounded = ratio.clamp(max=two_sided) if two_sided else ratio
    # minimum of the products with A, not of the ratios: a clip may remove an incentive, but never add one
    losses = -torch.minimum(bounded * advantages, clipped * advantages)
    # with A < 0 the loss is unbounded in ρ, so one stale token could dominate the batch
    if dual_clip:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    metrics = {"ratio": ratio.detach(), "clip_fraction": outside(ratio, clip_low, clip_high)}
    return losses.masked_fill(~mask, 0.0), metrics


@POLICY_LOSSES.register("reinforce", proportional=True)
def reinforce(policy: torch.Tensor, proximal: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Result:
    """L_t = −sg[min(ρ, 2)]·A·policy; ρ is 1 at the first optimizer step of a batch."""
    # detached: the ratio is a weight here, and the gradient flows only through `policy`
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

    Clipped tokens keep a gradient. ``clip_low=1`` means no lower bound.
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
    no_weight="its gate is already a trust region, and an importance weight would shift it",
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
            high=0.999,
            above=0.0,
            meaning="The log-probability is clipped to at most ln(1 + clip) above and ln(1 − clip) below the proximal one.",
        ),
        "drift": KnobRule(low=0.0, meaning="Weight of the pull back to the proximal policy."),
        "drift_cap": KnobRule(low=0.0, meaning="Largest ρ − 1 that the drift term uses."),
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


def covariance(proximal: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(A − mean A)·(proximal − mean proximal), means over the mask; 0 outside it; ``[T]``."""
    if not bool(mask.any()):
        return torch.zeros_like(proximal)
    centred = [(x - x[mask].mean()).masked_fill(~mask, 0.0) for x in (advantages.double(), proximal.double())]
    return (centred[0] * centred[1]).to(proximal.dtype)


def _count(share: float, mask: torch.Tensor) -> int:
    """Returns the number of tokens in a share of the mask, at least 1."""
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
    values = covariance(proximal, advantages, mask)
    return largest(noise, mask & (values > low) & (values < high), _count(share, mask), noise).float()


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
        "low": KnobRule(at_most="high", meaning="Tokens of a smaller covariance keep their loss."),
        "high": KnobRule(meaning="Tokens of a larger covariance keep their loss."),
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
    """The loss of ppo_clip, but 0 at random tokens: as many as `share` of all tokens (at least one), drawn from those whose
    covariance (A − mean A)·(proximal − mean proximal) is in (low, high). A drawn token that is clipped keeps its loss.

    A token is clipped, and has no gradient, if ρ is above the range and A > 0, or below it and A < 0.
    """
    losses, metrics = ppo_clip(policy, proximal, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    ratio = metrics["ratio"]
    clipped = torch.where(advantages > 0, ratio > 1 + clip_high, (advantages < 0) & (ratio < 1 - clip_low))
    dropped = (prepared > 0) & ~clipped
    return losses.masked_fill(dropped, 0.0), metrics | {"dropped": dropped.float()}


@POLICY_LOSSES.register(
    "kl_cov",
    "2505.22617",
    knobs={
        "share": KnobRule(above=0.0, high=1.0, meaning="Part of the tokens that get the penalty; at least one."),
        "coefficient": KnobRule(low=0.0, meaning="Weight of the penalty |log ρ|."),
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
    """L_t = −ρA, plus coefficient·|log ρ| at the share `share` of tokens with the largest covariance (A − mean A)·(proximal
    − mean proximal)."""
    logs = log_ratio(policy, proximal, mask)
    losses = -logs.exp() * advantages + coefficient * logs.abs() * prepared
    return losses.masked_fill(~mask, 0.0), {"ratio": logs.detach().exp(), "penalised": prepared}


LARGEST_RATIO = 20.0
TOTAL_VARIATION, BINARY_KL = 0.15, 0.05
"""Default thresholds of `dppo`."""


def within_second_moment(
    proximal: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    noise: torch.Tensor,
    *,
    threshold: float = 0.04,
) -> torch.Tensor:
    """1 for tokens that `m2po` keeps, 0 for tokens that it drops; ``[T]``.

    Candidates are tokens that an update would push further away from the sampler: A > 0 with proximal > rollout, or A < 0
    with proximal < rollout. The candidates with the largest (proximal − rollout)² are dropped until the mean of the square
    over the remaining candidates is at most ``threshold``; among equal squares, those with larger noise first.
    """
    d = log_ratio(proximal, rollout, mask)
    candidates = (mask & (advantages * d > 0)).nonzero().flatten()
    squares = d[candidates].double().square()
    ranked = order(squares, noise[candidates])  # the largest first
    tail = squares[ranked].flip(0).cumsum(0).flip(0)  # [i]: sum of the squares after i drops
    remaining = torch.arange(len(ranked), 0, -1, device=d.device)
    drops = int((tail / remaining > threshold).sum())  # the mean of the remaining squares falls with every drop
    kept = torch.ones_like(d)
    kept[candidates[ranked[:drops]]] = 0.0
    return kept


@POLICY_LOSSES.register(
    "m2po",
    "2510.01161",
    knobs={
        "threshold": KnobRule(low=0.0, meaning="Largest mean of (proximal − rollout)² over the candidates that are kept.")
    },
    no_weight="its ratio is already relative to the policy that sampled",
    corrects_itself=True,
    proportional=True,
)
@prepared_by(within_second_moment)
def m2po(
    policy: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, prepared: torch.Tensor
) -> Result:
    """L_t = −M_t·exp(policy − rollout)·A. Candidates: A > 0 and proximal > rollout, or A < 0 and proximal < rollout; M
    drops those with the largest (proximal − rollout)² until the mean square of the remaining ones is at most the threshold.

    M is `within_second_moment` of the whole batch. The ratio is relative to the sampler, so no further correction is
    applied. Dropped tokens stay in the denominators.
    """
    ratio = log_ratio(policy, rollout, mask).exp()
    losses = -prepared * ratio * advantages
    return losses.masked_fill(~mask, 0.0), {"ratio": ratio.detach(), "dropped": (prepared == 0).float()}


@POLICY_LOSSES.register(
    "dppo",
    "2602.04879",
    knobs={
        "divergence": KnobRule(choices=("tv", "kl"), meaning="Distance between the token's probabilities."),
        "threshold": KnobRule(
            above=0.0, meaning="Divergence above which tokens are dropped; unset takes 0.15 for tv, 0.05 for kl."
        ),
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

    With ``divergence=tv``, M drops tokens with A > 0 and p − q > threshold, and with A ≤ 0 and p − q < −threshold. With
    ``kl``, M drops tokens with A > 0 and p > q, or A ≤ 0 and p < q, if the KL(q ‖ p) of the two outcomes "this token" and
    "another token" is above the threshold. ``threshold``: None is 0.15 for tv and 0.05 for kl.

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
    """q ln(q/p) + (1 − q) ln((1 − q)/(1 − p)), with probabilities clamped away from 0 and 1; ``[T]``."""
    tiny = 1e-12
    q, p = q.clamp(tiny, 1 - tiny), p.clamp(tiny, 1 - tiny)
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()


MAX_LOG_SEQUENCE_RATIO = 10.0
SMALLEST_LOG_WEIGHT = -18.420680743952367
"""ln 1e-8."""


def _sequence_ratio(
    policy: torch.Tensor, proximal: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """exp(mean of log ρ over the trajectory's trained tokens), with the mean capped at 10; ``[T]``."""
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

    If all advantages of a trajectory are equal, the gradient is that of `gspo`.
    """
    # policy − sg[policy] is 0, so the factor is 1, and its gradient is that of this token's log-probability
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
    """L_t = T_i × the loss of gspo, so that `sequence_mean` does not favour short answers."""
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
    """L_i = −A·exp(mean_t c_t), c_t = min(log ρ_t, +clip) where A > 0, max(log ρ_t, −clip) where A < 0."""
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
    no_weight="its weight is already computed from the ratio to the policy that sampled",
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

    log W is clamped to [ln 1e-8, 20]. φ is 1 for samples of the current policy (W = 1) and reweights others, so no further
    correction is applied.
    """
    logs = sum_by(log_ratio(policy.detach(), rollout, mask), sequence).clamp(SMALLEST_LOG_WEIGHT, MAX_LOG_RATIO)
    positive = advantages >= 0
    power = torch.where(positive, power_positive, power_negative).to(logs.dtype)
    rate = torch.where(positive, rate_positive, rate_negative).to(logs.dtype)
    # in log space, because W^k alone would overflow although the product with e^(−λW) is small
    weight = (rate + power * logs - rate * logs.exp()).exp()
    losses = -weight * advantages * policy.masked_fill(~mask, 0.0)
    return losses.masked_fill(~mask, 0.0), {"ratio": logs.exp(), "weight": weight}
