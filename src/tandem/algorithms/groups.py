"""Statistics of the samples of each prompt, which are found by their group's number and never by position."""

from __future__ import annotations

from typing import NamedTuple

from tandem.api.lazy_torch import torch


class GroupStatistics(NamedTuple):
    """Statistics of each sample's group, given to the sample: all ``[M]``, floats in float64."""

    members: torch.Tensor
    """Number of members that enter statistics."""

    total: torch.Tensor
    mean: torch.Tensor
    """0 where nobody enters statistics."""

    std: torch.Tensor
    """Unbiased; 0 for fewer than two members."""

    has_spread: torch.Tensor
    """bool: at least two members, and not all rewards are equal (max ≠ min: seven float32 rewards of 0.7 have a std ≠ 0)."""


def group_statistics(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> GroupStatistics:
    """Over the members with ``in_statistics``, however many there are; others may hold anything. All arguments ``[M]``."""
    values = rewards.double().masked_fill(~in_statistics, 0.0)
    ids, index = torch.unique(group_id, return_inverse=True)
    member = in_statistics.double()

    def summed(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(len(ids)).index_add(0, index, x)

    count, total = summed(member), summed(values)
    mean = total / count.clamp(min=1)
    squares = summed((values - mean[index]).square() * member)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    infinity = values.new_full((len(ids),), float("inf"))
    highest = (-infinity).scatter_reduce(0, index, values.masked_fill(~in_statistics, float("-inf")), "amax")
    lowest = infinity.scatter_reduce(0, index, values.masked_fill(~in_statistics, float("inf")), "amin")
    has_spread = highest > lowest  # false for one member; -inf > inf is false for none
    return GroupStatistics(count[index], total[index], mean[index], std[index], has_spread[index])


def group_sum(values: torch.Tensor, group_id: torch.Tensor) -> torch.Tensor:
    """Sum over each group, given to its samples: ``[M]``, ``[M]`` → ``[M]``."""
    ids, index = torch.unique(group_id, return_inverse=True)
    return values.new_zeros(len(ids)).index_add(0, index, values)[index]
