"""Supervised fine-tuning."""

import torch


def negative_log_likelihood(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """−log p of each trained token ``[T]``, 0 elsewhere."""
    return -logprobs.masked_fill(~mask, 0.0)
