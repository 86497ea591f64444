"""Filters that choose the groups to train on, by accuracy and not by the shaped reward.

If a reward has no accuracy, its value before shaping is used instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.algorithms.registry import FILTERS
from tandem.config.parts import KnobRule

Accuracies = Sequence[float | None]
Verdict = tuple[bool, str]
RIGHT = 0.5
"""A sample of this accuracy or more counts as correct."""


@FILTERS.register("none")
def keep_all(accuracies: Accuracies, rewards: Sequence[float]) -> Verdict:
    """All groups are trained on."""
    return True, ""


@FILTERS.register(
    "dynamic_sampling",
    "2503.14476",
    knobs={"max_draws": KnobRule(low=1, integer=True, meaning="Draws of one batch after which the run stops.")},
)
def dynamic_sampling(accuracies: Accuracies, rewards: Sequence[float], *, max_draws: int = 10) -> Verdict:
    """Keeps groups with 0 < correct < all; further groups are drawn until the batch is full.

    If an accuracy is unknown, a group is kept if its rewards differ. ``max_draws`` does not change the verdict: the caller,
    which draws groups, stops the run after so many draws for one batch.
    """
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    if len(known) < len(accuracies):
        return (True, "") if max(rewards) > min(rewards) else (False, "no_spread")
    correct = sum(accuracy >= RIGHT for accuracy in known)
    if correct == 0:
        return False, "none_correct"
    return (False, "all_correct") if correct == len(known) else (True, "")


@FILTERS.register(
    "accuracy_band",
    knobs={
        "low": KnobRule(low=0.0, high=1.0, at_most="high", meaning="Lowest mean accuracy of a group that is kept."),
        "high": KnobRule(low=0.0, high=1.0, meaning="Highest mean accuracy of a group that is kept."),
    },
)
def accuracy_band(accuracies: Accuracies, rewards: Sequence[float], *, low: float = 0.1, high: float = 0.9) -> Verdict:
    """Keeps groups with mean accuracy in [low, high]."""
    values = [reward if accuracy is None else accuracy for accuracy, reward in zip(accuracies, rewards, strict=True)]
    mean = sum(values) / len(values)
    if mean < low:
        return False, "too_hard"
    return (False, "too_easy") if mean > high else (True, "")
