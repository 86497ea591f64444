"""From a loss per token to one number: a weight for each token of the batch that an optimizer step is given.

``mask [T]`` holds the tokens that count in denominators; one that is dropped later gets weight 0, and no other changes.
``sample [T]`` numbers the sample of each token, from 0: one that was held in several trajectories counts once.
"""

import torch

from tandem.algorithms.ratios import sum_by
from tandem.algorithms.registry import AGGREGATIONS


def _num_samples(mask: torch.Tensor, sample: torch.Tensor) -> int:
    """N: samples with at least one token that counts."""
    return max(1, len(torch.unique(sample[mask])))


@AGGREGATIONS.register("token_mean")
def token_mean(mask: torch.Tensor) -> torch.Tensor:
    """1 / ΣT: every token the same. ``[T]``."""
    return mask.float() / max(1, int(mask.sum()))


@AGGREGATIONS.register("sequence_mean")
def sequence_mean(mask: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """1 / (N·T_i): every sample the same, over all its trajectories. ``[T]``."""
    length = sum_by(mask.float(), sample).clamp(min=1)
    return mask / (_num_samples(mask, sample) * length)


@AGGREGATIONS.register("sequence_sum")
def sequence_sum(mask: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """1 / N: long samples count more; the weights do not sum to 1. ``[T]``."""
    return mask.float() / _num_samples(mask, sample)


@AGGREGATIONS.register("constant")
def constant(mask: torch.Tensor, sample: torch.Tensor, *, max_tokens: int) -> torch.Tensor:
    """1 / (N·max_tokens): `sequence_sum` on the scale of a mean (arXiv:2503.20783). ``[T]``."""
    return mask.float() / (_num_samples(mask, sample) * max_tokens)
