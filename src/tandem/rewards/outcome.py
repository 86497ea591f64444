"""The arguments and results of reward functions: read the same way in the run and in its worker processes."""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from tandem.api.failures import RewardFailure

WHOLE = "completion_with_special_tokens"
GIVEN = ("prompt", "completion", "prompt_ids", "completion_ids", "row", WHOLE)
"""Names that a reward function can ask for besides the columns of the row; ``row`` is the whole row."""


@dataclass(frozen=True)
class Judgement:
    """A judgement, checked: finite numbers only. (`RewardResult` without torch behind it.)"""

    value: float
    rewards: dict[str, float] = field(default_factory=dict)
    accuracy: float | None = None
    answer: str | None = None
    extracted: bool | None = None
    words: dict[str, str] = field(default_factory=dict)


def is_async(function: Callable[..., Any]) -> bool:
    """True for ``async def``, also as ``__call__`` of an object."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class Arguments:
    """The arguments that a function takes, read from its signature once."""

    def __init__(self, function: Callable[..., Any], name: str):
        self.name = name
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.names = {p.name for p in named}
        self.required = {p.name for p in named if p.default is p.empty}
        self.rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]

    def missing(self, columns: Mapping[str, Any]) -> str | None:
        """The fault of these columns, in words; None if there is none."""
        if self.positional:
            return (
                f"reward {self.name} has positional-only parameters ({', '.join(self.positional)}); it is called by keyword"
            )
        absent = sorted(self.required - set(GIVEN) - set(columns))
        if not absent:
            return None
        return (
            f"reward {self.name} needs {', '.join(map(repr, absent))}, which is no column of the row; "
            f"columns there: {', '.join(map(str, columns)) or 'none'}; always there: {', '.join(GIVEN)}"
        )

    def select(self, given: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of one call. A column called like one of `GIVEN` is reached through ``row``."""
        everything = {**row, **given}
        chosen = {name: everything[name] for name in self.names if name in everything}
        if self.rest:
            chosen |= {name: value for name, value in row.items() if isinstance(name, str) and name not in GIVEN}
        return chosen


def _number(value: Any, what: str) -> float:
    if not isinstance(value, Real) or value is None:
        raise RewardFailure("reward_wrong_type", f"{what} must be a number, got {type(value).__name__}: {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFailure("reward_not_finite", f"{what} is {number}; a reward is a finite number")
    return number


def read_outcome(value: Any, name: str) -> Judgement:
    """Checks what a reward function returned.

    A mapping's text under ``answer`` is the answer that was found in the completion, its None that none was found.

    Raises:
        RewardFailure: ``reward_wrong_type`` or ``reward_not_finite``.
    """
    module = sys.modules.get("tandem.api.workflow")  # not imported here: it brings torch
    answer: str | None = None
    extracted: bool | None = None
    words: dict[str, str] = {}
    if isinstance(value, Judgement) or (module and isinstance(value, module.RewardResult)):
        parts, total, accuracy = dict(value.rewards), value.value, value.accuracy
        answer, extracted = value.answer, value.extracted
        words = {str(judge): str(text) for judge, text in value.words.items()}
    elif isinstance(value, Mapping):
        parts = dict(value)
        accuracy = parts.pop("accuracy", None)
        if "answer" in parts and (parts["answer"] is None or isinstance(parts["answer"], str)):
            answer = parts.pop("answer")
            extracted = answer is not None
        if not parts:
            raise RewardFailure("reward_wrong_type", f"{name} returned no part to sum, only {value!r:.80}")
        total = sum(_number(part, f"{name}[{key!r}]") for key, part in parts.items())
    else:
        parts, total, accuracy = {}, value, None
    rewards = {str(key): _number(part, f"{name}[{key!r}]") for key, part in parts.items()}
    total = _number(total, f"the value of {name}")
    if accuracy is not None:
        accuracy = _number(accuracy, f"accuracy of {name}")
        if not 0 <= accuracy <= 1:
            raise RewardFailure("reward_wrong_type", f"accuracy of {name} must lie in 0…1, got {accuracy}")
    return Judgement(total, rewards, accuracy, answer, extracted, words)


def compared(name: str, values: Any, count: int) -> list[Judgement]:
    """Checks what a reward that compares the samples of a group returned: a number, or a `RewardResult` with words, each.

    Raises:
        RewardFailure: ``reward_wrong_type`` or ``reward_not_finite``.
    """
    try:
        given = [value if hasattr(value, "words") else float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise RewardFailure("reward_wrong_type", f"{name} must give a list of numbers: {error}") from error
    if len(given) != count:
        raise RewardFailure("reward_wrong_type", f"{name} must give each of {count} samples a number, got {len(given)}")
    outcomes = [read_outcome(value, name) for value in given]
    if any(outcome.rewards or outcome.accuracy is not None or outcome.answer is not None for outcome in outcomes):
        raise RewardFailure("reward_wrong_type", f"{name} compares: its results have a value and words, and nothing else")
    return outcomes
