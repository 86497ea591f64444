"""Advantages: how much better a result is than expected, per sample (``[M]``) or per token (``[T]``).

Statistics are computed over the samples with ``in_statistics`` and applied to all samples. Advantages that compare within a
group are exactly 0 for a group of one, and for a group whose rewards are all equal. The samples of a prompt are those with
the same ``group_id``; their positions do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tandem.algorithms.registry import ADVANTAGES
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule


class GroupStatistics(NamedTuple):
    """Statistics of the group of each sample: all ``[M]``, floats in float64. Members: samples with ``in_statistics``."""

    members: torch.Tensor
    """Number of the group's members."""

    total: torch.Tensor
    mean: torch.Tensor
    """0 for a group without members."""

    std: torch.Tensor
    """Unbiased; 0 for fewer than two members."""

    has_spread: torch.Tensor
    """bool: the members' rewards are not all equal. Tested as max ≠ min, because rounding gives equal rewards a std ≠ 0."""


def group_statistics(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> GroupStatistics:
    """Computes the statistics of rewards within each group. All arguments ``[M]``. Rewards of samples without
    ``in_statistics`` may have any value, also NaN."""
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
    """Replaces each value by the sum over its group: ``[M]``, ``[M]`` → ``[M]``."""
    ids, index = torch.unique(group_id, return_inverse=True)
    return values.new_zeros(len(ids)).index_add(0, index, values)[index]


WHITENING_EPSILON = 1e-8


def whiten(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """(x − μ)/√(σ² + 1e-8), with μ and the unbiased σ² over the entries in ``counted`` (bool, same shape), → float64.

    Exactly 0 if all counted entries are equal, or there are fewer than two.
    """
    inside = values[counted].double()
    # an exact comparison, because the variance of equal values may differ from 0 by rounding
    if len(inside) < 2 or bool(inside.max() == inside.min()):
        return torch.zeros_like(values, dtype=torch.float64)
    return (values.double() - inside.mean()) / (inside.var() + WHITENING_EPSILON).sqrt()


def whiten_within(values: torch.Tensor, counted: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Applies `whiten` within each group; ``group``: the group number of each entry. All arguments ``[T]``, → float64."""
    stats = group_statistics(values, group, counted)
    scale = (stats.std.square() + WHITENING_EPSILON).sqrt()
    return ((values.double() - stats.mean) / scale).masked_fill(~stats.has_spread, 0.0)


EPSILON = 1e-6
MOST_WEIGHT = 3.0
"""Largest weight ω of `cpgd` for a batch in which few groups have spread."""


def _centred(rewards: torch.Tensor, group: GroupStatistics) -> torch.Tensor:
    """r − mean over the group, 0 if the group has no spread; float64."""
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

    For a sample without ``in_statistics``, the mean is over all samples of the group that have it.
    """
    group = group_statistics(rewards, group_id, in_statistics)
    values, counted = rewards.double(), in_statistics.double()
    others = (group.total - values.masked_fill(~in_statistics, 0.0)) / (group.members - counted).clamp(min=1)
    return (values - others).masked_fill(~group.has_spread, 0.0).to(torch.float32)


@ADVANTAGES.register("lite_ppo", "2508.08221")
def lite_ppo(rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor) -> torch.Tensor:
    """A_i = (r_i − mean_g r) / std of r over the batch; 0 if all rewards of the batch are equal."""
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
    knobs={
        "weights": KnobRule(
            meaning="Weights of the named rewards, such as `correctness=1,format=0.5`; others have weight 1."
        )
    },
)
def gdpo(
    named_rewards: Mapping[str, torch.Tensor], group_id: torch.Tensor, in_statistics: torch.Tensor, *, weights: str = ""
) -> torch.Tensor:
    """A_i = Σ_k weight_k·(r_ik − mean_g r_k)/(std_g r_k + 1e-6), whitened over the samples of the batch; k: the named
    rewards.

    ``weights``: ``correctness=1,format=0.5``; names left out have weight 1. A sample without reward k (NaN) has r_ik left
    out of the statistics and of its sum. A group in which no reward has spread gets 0.

    Raises:
        ValueError: there are no named rewards, or ``weights`` has an unknown name or another form.
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
    weights = dict.fromkeys(names, 1.0)
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in weights:
            raise ValueError(f"algorithm.advantage.weights names {name!r}; the rewards are {', '.join(names)}")
        weights[name] = float(number)
    return weights


@ADVANTAGES.register(
    "cpgd",
    "2505.12504",
    knobs={
        "weighting": KnobRule(
            choices=("std", "groups", "none"),
            meaning="ω is: `std`: 1 / the group's std; `groups`: groups ÷ groups with spread, at most 3; `none`: 1.",
        )
    },
)
def cpgd(
    rewards: torch.Tensor, group_id: torch.Tensor, in_statistics: torch.Tensor, *, weighting: str = "std"
) -> torch.Tensor:
    """A_i = ω·(r_i − mean_g r); ω by `weighting`: 1/(std_g r + 1e-6) (`std`), min(groups / groups with spread, 3)
    (`groups`), or 1 (`none`).

    With ``groups``, ω is 1 if no group of the batch has spread.

    Raises:
        ValueError: ``weighting`` has any other value.
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


@ADVANTAGES.register("reinforce")
def reinforce(token_rewards: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """A_t = sum of the rewards of token t and all later tokens; the sample's reward is at its last trained token.

    A reward at an untrained token therefore counts for the trained tokens before it.
    """
    return _returns_to_go(token_rewards, sequence).to(torch.float32)


@ADVANTAGES.register("reinforce_pp", "2501.03262", whitens=True)
def reinforce_pp(
    token_rewards: torch.Tensor,
    sequence: torch.Tensor,
    mask: torch.Tensor,
    sample: torch.Tensor,
    in_statistics: torch.Tensor,
) -> torch.Tensor:
    """A_t = x_t whitened over the tokens of the batch, (x − μ)/√(σ² + 1e-8), x_t the return-to-go of the tokens' rewards,
    γ = 1.

    The method has its KL penalty in the reward: set ``algorithm.kl.where=reward``.
    """
    returns = _returns_to_go(token_rewards, sequence)
    return whiten(returns, mask & in_statistics[sample]).masked_fill(~mask, 0.0).to(torch.float32)


@ADVANTAGES.register(
    "gae",
    "1506.02438",
    knobs={
        "gamma": KnobRule(low=0.0, high=1.0, meaning="Discount of later rewards, per trained token."),
        "lam": KnobRule(
            low=0.0,
            high=1.0,
            meaning="λ: with 1, A is the return minus the value; with 0, A is δ, the error of the value over one token.",
        ),
        "whitened": KnobRule(meaning="Scale advantages to mean 0 and variance 1 over the batch's tokens."),
    },
    whitens=True,
)
def gae(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    bootstrap_value: torch.Tensor,
    cut: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    sample: torch.Tensor,
    in_statistics: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whitened: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1},  R_t = A_t + V_t; over trained tokens only. After the last
    token V is 0 if the answer ended by itself, the critic's value if it was cut. A is then whitened over the tokens of
    the batch.

    Returns advantages A and returns R, ``[T]`` each. Untrained tokens are skipped and do not count as steps of discounting;
    a reward at an untrained token is added to the trained token before it. The value after the last trained token is
    ``bootstrap_value [N]`` if the trajectory was ``cut [N]``, else 0. R is computed from A before whitening.
    """
    tokens = mask.nonzero().flatten()  # [K], trained
    count = len(bootstrap_value)
    owner = sequence[tokens]
    sizes = torch.bincount(owner, minlength=count)  # [N]
    begin = sizes.cumsum(0) - sizes
    column = torch.arange(len(tokens), device=mask.device) - begin[owner]  # place within the trajectory
    trained_before = mask.long().cumsum(0) - begin[sequence]  # number of the trajectory's trained tokens up to this one
    rewarded = trained_before > 0  # a reward before the first trained token has no token to be credited to
    longest = int(sizes.max()) if count else 0
    # Padded to [N, longest] of trained tokens: one loop over columns serves all trajectories. float64, because rounding
    # errors add up in the recursion.
    rewards, critic = values.new_zeros(2, count, longest, dtype=torch.float64).unbind()
    rewards.index_put_((sequence[rewarded], trained_before[rewarded] - 1), token_rewards[rewarded].double(), accumulate=True)
    critic[owner, column] = values[tokens].double()
    following = bootstrap_value.double().masked_fill(~cut, 0.0)  # V after the token [N]
    running, advantages = torch.zeros_like(following), torch.zeros_like(rewards)
    for t in range(longest - 1, -1, -1):
        # shorter trajectories begin later in this loop and keep their bootstrap value until then
        begun = t < sizes
        delta = rewards[:, t] + gamma * following - critic[:, t]
        running = torch.where(begun, delta + gamma * lam * running, running)
        following = torch.where(begun, critic[:, t], following)
        advantages[:, t] = running
    result = torch.zeros_like(values, dtype=torch.float64)  # advantages, [T]
    result[tokens] = advantages[owner, column]
    returns = (result + values.double()).masked_fill(~mask, 0.0)
    # whitened after the returns are computed: the critic learns returns on the unwhitened scale
    if whitened:
        result = whiten(result, mask & in_statistics[sample]).masked_fill(~mask, 0.0)
    return result.to(torch.float32), returns.to(torch.float32)


def _returns_to_go(token_rewards: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Sum of the rewards of each token and all later tokens of its sequence, ``[T]`` float64."""
    if not len(token_rewards):
        return token_rewards
    earned = token_rewards.double()
    until = earned.cumsum(0)  # over the whole batch, float64
    is_last = torch.ones_like(sequence, dtype=torch.bool)
    is_last[:-1] = sequence[1:] != sequence[:-1]
    # One cumulative sum over the whole batch: a return is the sum at its sequence's end less the sum before the token.
    ends = until[is_last][torch.unique_consecutive(sequence, return_inverse=True)[1]]
    return ends - until + earned
