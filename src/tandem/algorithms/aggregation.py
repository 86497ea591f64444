"""From a loss per token to one number: a weight for each token of the batch that an optimizer step is given.

``mask [T]`` holds the tokens that count in denominators; one that is dropped later gets weight 0, and no other changes.
``sample [T]`` numbers the sample of each token, from 0: one that was held in several trajectories counts once.
"""

from __future__ import annotations

from tandem.algorithms.ratios import sum_by
from tandem.algorithms.registry import AGGREGATIONS
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule


def _num_samples(mask: torch.Tensor, sample: torch.Tensor) -> int:
    """N: samples with at least one token that counts."""
    return max(1, len(torch.unique(sample[mask])))


@AGGREGATIONS.register("token_mean", "2503.14476")
def token_mean(mask: torch.Tensor) -> torch.Tensor:
    """Σ over tokens of L_t / ΣT: every token counts the same."""
    return mask.float() / max(1, int(mask.sum()))


@AGGREGATIONS.register("sequence_mean", "2402.03300")
def sequence_mean(mask: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Σ L_t / (N·T_i): every sample counts the same."""
    length = sum_by(mask.float(), sample).clamp(min=1)
    return mask / (_num_samples(mask, sample) * length)


@AGGREGATIONS.register("sequence_sum")
def sequence_sum(mask: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Σ L_t / N: long samples count more, and the weights do not sum to 1."""
    return mask.float() / _num_samples(mask, sample)


@AGGREGATIONS.register(
    "constant",
    "2503.20783",
    knobs={"max_tokens": KnobRule(low=1, integer=True, meaning="Divisor; unset takes gconfig.max_new_tokens.")},
)
def constant(mask: torch.Tensor, sample: torch.Tensor, *, max_tokens: int) -> torch.Tensor:
    """Σ L_t / (N·max_tokens), max_tokens the longest answer allowed: `sequence_sum` on the scale of a mean."""
    return mask.float() / (_num_samples(mask, sample) * max_tokens)
