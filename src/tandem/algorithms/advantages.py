"""Advantages of whole samples: how much better than expected. All tensors ``[M]``, one entry a sample.

Statistics are over the samples with ``in_statistics``; the others are judged by them. A group of one, and a group whose
rewards are all equal, gets exactly 0 from those that compare within the group.
"""

from collections.abc import Mapping

import torch

from tandem.algorithms.groups import GroupStatistics, group_statistics, group_sum
from tandem.algorithms.registry import ADVANTAGES
from tandem.algorithms.whitening import whiten

EPSILON = 1e-6
MOST_WEIGHT = 3.0
"""Cap of CPGD's weight for a batch with few groups that differ."""


def _centred(rewards: torch.Tensor, group: GroupStatistics) -> torch.Tensor:
    """r − mean over the group, 0 where it has no spread; float64."""
    return (rewards.double() - group.mean).masked_fill(~group.has_spread, 0.0)


@ADVANTAGES.register("grpo")
def grpo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """(r − mean) / (std + 1e-6) over the group, std unbiased (arXiv:2402.03300)."""
    group = group_statistics(rewards, group_id, in_statistics)
    return (_centred(rewards, group) / (group.std + EPSILON)).to(torch.float32)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """r − mean over the group (arXiv:2503.20783)."""
    return _centred(rewards, group_statistics(rewards, group_id, in_statistics)).to(torch.float32)


@ADVANTAGES.register("rloo")
def rloo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """r − mean of the *others* in the group (arXiv:2402.14740).

    A sample outside the statistics is compared with all that are in them.
    """
    group = group_statistics(rewards, group_id, in_statistics)
    values, own = rewards.double(), in_statistics.double()
    others = (group.total - values.masked_fill(~in_statistics, 0.0)) / (group.members - own).clamp(min=1)
    return (values - others).masked_fill(~group.has_spread, 0.0).to(torch.float32)


@ADVANTAGES.register("lite_ppo")
def lite_ppo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """(r − mean of the group) / std over the batch, of the rewards before they are centred (arXiv:2508.08221).

    0 for everybody where all rewards of the batch are equal.
    """
    inside = rewards[in_statistics].double()
    if len(inside) < 2 or bool(inside.max() == inside.min()):
        return torch.zeros_like(rewards, dtype=torch.float32)
    return (_centred(rewards, group_statistics(rewards, group_id, in_statistics)) / inside.std()).to(torch.float32)


@ADVANTAGES.register("reinforce_pp_baseline")
def reinforce_pp_baseline(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """r − mean over the group, then whitened over the samples of the batch (arXiv:2501.03262)."""
    group = group_statistics(rewards, group_id, in_statistics)
    return whiten(_centred(rewards, group), in_statistics).masked_fill(~group.has_spread, 0.0).to(torch.float32)


@ADVANTAGES.register("remax")
def remax(rewards: torch.Tensor, group_id: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """r − reward of the group's greedy sample, which itself gets 0 (arXiv:2310.10505).

    Raises:
        ValueError: a group has no greedy sample.
    """
    count = group_sum(greedy.double(), group_id)
    if bool((count == 0).any()):
        raise ValueError(
            f"group {int(group_id[count == 0][0])} has no greedy sample, which remax compares with; the workflow adds one "
            "with in_loss=false and greedy=true, or drops the prompt"
        )
    baseline = group_sum(rewards.double().masked_fill(~greedy, 0.0), group_id) / count
    return (rewards.double() - baseline).masked_fill(greedy, 0.0).to(torch.float32)


@ADVANTAGES.register("opo")
def opo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """r − Σ T·r / ΣT over the group: the baseline of least variance (arXiv:2505.23585). On-policy only."""
    group = group_statistics(rewards, group_id, in_statistics)
    weight = lengths.double() * in_statistics
    weighted = (rewards.double() * weight).masked_fill(~in_statistics, 0.0)
    baseline = group_sum(weighted, group_id) / group_sum(weight, group_id).clamp(min=1)
    return (rewards.double() - baseline).masked_fill(~group.has_spread, 0.0).to(torch.float32)


@ADVANTAGES.register("max_rl")
def max_rl(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """(r − mean) / mean over the group, 0 where the mean is not positive (arXiv:2602.02710)."""
    group = group_statistics(rewards, group_id, in_statistics)
    positive = group.mean > 0
    scaled = _centred(rewards, group) / group.mean.masked_fill(~positive, 1.0)
    return scaled.masked_fill(~positive, 0.0).to(torch.float32)


@ADVANTAGES.register("gdpo")
def gdpo(
    named_rewards: Mapping[str, torch.Tensor], group_id: torch.Tensor, in_statistics: torch.Tensor, *, weights: str = ""
) -> torch.Tensor:
    """Each named reward as a z-score in its group, their weighted sum, whitened over the samples (arXiv:2601.05242).

    ``weights``: ``correctness=1,format=0.5``; a name that is left out counts 1. A sample without a reward (NaN) has score 0
    in it and is not in its statistics. A group in which no reward differs stays 0.

    Raises:
        ValueError: there are no named rewards, or ``weights`` names another one or is not of that form.
    """
    factor = _weights(weights, named_rewards)
    total = torch.zeros(len(group_id), dtype=torch.float64, device=group_id.device)
    spread = torch.zeros(len(group_id), dtype=torch.bool, device=group_id.device)
    for name, values in named_rewards.items():
        known = in_statistics & ~values.isnan()
        group = group_statistics(values, group_id, known)
        scores = _centred(values, group) / (group.std + EPSILON)
        total += factor[name] * scores.masked_fill(values.isnan(), 0.0)
        spread |= group.has_spread
    return whiten(total, in_statistics).masked_fill(~spread, 0.0).to(torch.float32)


def _weights(text: str, names: Mapping[str, torch.Tensor]) -> dict[str, float]:
    if not names:
        raise ValueError("gdpo needs named rewards, and no sample has one; use a sum such as reward='math + format'")
    found = dict.fromkeys(names, 1.0)
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in found:
            raise ValueError(f"algorithm.advantage.weights names {name!r}; the rewards are {', '.join(names)}")
        found[name] = float(number)
    return found


@ADVANTAGES.register("cpgd")
def cpgd(
    rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor, *, weighting: str = "std"
) -> torch.Tensor:
    """ω·(r − mean over the group) (arXiv:2505.12504).

    ω is with ``weighting`` ``std`` 1/(std + 1e-6) of the group; with ``groups`` min(number of groups / number of groups that
    have spread, 3), 1 where none has; with ``none`` 1.

    Raises:
        ValueError: another ``weighting``.
    """
    group = group_statistics(rewards, group_id, in_statistics)
    centred = _centred(rewards, group)
    if weighting == "std":
        return (centred / (group.std + EPSILON)).to(torch.float32)
    if weighting == "groups":
        spread = len(torch.unique(group_id[group.has_spread]))
        factor = min(len(torch.unique(group_id)) / spread, MOST_WEIGHT) if spread else 1.0
        return (factor * centred).to(torch.float32)
    if weighting != "none":
        raise ValueError(f"weighting of cpgd must be std, groups or none, got {weighting!r}")
    return centred.to(torch.float32)
