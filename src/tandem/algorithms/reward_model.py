"""Losses of reward models: pairs that were ranked, steps that were judged."""

from __future__ import annotations

from tandem.api.lazy_torch import torch


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor) -> torch.Tensor:
    """−log σ(r_chosen − r_rejected − margin): the better side's score should be higher by the margin. All ``[P]``.

    Bradley and Terry's model of comparisons (arXiv:2203.02155), its margin as in arXiv:2307.09288.
    """
    return -torch.nn.functional.logsigmoid(chosen - rejected - margin)


def safety_cost(
    safer: torch.Tensor, other: torch.Tensor, safer_is_safe: torch.Tensor, other_is_safe: torch.Tensor
) -> torch.Tensor:
    """−log σ(C_other − C_safer) − log σ(s_safer·C_safer) − log σ(s_other·C_other), s = −1 where safe, else 1; all ``[P]``.

    The cost model of Safe RLHF (arXiv:2310.12773): the less safe side costs more, and what is unsafe costs more than 0.
    """
    logsigmoid = torch.nn.functional.logsigmoid
    signed = [torch.where(is_safe, -cost, cost) for cost, is_safe in ((safer, safer_is_safe), (other, other_is_safe))]
    return -logsigmoid(other - safer) - logsigmoid(signed[0]) - logsigmoid(signed[1])


def step_cross_entropy(scores: torch.Tensor, right: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """−log σ(±score) at the end of each judged step, 0 elsewhere (arXiv:2305.20050). All ``[T]``; ``right`` is bool."""
    target = right.to(scores.dtype)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(scores.masked_fill(~mask, 0.0), target, reduction="none")
    return losses.masked_fill(~mask, 0.0)
