"""Everything that an algorithm names, resolved: once for a run, which hands it to the plan, the actor and the rollout."""

from dataclasses import dataclass

from tandem.algorithms.registry import AGGREGATIONS, FILTERS
from tandem.config.algorithm import AlgorithmConfig
from tandem.roles.components import Choice, choose
from tandem.roles.credit import Credit
from tandem.roles.objective import Objective
from tandem.roles.tokens import TokenChoice


@dataclass(frozen=True)
class AlgorithmParts:
    """The functions of an algorithm with their knobs."""

    credit: Credit
    tokens: TokenChoice
    aggregation: Choice
    objective: Objective
    filter: Choice
    """The choice of groups that are trained on."""


def choose_parts(algorithm: AlgorithmConfig, max_new_tokens: int | None, seed: int = 0) -> AlgorithmParts:
    """Everything that the algorithm names. ``max_new_tokens``: what `constant` and `overlong` take where their knob is not
    set. ``seed``: of the noise of `TokenChoice`.

    Raises:
        ConfigError: a part is not known, or lacks what it needs.
    """
    objective = Objective.of(algorithm)
    return AlgorithmParts(
        Credit(algorithm, max_new_tokens),
        TokenChoice(algorithm, seed, objective.policy_loss.preparation),
        choose(AGGREGATIONS, algorithm.aggregation, "algorithm.aggregation", {"max_tokens": max_new_tokens}),
        objective,
        choose(FILTERS, algorithm.filter, "algorithm.filter"),
    )
