"""Exponentials that neither overflow nor leak NaN into a gradient."""

from __future__ import annotations

from tandem.api.lazy_torch import torch

MAX_LOG_RATIO = 20.0


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """numerator − denominator ``[T]``, 0 outside the mask, clamped to ±20.

    Masked before anything is computed of it: an overflow multiplied by 0 afterwards would still give a NaN gradient.
    """
    return (numerator - denominator).masked_fill(~mask, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sum_by(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Sum over all entries with the same index, given back to each of them: ``[T]``, ``[T]`` → ``[T]``.

    Indices are below T: they number sequences or samples that have tokens.
    """
    return values.new_zeros(len(index)).index_add(0, index, values)[index]


def mean_by_sequence(values: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Mean over the masked tokens of each sequence, given to each token ``[T]``; 0 where a sequence has none."""
    total = sum_by(values.masked_fill(~mask, 0.0), sequence)
    return total / sum_by(mask.to(values.dtype), sequence).clamp(min=1)
