"""Converts rewards from YAML (a list of terms, or a recipe for each kind of row) to one text, and applies changes to that
text while a run goes on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tandem.config.data import REWARD
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.terms import Term, parse_terms, read_terms, spelled, sum_text

BY = "by(column='task', recipes={'maths': 'math + 0.2*format', 'chat': 'model(path=FOLDER)'})"


@dataclass(frozen=True)
class Recipes:
    """A reward for each value of a column: ``by(column='task', recipes={'maths': 'math', 'chat': 'model(path=…)'})``."""

    column: str
    """Name of the column; `source` is the name of the row's data set."""

    rewards: Mapping[str, str]
    """Value of the column → the reward of such rows."""

    def of(self, row: Mapping[str, Any]) -> str:
        """Returns the reward of a row.

        Raises:
            ConfigError: the row lacks the column, or its value has no recipe; the message names the nearest.
        """
        column = self.column if self.column in row else f"tandem.{self.column}"  # `source`, unless the rows have one
        if column not in row:
            raise ConfigError(
                f"reward.by={self.column}, and the row has no such column; {nearest_names(self.column, map(str, row))}"
            )
        value = row[column]
        if str(value) not in self.rewards:
            near = nearest_names(str(value), self.rewards)
            raise ConfigError(f"column {self.column!r} is {value!r}, and no recipe of the reward has that name; {near}")
        return self.rewards[str(value)]


@lru_cache
def recipes_of(spec: str) -> Recipes | None:
    """Parses a reward that chooses a recipe by row; returns None for a sum, which judges all rows alike.

    Raises:
        ConfigError: the text begins with ``by(`` and cannot be parsed.
    """
    if not spec.strip().startswith("by("):
        return None
    try:
        (term,) = parse_terms(spec)
    except ValueError as error:  # a ConfigError is one
        raise ConfigError(f"reward {spec!r} cannot be read; a reward for each row is {BY}") from error
    column, rewards = term.knobs.get("column"), term.knobs.get("recipes")
    texts = isinstance(rewards, dict) and all(isinstance(x, str) for pair in rewards.items() for x in pair)
    if {*term.knobs} != {"column", "recipes"} or not isinstance(column, str) or not texts or not rewards:
        raise ConfigError(f"reward {spec!r} needs the name of a column and the recipes by its values, as in {BY}")
    for name, reward in rewards.items():
        if recipes_of(reward) is not None:
            raise ConfigError(f"recipe {name!r} of the reward chooses by row again; a recipe is a sum of terms")
    return Recipes(column, rewards)


def sums_of(spec: str) -> tuple[str, ...]:
    """Returns all sums that a reward may choose for a row; for a plain sum only this.

    Raises:
        ConfigError: see `recipes_of`.
    """
    recipes = recipes_of(spec)
    return (spec,) if recipes is None else tuple(dict.fromkeys(recipes.rewards.values()))


def sum_of(row: Mapping[str, Any], default: str) -> str:
    """Returns the sum that judges a row: of the reward of its data set, or of ``default`` if the data set has none.

    Raises:
        ConfigError: see `Recipes.of`.
    """
    spec = row.get(REWARD) or default
    recipes = recipes_of(spec)
    return spec if recipes is None else recipes.of(row)


def reward_text(value: Any) -> str:
    """Converts a reward from YAML to text. The value is text, ``{name: …, knob: …}``, a list of terms, or
    ``{by: …, recipes: …}``.

    Raises:
        ConfigError: the value has another form; the message says what was expected.
    """
    if isinstance(value, Mapping):
        if "by" in value or "recipes" in value:
            return _by_text(value)
        return _term_text(value)
    if isinstance(value, (list, tuple)):
        if not value:
            raise ConfigError("must be a list of terms, and it is empty")
        return sum_text([term for entry in value for term in _terms_of(entry)])
    if not isinstance(value, str):
        raise ConfigError(f"must be a name, a sum of names, or a list of terms, got {value!r}")
    return value


def _term_text(entries: Mapping[str, Any]) -> str:
    """Converts ``{name: …, knob: …}`` to text."""
    name = entries.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"must be a name, or a mapping with name and knobs, got {dict(entries)!r}")
    return spelled(name, {key: value for key, value in entries.items() if key != "name"}, "name")


def _terms_of(entry: Any) -> list[Term]:
    """Returns the terms of one entry of a list. Its key ``weight`` is the term's weight, ``label`` the term's name in
    metrics."""
    if not isinstance(entry, Mapping):
        return parse_terms(reward_text(entry))
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ConfigError(f"the weight of a term must be a finite number, got {weight!r}")
    text = _term_text({key: value for key, value in entry.items() if key not in ("weight", "label")})
    if "label" in entry:
        text = spelled(text, {"name": str(entry["label"])}, "name")
    return [replace(term, weight=weight * term.weight) for term in parse_terms(text)]


def _by_text(entries: Mapping[str, Any]) -> str:
    unknown = [key for key in entries if key not in ("by", "recipes")]
    if unknown:
        raise ConfigError(f"has no key {unknown[0]!r} beside by and recipes; {nearest_names(unknown[0], ('by', 'recipes'))}")
    by, recipes = entries.get("by"), entries.get("recipes")
    if not isinstance(by, str) or not isinstance(recipes, Mapping) or not recipes:
        raise ConfigError(
            "needs both: by, the name of a column (source is the name of the data set), and recipes, a reward for each of "
            f"its values; got by={by!r} and recipes={recipes!r}"
        )
    texts = {str(name): reward_text(reward) for name, reward in recipes.items()}
    return f"by(column={by!r}, recipes={texts!r})"


ACTIONS = {
    "reward.weight": "NAME=NUMBER",
    "reward.add": "TERM",
    "reward.remove": "NAME",
}
"""Action → the form of its argument."""


@dataclass(frozen=True)
class Change:
    """One requested change: ``Change("reward.weight", "format=0.3")``."""

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
    """Returns the reward ``spec`` after a change.

    Example: ``changed_reward("math + 0.2*format", Change("reward.weight", "format=0.5"))`` is ``math + 0.5*format``.

    Raises:
        ConfigError: no term has that name (the message names the nearest), a term of this name exists already, the last term
            would be removed, or the reward chooses by row.
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
    read_terms(text)  # raises for two terms of one name, and for a gate whose term is gone
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
