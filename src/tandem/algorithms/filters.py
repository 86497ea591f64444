"""Which groups are worth training on, judged on accuracy and not on the shaped reward.

Where a reward states no accuracy, the reward before shaping stands in for it.
"""

from collections.abc import Sequence

from tandem.algorithms.registry import FILTERS

Accuracies = Sequence[float | None]
Verdict = tuple[bool, str]
RIGHT = 0.5
"""From this accuracy on a sample counts as correct."""


@FILTERS.register("none")
def keep_all(accuracies: Accuracies, rewards: Sequence[float]) -> Verdict:
    """Every group."""
    return True, ""


@FILTERS.register("dynamic_sampling")
def dynamic_sampling(accuracies: Accuracies, rewards: Sequence[float], *, max_draws: int = 10) -> Verdict:
    """Groups with 0 < #correct < G (arXiv:2503.14476), or, where accuracy is unknown, with different rewards.

    ``max_draws`` is for whoever draws: after so many draws for one batch it gives up. It does not change the verdict.
    """
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    if len(known) < len(accuracies):
        return (True, "") if max(rewards) > min(rewards) else (False, "no_spread")
    correct = sum(accuracy >= RIGHT for accuracy in known)
    if correct == 0:
        return False, "none_correct"
    return (False, "all_correct") if correct == len(known) else (True, "")


@FILTERS.register("accuracy_band")
def accuracy_band(accuracies: Accuracies, rewards: Sequence[float], *, low: float = 0.1, high: float = 0.9) -> Verdict:
    """Groups whose mean accuracy lies in [low, high]."""
    values = [reward if accuracy is None else accuracy for accuracy, reward in zip(accuracies, rewards, strict=True)]
    mean = sum(values) / len(values)
    if mean < low:
        return False, "too_hard"
    return (False, "too_easy") if mean > high else (True, "")
