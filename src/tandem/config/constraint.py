"""A bound on the mean cost of what the policy writes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConstraintConfig:
    """A limit for one term of `reward`, which then is a cost: its value times its weight is not rewarded, but kept at or
    below the limit on average. A Lagrange multiplier λ weighs it: the policy learns from (reward − λ·cost) / (1 + λ)
    (docs/constraints.md)."""

    cost: str | None = None
    """Name of the term in metrics: `safety` for `model(path=FOLDER, name=safety)`, `rude` for `my_file.py:rude`; null: no
    constraint."""

    limit: float = 0.0
    """Largest mean cost of the samples that is fine: 0.1 allows a tenth of them to have a cost of 1."""

    step_size: float = 0.1
    """After each batch λ grows by this, times how far the mean cost is above the limit, or shrinks if it is below; 0 leaves
    λ as it is."""

    multiplier: float = 1.0
    """λ before the first step."""

    min_multiplier: float = 0.0
    """Smallest λ."""

    max_multiplier: float = 10.0
    """Largest λ: a bound that cannot be met does not drown the reward."""
