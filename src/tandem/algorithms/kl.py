"""Distance to the reference policy, estimated at the sampled tokens; d = policy − reference, clamped to ±20.

In the loss the expected gradient of k1 is 0, and the configuration refuses it; the reward takes k1, of the proximal policy.
"""

import torch

from tandem.algorithms.ratios import log_ratio
from tandem.algorithms.registry import KL


@KL.register("k1")
def k1(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """d: unbiased, of high variance. All ``[T]``."""
    return log_ratio(policy, reference, mask)


@KL.register("k2")
def k2(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """d²/2: as a loss it has the gradient of the reverse KL. All ``[T]``."""
    return log_ratio(policy, reference, mask).square() / 2


@KL.register("k3")
def k3(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(−d) − 1 + d: unbiased and never negative. All ``[T]``."""
    d = log_ratio(policy, reference, mask)
    return torch.expm1(-d) + d


@KL.register("k3_plus")
def k3_plus(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The value of k3 with the gradient of k2. All ``[T]``."""
    second = k2(policy, reference, mask)
    return second - second.detach() + k3(policy, reference, mask).detach()
