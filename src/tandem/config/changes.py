"""Changes to the reward of a run that goes on, as pure text: the actions, and the spelling that results."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.config.errors import ConfigError, nearest_names
from tandem.config.recipes import recipes_of
from tandem.config.terms import Term, parse_terms, read_terms, sum_text

ACTIONS = {
    "reward.weight": "NAME=NUMBER",
    "reward.add": "TERM",
    "reward.remove": "NAME",
}
"""Each action, with the form of its argument."""


@dataclass(frozen=True)
class Change:
    """One change, as it is asked for: ``Change("reward.weight", "format=0.3")``."""

    action: str
    value: str

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(
                f"nothing is called {self.action!r} that can be changed: {nearest_names(self.action, ACTIONS)}"
            )

    def __str__(self) -> str:
        return f"{self.action} {self.value}"


def changed_reward(spec: str, change: Change) -> str:
    """The reward ``spec`` after the change.

    Example: ``changed_reward("math + 0.2*format", Change("reward.weight", "format=0.5"))`` is ``math + 0.5*format``.

    Raises:
        ConfigError: there is no term of that name (tells the nearest), or it is there already, or the last one would go, or
            the reward chooses by row.
    """
    for text in (spec, change.value):
        if recipes_of(text) is not None:
            raise ConfigError(
                f"{change}: a reward that chooses a recipe by row (reward.by) cannot be changed while the run goes on; only "
                "the terms of a single sum can"
            )
    terms = parse_terms(spec)
    match change.action:
        case "reward.weight":
            terms = _with_weight(terms, change.value)
        case "reward.add":
            terms = [*terms, *parse_terms(change.value)]
        case "reward.remove":
            _find(terms, change.value)
            if len(terms) == 1:
                raise ConfigError(f"{change}: it is the only term of the reward; add another one first")
            terms = [term for term in terms if term.label != change.value]
    text = sum_text(terms)
    read_terms(text)  # two of one name, a gate that nothing opens any more
    if parse_terms(text) != terms:
        raise ConfigError(f"{change}: the reward cannot be written as a sum ({text}); move the file to a plainer path")
    return text


def _with_weight(terms: Sequence[Term], value: str) -> list[Term]:
    name, sign, number = value.partition("=")
    try:
        weight = float(number)
        if not sign or not math.isfinite(weight):
            raise ValueError(number)
    except ValueError:
        raise ConfigError(f"reward.weight {value}: write NAME=NUMBER, such as {terms[0].label}=0.3") from None
    chosen = _find(terms, name.strip())
    return [replace(term, weight=weight) if term is chosen else term for term in terms]


def _find(terms: Sequence[Term], name: str) -> Term:
    for term in terms:
        if term.label == name:
            return term
    raise ConfigError(f"the reward has no term {name!r}: {nearest_names(name, [term.label for term in terms])}")
