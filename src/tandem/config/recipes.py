"""Turns rewards as YAML writes them (a list of terms, or a recipe for each kind of row) into one text."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tandem.config.data import REWARD
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.terms import Term, parse_terms, spelled, sum_text

BY = "by(column='task', recipes={'maths': 'math + 0.2*format', 'chat': 'model(path=FOLDER)'})"


@dataclass(frozen=True)
class Recipes:
    """A reward for each value of a column: ``by(column='task', recipes={'maths': 'math', 'chat': 'model(path=…)'})``."""

    column: str
    """Name of the column; `source` is the name of the row's data set."""

    rewards: Mapping[str, str]
    """Value of the column → the reward of such rows."""

    def of(self, row: Mapping[str, Any]) -> str:
        """The reward of a row.

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
            there = nearest_names(str(value), self.rewards)
            raise ConfigError(f"column {self.column!r} is {value!r}, and no recipe of the reward has that name; {there}")
        return self.rewards[str(value)]


@lru_cache
def recipes_of(spec: str) -> Recipes | None:
    """The recipes of a reward that chooses by row; None for a sum, which judges all rows alike.

    Raises:
        ConfigError: the text begins like recipes and cannot be read.
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
    """All sums that a reward can choose; a plain sum is its only choice.

    Raises:
        ConfigError: see `recipes_of`.
    """
    recipes = recipes_of(spec)
    return (spec,) if recipes is None else tuple(dict.fromkeys(recipes.rewards.values()))


def sum_of(row: Mapping[str, Any], default: str) -> str:
    """The sum that judges a row: by the reward of its data set, or by ``default`` if that has none.

    Raises:
        ConfigError: see `Recipes.of`.
    """
    spec = row.get(REWARD) or default
    recipes = recipes_of(spec)
    return spec if recipes is None else recipes.of(row)


def reward_text(value: Any) -> str:
    """The text for a reward as YAML holds it: text, ``{name: …, knob: …}``, a list of terms, or ``{by: …, recipes: …}``.

    Raises:
        ConfigError: says what was expected.
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
    """The text for ``{name: …, knob: …}``."""
    name = entries.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"must be a name, or a mapping with name and knobs, got {dict(entries)!r}")
    return spelled(name, {key: value for key, value in entries.items() if key != "name"}, "name")


def _terms_of(entry: Any) -> list[Term]:
    """The terms of one entry of a list: ``weight`` stands before it, and ``label`` is its name in metrics."""
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
