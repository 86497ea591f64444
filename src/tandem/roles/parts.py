"""Everything that an algorithm names, resolved: once for a run, which hands it to the plan, the actor and the rollout."""

from dataclasses import dataclass

from tandem.algorithms.registry import AGGREGATIONS, FILTERS
from tandem.config.algorithm import AlgorithmConfig
from tandem.roles.components import Choice, choose
from tandem.roles.credit import Credit
from tandem.roles.objective import Objective
from tandem.roles.tokens import TokenChoice, token_choice


@dataclass(frozen=True)
class AlgorithmParts:
    """The functions of an algorithm with their knobs."""

    credit: Credit
    tokens: TokenChoice | None
    """The choice of tokens that are trained on; None if all are."""

    aggregation: Choice
    objective: Objective
    filter: Choice
    """The choice of groups that are trained on."""

    def needs_proximal(self, algorithm: AlgorithmConfig, updates_per_batch: int) -> bool:
        """True if the log-probabilities of before the update have to be computed in a pass of their own.

        With one optimizer step a batch the policy of that step *is* the proximal one, and stands in for it in ratio,
        behaviour correction and rejection, all of which are per trajectory. KL in the reward, a coefficient that follows
        the KL, and a choice among the tokens of the whole batch need it earlier.
        """
        chooses = self.tokens is not None and self.tokens.needs_proximal
        return updates_per_batch > 1 or algorithm.kl.in_reward or algorithm.kl.target is not None or chooses


def choose_parts(algorithm: AlgorithmConfig, max_new_tokens: int | None, seed: int = 0) -> AlgorithmParts:
    """Everything that the algorithm names. ``max_new_tokens``: what `constant` and `overlong` take where their knob is not
    set. ``seed``: of the noise of `TokenChoice`.

    Raises:
        ConfigError: a part is not known, or lacks what it needs.
    """
    objective = Objective.of(algorithm)
    return AlgorithmParts(
        Credit(algorithm, max_new_tokens),
        token_choice(algorithm, seed, objective.policy_loss.preparation),
        choose(AGGREGATIONS, algorithm.aggregation, "algorithm.aggregation", {"max_tokens": max_new_tokens}),
        objective,
        choose(FILTERS, algorithm.filter, "algorithm.filter"),
    )
