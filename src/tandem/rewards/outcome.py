"""The arguments and results of reward functions: read the same way in the run and in its worker processes."""

import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from tandem.api.failures import RewardFailure
from tandem.api.numbers import as_float
from tandem.api.workflow import RewardResult

WHOLE = "completion_with_special_tokens"
GIVEN = ("prompt", "completion", "prompt_ids", "completion_ids", "row", WHOLE)
"""Names that a reward function can ask for besides the columns of the row; ``row`` is the whole row."""

MEDIA = "media"
"""Name that stands for the images and sounds of the row's messages, where it has no such column."""

LENT = {name: f"tandem.{name}" for name in ("source", "index", "epoch")}
"""Names that stand for Tandem's own keys where the row has no such column; in an evaluation index and epoch are None."""


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
        absent = sorted(self.required - {*GIVEN, *LENT, MEDIA} - set(columns))
        if not absent:
            return None
        return (
            f"reward {self.name} needs {', '.join(map(repr, absent))}, which is no column of the row; "
            f"columns there: {', '.join(map(str, columns)) or 'none'}; always there: {', '.join(GIVEN)}"
        )

    def select(self, given: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of one call. A column called like one of `GIVEN` is reached through ``row``."""
        everything = {**{name: row.get(key) for name, key in LENT.items()}, **row, **given}
        chosen = {name: everything[name] for name in self.names if name in everything}
        if self.rest:
            chosen |= {name: value for name, value in row.items() if isinstance(name, str) and name not in GIVEN}
        return chosen


EXPECTED = 'a reward returns a number, parts such as {"correct": 1.0, "format": 0.2}, or a RewardResult'
"""The words about what a reward function may return."""


def _number(value: Any, what: str) -> float:
    number = as_float(value)
    if number is None:
        hint = "; a list for several completions is TRL's: here each completion is judged by a call of its own"
        raise RewardFailure(
            "reward_wrong_type",
            f"{what} is no number but a {type(value).__name__}, {value!r:.80}; {EXPECTED}"
            f"{hint if isinstance(value, list) else ''}",
        )
    if not math.isfinite(number):
        raise RewardFailure("reward_not_finite", f"{what} is {number}; a reward is a finite number")
    return number


def late(name: str, timeout_s: float, end: str) -> RewardFailure:
    """A call that ran past its deadline. ``end``: what was done with it."""
    return RewardFailure(
        "reward_timeout",
        f"{name} took longer than {timeout_s:g} s (reward_timeout_s={timeout_s:g}) and was {end}; make it faster, or set "
        "reward_timeout_s higher",
    )


def words_of(failure: RewardFailure, function: Callable[..., Any]) -> str:
    """The failure in words, with the file and line of the function that it failed in."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(function.__call__, "__code__", None)  # type: ignore
    place = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno} in {code.co_name})" if code else ""
    return failure.words + place


def read_outcome(value: Any) -> RewardResult:
    """Checks what a reward function returned.

    A mapping's text under ``answer`` is the answer that was found in the completion, its None that none was found.

    Raises:
        RewardFailure: ``reward_wrong_type`` or ``reward_not_finite``.
    """
    answer: str | None = None
    extracted: bool | None = None
    words: dict[str, str] = {}
    if isinstance(value, RewardResult):
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
            raise RewardFailure("reward_wrong_type", f"there is no part to sum in {value!r:.80}; {EXPECTED}")
        total = sum(_number(part, f"part {key!r}") for key, part in parts.items())
    else:
        parts, total, accuracy = {}, value, None
    rewards = {str(key): _number(part, f"part {key!r}") for key, part in parts.items()}
    total = _number(total, "the value")
    if accuracy is not None:
        accuracy = _number(accuracy, "accuracy")
        if not 0 <= accuracy <= 1:
            raise RewardFailure("reward_wrong_type", f"accuracy must lie in 0…1, got {accuracy}")
    return RewardResult(total, rewards, accuracy, answer, extracted, words)


def compared(name: str, values: Any, count: int) -> list[RewardResult]:
    """Checks what a reward that compares the samples of a group returned: a number, or a `RewardResult` with words, each.

    Raises:
        RewardFailure: ``reward_wrong_type`` or ``reward_not_finite``.
    """
    try:
        outcomes = [read_outcome(value) for value in values]
    except RewardFailure as failure:
        raise RewardFailure(failure.reason, f"{name}: {failure.words}") from failure
    except TypeError as error:
        raise RewardFailure("reward_wrong_type", f"{name} must give a list of numbers: {error}") from error
    if len(outcomes) != count:
        raise RewardFailure("reward_wrong_type", f"{name} must give each of {count} samples a number, got {len(outcomes)}")
    if any(outcome.rewards or outcome.accuracy is not None or outcome.answer is not None for outcome in outcomes):
        raise RewardFailure("reward_wrong_type", f"{name} compares: its results have a value and words, and nothing else")
    return outcomes
