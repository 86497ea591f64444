"""Distance to the reference policy, estimated at the sampled tokens; d = policy − reference, clamped to ±20.

In the loss, ``algorithm.kl.importance`` weights each token by ``ratio`` = exp(policy − sampler) (arXiv:2512.02556). k1 and
k3 differentiate the ratio, k2 and k3_plus do not; in expectation over the sampler, the gradient of each is then that of the
KL. Without the ratio the expected gradient of k1 is 0, so the configuration refuses k1 in the loss. A KL in the reward is k1
of the proximal policy.

Also helpers for masked log-ratios whose exponentials neither overflow nor bring NaN into a gradient.
"""

from __future__ import annotations

from tandem.algorithms.registry import KL
from tandem.api.lazy_torch import torch

MAX_LOG_RATIO = 20.0


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """numerator − denominator ``[T]``, 0 outside the mask, clamped to ±20.

    The mask is applied first, because an overflow that is multiplied by 0 afterwards still gives a NaN gradient.
    """
    return (numerator - denominator).masked_fill(~mask, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sum_by(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Replaces each value by the sum over all entries with the same index: ``[T]``, ``[T]`` → ``[T]``.

    Indices must be below T; they number sequences or samples with at least one token.
    """
    return values.new_zeros(len(index)).index_add(0, index, values)[index]


def mean_by_sequence(values: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Replaces each value by the mean over its sequence's tokens in the mask, ``[T]``; 0 if the sequence has none."""
    total = sum_by(values.masked_fill(~mask, 0.0), sequence)
    return total / sum_by(mask.to(values.dtype), sequence).clamp(min=1)


MOST_CHANGE = 0.2
"""Largest relative error of the KL that `adapt_coefficient` takes into account."""


@KL.register("k1")
def k1(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
    """d, unbiased and of high variance."""
    d = log_ratio(policy, reference, mask)
    return d if ratio is None else ratio * d


@KL.register("k2")
def k2(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
    """d²/2, whose gradient is that of the reverse KL."""
    value = log_ratio(policy, reference, mask).square() / 2
    return value if ratio is None else ratio.detach() * value


@KL.register("k3")
def k3(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
    """exp(−d) − 1 + d, unbiased and never negative."""
    d = log_ratio(policy, reference, mask)
    # expm1: near d = 0 the difference of exp(−d) and 1 would lose all digits of d²/2
    value = torch.expm1(-d) + d
    return value if ratio is None else ratio * value


@KL.register("k3_plus")
def k3_plus(
    policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """Value of k3, gradient of k2."""
    second = k2(policy, reference, mask)
    # the first two terms add up to 0, but have the gradient of k2
    value = second - second.detach() + k3(policy, reference, mask).detach()
    return value if ratio is None else ratio.detach() * value


def adapt_coefficient(coefficient: float, kl: float, target: float, num_samples: int, horizon: float) -> float:
    """Returns the coefficient after a batch: β(1 + clip(kl/target − 1, ±0.2)·n/horizon) (arXiv:1909.08593).

    ``kl``: the KL summed over a sample's tokens, mean over the batch's n = ``num_samples`` samples.
    """
    error = min(max(kl / target - 1, -MOST_CHANGE), MOST_CHANGE)
    return coefficient * (1 + error * num_samples / horizon)
