"""Whitening of finished advantages, whatever made them."""

import torch
from tensordict import TensorDict

from tandem.algorithms.whitening import whiten, whiten_within
from tandem.api.batch import per_token


def whitened(batch: TensorDict, advantages: torch.Tensor, mask: torch.Tensor, within: str) -> torch.Tensor:
    """Advantages ``[T]`` as `algorithm.whitening` says: ``none`` gives them back, ``group`` and ``batch`` bring them to mean
    0 and variance 1 there, over the trained tokens (``mask [T]``) of samples that enter statistics."""
    if within == "none":
        return advantages
    counted = mask & per_token(batch, batch["in_statistics"])
    if within == "group":
        found = whiten_within(advantages, counted, per_token(batch, batch["group_id"]))
    else:
        found = whiten(advantages, counted)
    return found.masked_fill(~mask, 0.0).to(torch.float32)
