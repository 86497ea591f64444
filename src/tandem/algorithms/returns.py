"""Advantages of single tokens, from rewards of tokens. All tensors ``[T]`` unless it says otherwise."""

from __future__ import annotations

from tandem.algorithms.registry import ADVANTAGES
from tandem.algorithms.whitening import whiten
from tandem.api.lazy_torch import torch
from tandem.config.parts import KnobRule


@ADVANTAGES.register("reinforce")
def reinforce(token_rewards: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """A_t = sum of the rewards of token t and later ones; the sample's stands on its last trained token.

    A reward that falls on an untrained token so counts for the trained ones before it.
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

    The penalty for leaving the reference belongs into the reward: ``algorithm.kl.where=reward``.
    """
    returns = _returns_to_go(token_rewards, sequence)
    return whiten(returns, mask & in_statistics[sample]).masked_fill(~mask, 0.0).to(torch.float32)


@ADVANTAGES.register(
    "gae",
    "1506.02438",
    knobs={
        "gamma": KnobRule(low=0.0, high=1.0, meaning="Discount of later rewards, per trained token."),
        "lam": KnobRule(low=0.0, high=1.0, meaning="λ: 1 is the return minus the value, 0 the error of one token."),
        "whitened": KnobRule(meaning="Bring advantages to mean 0 and variance 1 over the batch's tokens."),
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

    δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1}, returns = A + V, over trained tokens only: other tokens are skipped
    and do not decay, and a reward that falls on one is credited to the trained token before it. After the last trained token
    V is ``bootstrap_value [N]`` where the trajectory was ``cut [N]``, else 0. ``whitened``: advantages to mean 0 and
    variance 1 over the batch's trained tokens, after the returns were taken.
    """
    tokens = mask.nonzero().flatten()  # [K], trained
    count = len(bootstrap_value)
    owner = sequence[tokens]
    sizes = torch.bincount(owner, minlength=count)  # [N]
    begin = sizes.cumsum(0) - sizes
    column = torch.arange(len(tokens), device=mask.device) - begin[owner]  # place within the trajectory
    trained_before = mask.long().cumsum(0) - begin[sequence]  # trained ones of the trajectory up to the token
    rewarded = trained_before > 0  # what is earned before the first of them is nobody's merit
    longest = int(sizes.max()) if count else 0
    # Padded to [N, longest] of trained tokens: one loop over columns serves all trajectories. float64, because a long sum of
    # small errors is fed back.
    rewards, critic = values.new_zeros(2, count, longest, dtype=torch.float64).unbind()
    rewards.index_put_((sequence[rewarded], trained_before[rewarded] - 1), token_rewards[rewarded].double(), accumulate=True)
    critic[owner, column] = values[tokens].double()
    following = bootstrap_value.double().masked_fill(~cut, 0.0)  # V after the token [N]
    running, advantages = torch.zeros_like(following), torch.zeros_like(rewards)
    for t in range(longest - 1, -1, -1):
        # shorter trajectories begin later in this loop; their bootstrap value must survive until then
        here = t < sizes
        delta = rewards[:, t] + gamma * following - critic[:, t]
        running = torch.where(here, delta + gamma * lam * running, running)
        following = torch.where(here, critic[:, t], following)
        advantages[:, t] = running
    found = torch.zeros_like(values, dtype=torch.float64)
    found[tokens] = advantages[owner, column]
    returns = (found + values.double()).masked_fill(~mask, 0.0)
    # after the returns: the critic learns the unwhitened scale
    if whitened:
        found = whiten(found, mask & in_statistics[sample]).masked_fill(~mask, 0.0)
    return found.to(torch.float32), returns.to(torch.float32)


def _returns_to_go(token_rewards: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """float64."""
    if not len(token_rewards):
        return token_rewards
    earned = token_rewards.double()
    until = earned.cumsum(0)  # over the whole batch, float64
    is_last = torch.ones_like(sequence, dtype=torch.bool)
    is_last[:-1] = sequence[1:] != sequence[:-1]
    # One cumulative sum over the whole batch: a return is the sum at its sequence's end less the sum before the token.
    ends = until[is_last][torch.unique_consecutive(sequence, return_inverse=True)[1]]
    return ends - until + earned
