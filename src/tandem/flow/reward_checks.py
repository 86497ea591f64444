"""Refusals of a reward whose terms do not fit the rest of the run, made before any model is opened."""

from collections.abc import Collection, Mapping, Sequence

from tandem.config.errors import ConfigError, nearest_names
from tandem.rewards.terms import RewardTerm

Sums = Mapping[str, Sequence[RewardTerm]]


def check_rewards(
    reward: str, cost: str | None, sums: Sums, stepwise: Collection[str], advantage: str, *, of_tokens: bool
) -> None:
    """Passes if the algorithm can learn from every term of ``sums``.

    ``cost``: the term of ``reward`` that has a limit. ``stepwise``: the terms that give each step a reward of its own.
    ``of_tokens``: the ``advantage`` counts rewards of tokens.

    Raises:
        ConfigError: it cannot; tells what to change.
    """
    if cost is not None:
        _check_cost(reward, cost, sums, stepwise)
    if stepwise and not of_tokens:
        raise ConfigError(
            f"reward {min(stepwise)!r} gives each step a reward of its own, and "
            f"algorithm.advantage={advantage} judges whole samples; use algorithm.advantage=reinforce "
            "or gae, or aggregate=min"
        )


def _check_cost(reward: str, cost: str, sums: Sums, stepwise: Collection[str]) -> None:
    """Passes if the cost is a term with a weight above 0 and one plain number a sample, and something else is rewarded.

    Raises:
        ConfigError: it is not; tells the nearest name.
    """
    names = dict.fromkeys(term.label for terms in sums.values() for term in terms)
    costs = [term for terms in sums.values() for term in terms if term.label == cost]
    key = f"constraint.cost={cost}"
    if not costs:
        raise ConfigError(f"{key} is no term of reward={reward}; {nearest_names(cost, names)}")
    if (least := min(term.weight for term in costs)) <= 0:
        raise ConfigError(
            f"{key}: its weight in the reward is {least:g}, and the cost is the term's value times its weight; write it "
            "with a weight above 0, such as 1: it is not rewarded"
        )
    if any(term.options.normalise for term in costs):
        raise ConfigError(f"{key}: normalise takes away the mean that constraint.limit is compared with; leave it out")
    if cost in stepwise:
        raise ConfigError(f"{key}: aggregate=none gives each step a reward, and a cost is one number; use aggregate=mean")
    if len(names) == 1:
        raise ConfigError(f"{key} is all that reward={reward} has; add what is to be learnt")
