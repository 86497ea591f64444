"""Supervised fine-tuning, and distillation: learning from what another one wrote, or would have written."""

from __future__ import annotations

from tandem.api.lazy_torch import torch


def negative_log_likelihood(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """−log p of each trained token ``[T]``, 0 elsewhere."""
    return -logprobs.masked_fill(~mask, 0.0)


def distillation_advantages(teacher: torch.Tensor, policy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """sg[teacher − policy] at each sampled token ``[T]``, 0 elsewhere (arXiv:2306.13649).

    As the advantage of tokens that the policy sampled itself it has the gradient of −KL(policy ‖ teacher), token by token:
    no return-to-go and no statistics over a group.
    """
    return (teacher - policy).masked_fill(~mask, 0.0).detach()
