"""Advantages of whole samples: how much better than expected. All tensors ``[M]``, one entry a sample.

Statistics are over the samples with ``in_statistics``; the others are judged by them. A group of one, and a group whose
rewards are all equal, gets exactly 0 from those that compare within the group.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.algorithms.groups import GroupStatistics, group_statistics, group_sum
from tandem.algorithms.registry import ADVANTAGES
from tandem.algorithms.whitening import whiten
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule

EPSILON = 1e-6
MOST_WEIGHT = 3.0
"""Cap of CPGD's weight for a batch with few groups that differ."""


def _centred(rewards: torch.Tensor, group: GroupStatistics) -> torch.Tensor:
    """r − mean over the group, 0 where it has no spread; float64."""
    return (rewards.double() - group.mean).masked_fill(~group.has_spread, 0.0)


@ADVANTAGES.register("grpo", "2402.03300")
def grpo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """A_i = (r_i − mean_g r) / (std_g r + 1e-6), std unbiased; 0 where all rewards of g are equal."""
    group = group_statistics(rewards, group_id, in_statistics)
    return (_centred(rewards, group) / (group.std + EPSILON)).to(torch.float32)


@ADVANTAGES.register("dr_grpo", "2503.20783")
def dr_grpo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """A_i = r_i − mean_g r."""
    return _centred(rewards, group_statistics(rewards, group_id, in_statistics)).to(torch.float32)


@ADVANTAGES.register("rloo", "2402.14740")
def rloo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """A_i = r_i − mean of r over the other samples of g.

    A sample outside the statistics is compared with all that are in them.
    """
    group = group_statistics(rewards, group_id, in_statistics)
    values, own = rewards.double(), in_statistics.double()
    others = (group.total - values.masked_fill(~in_statistics, 0.0)) / (group.members - own).clamp(min=1)
    return (values - others).masked_fill(~group.has_spread, 0.0).to(torch.float32)


@ADVANTAGES.register("lite_ppo", "2508.08221")
def lite_ppo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """A_i = (r_i − mean_g r) / std of r over the batch; 0 where all of them are equal.

    0 for everybody where all rewards of the batch are equal.
    """
    inside = rewards[in_statistics].double()
    if len(inside) < 2 or bool(inside.max() == inside.min()):
        return torch.zeros_like(rewards, dtype=torch.float32)
    return (_centred(rewards, group_statistics(rewards, group_id, in_statistics)) / inside.std()).to(torch.float32)


@ADVANTAGES.register("reinforce_pp_baseline", "2501.03262")
def reinforce_pp_baseline(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """A_i = x_i whitened over the samples of the batch, x_i = r_i − mean_g r; groups without spread stay 0."""
    group = group_statistics(rewards, group_id, in_statistics)
    return whiten(_centred(rewards, group), in_statistics).masked_fill(~group.has_spread, 0.0).to(torch.float32)


@ADVANTAGES.register("remax", "2310.10505")
def remax(rewards: torch.Tensor, group_id: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """A_i = r_i − r(greedy answer to the same prompt).

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


@ADVANTAGES.register("opo", "2505.23585", on_policy="its baseline is the best one only for the policy that sampled")
def opo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A_i = r_i − Σ_g T_j·r_j / Σ_g T_j, the baseline of least variance."""
    group = group_statistics(rewards, group_id, in_statistics)
    # the variance of a sample's gradient grows with its length, hence the weights
    weight = lengths.double() * in_statistics
    weighted = (rewards.double() * weight).masked_fill(~in_statistics, 0.0)
    baseline = group_sum(weighted, group_id) / group_sum(weight, group_id).clamp(min=1)
    return (rewards.double() - baseline).masked_fill(~group.has_spread, 0.0).to(torch.float32)


@ADVANTAGES.register("max_rl", "2602.02710")
def max_rl(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """A_i = (r_i − mean_g r) / mean_g r; 0 where the mean is not positive."""
    group = group_statistics(rewards, group_id, in_statistics)
    positive = group.mean > 0
    scaled = _centred(rewards, group) / group.mean.masked_fill(~positive, 1.0)
    return scaled.masked_fill(~positive, 0.0).to(torch.float32)


@ADVANTAGES.register(
    "gdpo",
    "2601.05242",
    knobs={"weights": KnobRule(meaning="Weights of the named rewards, `correctness=1,format=0.5`; one left out counts 1.")},
)
def gdpo(
    named_rewards: Mapping[str, torch.Tensor], group_id: torch.Tensor, in_statistics: torch.Tensor, *, weights: str = ""
) -> torch.Tensor:
    """A_i = Σ_k weight_k·(r_ik − mean_g r_k)/(std_g r_k + 1e-6), whitened over the samples of the batch; k: the named
    rewards.

    ``weights``: ``correctness=1,format=0.5``; a name that is left out counts 1. A sample without a reward (NaN) has score 0
    in it and is not in its statistics. A group in which no reward differs stays 0.

    Raises:
        ValueError: there are no named rewards, or ``weights`` names another one or is not of that form.
    """
    factor = _weights(weights, named_rewards)
    total = torch.zeros(len(group_id), dtype=torch.float64, device=group_id.device)
    spread = torch.zeros(len(group_id), dtype=torch.bool, device=group_id.device)
    for name, values in named_rewards.items():
        # NaN means that the reward does not apply to the sample; 0 would pull the group's mean down
        known = in_statistics & ~values.isnan()
        group = group_statistics(values, group_id, known)
        scores = _centred(values, group) / (group.std + EPSILON)
        total += factor[name] * scores.masked_fill(values.isnan(), 0.0)
        spread |= group.has_spread
    # a group without spread has score 0, which whitening would move by the batch's mean
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


@ADVANTAGES.register(
    "cpgd",
    "2505.12504",
    knobs={
        "weighting": KnobRule(
            choices=("std", "groups", "none"),
            meaning="Divide by the group's spread; or multiply all by groups ÷ groups with spread, at most 3; or neither.",
        )
    },
)
def cpgd(
    rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor, *, weighting: str = "std"
) -> torch.Tensor:
    """A_i = ω·(r_i − mean_g r); ω = 1/(std_g r + 1e-6), or min(groups / groups with spread, 3), or 1, as `weighting`
    says.

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
