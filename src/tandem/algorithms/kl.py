"""Distance to the reference policy, estimated at the sampled tokens; d = policy − reference, clamped to ±20.

In the loss, tokens that another policy sampled are weighted by ``ratio`` = exp(policy − sampler) where that is asked for
(arXiv:2512.02556): k1 and k3 differentiate it, k2 and k3_plus do not, so that in expectation over the sampler the gradient
of each is that of the KL. Without the ratio the expected gradient of k1 is 0, and the configuration refuses it; the reward
takes k1, of the proximal policy.
"""

from __future__ import annotations

from tandem.algorithms.ratios import log_ratio
from tandem.algorithms.registry import KL
from tandem.api.lazy_torch import torch

MOST_CHANGE = 0.2
"""Bound of the relative error that `adapt_coefficient` reacts to."""


@KL.register("k1")
def k1(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
    """d, unbiased and of high variance."""
    d = log_ratio(policy, reference, mask)
    return d if ratio is None else ratio * d


@KL.register("k2")
def k2(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
    """d²/2, whose gradient is that of the reverse KL."""
    found = log_ratio(policy, reference, mask).square() / 2
    return found if ratio is None else ratio.detach() * found


@KL.register("k3")
def k3(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
    """exp(−d) − 1 + d, unbiased and never negative."""
    d = log_ratio(policy, reference, mask)
    # expm1: near d = 0 the difference of exp(−d) and 1 would lose all digits of d²/2
    found = torch.expm1(-d) + d
    return found if ratio is None else ratio * found


@KL.register("k3_plus")
def k3_plus(
    policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """Value of k3, gradient of k2."""
    second = k2(policy, reference, mask)
    # the value of one, the gradient of the other: the first two terms cancel in value only
    found = second - second.detach() + k3(policy, reference, mask).detach()
    return found if ratio is None else ratio.detach() * found


def adapt_coefficient(coefficient: float, kl: float, target: float, num_samples: int, horizon: float) -> float:
    """The coefficient after a batch: β(1 + clip(kl/target − 1, ±0.2)·n/horizon) (arXiv:1909.08593).

    ``kl``: mean over the batch's samples of the KL summed over their tokens.
    """
    error = min(max(kl / target - 1, -MOST_CHANGE), MOST_CHANGE)
    return coefficient * (1 + error * num_samples / horizon)
