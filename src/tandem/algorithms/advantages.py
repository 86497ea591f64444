"""Advantages: how much better than expected."""

import torch

from tandem.algorithms.groups import group_statistics
from tandem.algorithms.registry import ADVANTAGES

EPSILON = 1e-6


@ADVANTAGES.register("grpo")
def grpo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """(r − mean) / (std + 1e-6) over the group, std unbiased (arXiv:2402.03300). All ``[M]``.

    Exactly 0 for all samples of a group whose rewards in statistics are all equal, and of a group of one.
    """
    group = group_statistics(rewards, group_id, in_statistics)
    advantages = (rewards.double() - group.mean) / (group.std + EPSILON)
    return advantages.masked_fill(~group.has_spread, 0.0).to(torch.float32)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """r − mean over the group (arXiv:2503.20783). All ``[M]``; 0 as in `grpo`."""
    group = group_statistics(rewards, group_id, in_statistics)
    return (rewards.double() - group.mean).masked_fill(~group.has_spread, 0.0).to(torch.float32)


@ADVANTAGES.register("rloo")
def rloo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """r − mean of the *others* in the group (arXiv:2402.14740). All ``[M]``; 0 as in `grpo`.

    A sample outside the statistics is compared with all that are in them.
    """
    group = group_statistics(rewards, group_id, in_statistics)
    values, own = rewards.double(), in_statistics.double()
    others = (group.total - values * own) / (group.members - own).clamp(min=1)
    return (values - others).masked_fill(~group.has_spread, 0.0).to(torch.float32)


@ADVANTAGES.register("reinforce")
def reinforce(token_rewards: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Return-to-go at γ = 1: everything earned from the token on, in its trajectory. All ``[T]``.

    A reward that falls on an untrained token so counts for the trained ones before it.
    """
    if not len(token_rewards):
        return token_rewards
    earned = token_rewards.double()
    until = earned.cumsum(0)  # over the whole batch, float64
    is_last = torch.ones_like(sequence, dtype=torch.bool)
    is_last[:-1] = sequence[1:] != sequence[:-1]
    ends = until[is_last][torch.unique_consecutive(sequence, return_inverse=True)[1]]
    return (ends - until + earned).to(torch.float32)
