"""Calls of reward functions: their arguments and results, in the run and in worker processes. Imports nothing heavy.

Tandem's rewards judge one completion a call. Functions that were written for other libraries are adapted:

TRL: ``f(prompts, completions, **columns)`` judges a list of completions and returns a list (huggingface/trl,
``GRPOTrainer.reward_funcs``). verl: ``f(data_source, solution_str, ground_truth, extra_info)`` returns a number, or a dict
whose ``score`` is the reward (``verl/utils/reward_score``).
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from tandem.api.environment import as_float
from tandem.api.failures import RewardFailure
from tandem.api.workflow import RewardResult

WHOLE = "completion_with_special_tokens"
GIVEN = ("prompt", "completion", "prompt_ids", "completion_ids", "row", WHOLE)
"""Arguments that a reward function can take in addition to the columns of the row. ``row`` is the whole row."""

MEDIA = "media"
"""Name of the argument for the images and sounds of the row's messages. A column of that name takes precedence."""

KEY_COLUMNS = {name: f"tandem.{name}" for name in ("source", "index", "epoch")}
"""Name of an argument → Tandem's own column of the row. A column with the argument's name takes precedence. In an
evaluation, index and epoch are None."""


def is_async(function: Callable[..., Any]) -> bool:
    """True for an ``async def`` function, and for an object whose ``__call__`` is an ``async def``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class Arguments:
    """The arguments that a function takes, read once from its signature."""

    def __init__(self, function: Callable[..., Any], name: str):
        self.name = name
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.names = {p.name for p in named}
        self.required = {p.name for p in named if p.default is p.empty}
        self.rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]

    def missing(self, columns: Mapping[str, Any]) -> str | None:
        """Returns a message about required arguments that these columns lack; None if all exist."""
        if self.positional:
            return (
                f"reward {self.name} has positional-only parameters ({', '.join(self.positional)}); it is called by keyword"
            )
        missing = sorted(self.required - {*GIVEN, *KEY_COLUMNS, MEDIA} - set(columns))
        if not missing:
            return None
        return (
            f"reward {self.name} needs {', '.join(map(repr, missing))}, which is no column of the row; "
            f"columns there: {', '.join(map(str, columns)) or 'none'}; always there: {', '.join(GIVEN)}"
        )

    def select(self, given: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of one call. Columns with a name in `GIVEN` are available only through ``row``."""
        everything = {**{name: row.get(key) for name, key in KEY_COLUMNS.items()}, **row, **given}
        chosen = {name: everything[name] for name in self.names if name in everything}
        if self.rest:
            chosen |= {name: value for name, value in row.items() if isinstance(name, str) and name not in GIVEN}
        return chosen


EXPECTED = 'a reward returns a number, parts such as {"correct": 1.0, "format": 0.2}, or a RewardResult'
"""Part of error messages: what a reward function may return."""

LARGEST = 1e18
"""The largest reward, up or down: the square of a larger one is infinite in float32."""


def _number(value: Any, label: str) -> float:
    number = as_float(value)
    if number is None:
        hint = "; a list for several completions is TRL's: here each call judges one completion"
        raise RewardFailure(
            "reward_wrong_type",
            f"{label} is no number but a {type(value).__name__}, {value!r:.80}; {EXPECTED}"
            f"{hint if isinstance(value, list) else ''}",
        )
    if not abs(number) <= LARGEST:
        raise RewardFailure("reward_not_finite", f"{label} is {number}; a reward is a finite number, at most {LARGEST:g}")
    return number


def late(name: str, timeout_s: float, end: str) -> RewardFailure:
    """Returns the failure of a call that exceeded its deadline. ``end``: how the call was ended, in words."""
    return RewardFailure(
        "reward_timeout",
        f"{name} took longer than {timeout_s:g} s (reward_timeout_s={timeout_s:g}) and was {end}; make it faster, or set "
        "reward_timeout_s higher",
    )


def words_of(failure: RewardFailure, function: Callable[..., Any]) -> str:
    """Returns the failure's message, with file and line of ``function``, which raised it."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(function.__call__, "__code__", None)  # type: ignore
    place = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno} in {code.co_name})" if code else ""
    return failure.words + place


def read_outcome(value: Any) -> RewardResult:
    """Checks the return value of a reward function.

    In a mapping, a string under ``answer`` is the answer found in the completion; None means that none was found.

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
    """Checks the return value of a reward that compares a group's samples: for each a number, or a `RewardResult` with
    words.

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


TRL_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""The arguments that TRL passes in addition to the columns. Of these, Tandem sets the last four to None or to functions that
do nothing."""

OURS = frozenset({"completion", "prompt", "prompt_ids", "row", "messages"})
"""Arguments that exist in Tandem's signature and not in TRL's. (``completion_ids`` exists in both.)"""

VERL_GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")


def origin_of(function: Callable[..., Any]) -> str:
    """Returns ``TRL`` or ``verl`` if a function has that library's signature, else an empty string."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ""
    plural = "completion" not in names and not {"completions", "prompts"}.isdisjoint(names)
    has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    # a function for Tandem would name the other arguments it needs
    ids_alone = has_kwargs and "completion_ids" in names and OURS.isdisjoint(names)
    plural = plural or ids_alone
    trl = plural or str(getattr(function, "__module__", "")).startswith("trl.")
    return "TRL" if trl else "verl" if "solution_str" in names else ""


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, or a wrapper that calls it as TRL or verl do and takes the same columns of a row."""
    origin = origin_of(function)
    if not origin:
        return function
    parameters = inspect.signature(function).parameters
    library_arguments = TRL_GIVEN if origin == "TRL" else VERL_GIVEN
    columns = [
        name
        for name, parameter in parameters.items()
        if name not in library_arguments and parameter.kind is not parameter.VAR_KEYWORD
        if origin == "TRL" or parameter.default is parameter.empty
    ]
    has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = _for_trl if origin == "TRL" else _for_verl
    read = _from_trl if origin == "TRL" else _from_verl

    def call(row: Mapping[str, Any], messages: bool = False, **named: Any) -> Any:
        values = arguments(named, row, messages)
        keep = {*columns, *library_arguments} if origin == "verl" else values if has_kwargs else parameters
        return function(
            **{name: value for name, value in values.items() if name in keep and (has_kwargs or name in parameters)}
        )

    async def called(**named: Any) -> Any:
        try:
            return read(await call(**named))
        except TypeError as error:
            return read(await call(**named, messages=_chat_wanted(origin, error)))

    @functools.wraps(function)
    def judged(**named: Any) -> Any:
        try:
            return read(call(**named))
        except TypeError as error:
            return read(call(**named, messages=_chat_wanted(origin, error)))

    wrapper: Any = functools.wraps(function)(called) if is_async(function) else judged
    keyword = inspect.Parameter.KEYWORD_ONLY
    own_names = ("prompt", "completion", "row", "answer" if origin == "verl" else "completion_ids")
    own_parameters = [inspect.Parameter(name, keyword) for name in own_names]
    if origin == "TRL" and "completion_ids" not in parameters:  # passed to **kwargs all the same, but not asked for
        own_parameters[-1] = own_parameters[-1].replace(default=())
    column_parameters = (parameters[name].replace(kind=keyword) for name in columns if name not in own_names)
    wrapper.__signature__ = inspect.Signature([*own_parameters, *column_parameters])
    return wrapper


def _chat_wanted(origin: str, error: TypeError) -> bool:
    """True if a TRL function read texts as chats, ``completion[0]["content"]``. Raises all other errors again."""
    if origin != "TRL" or "string indices must be integers" not in str(error):
        raise error
    return True


def _for_trl(given: Mapping[str, Any], row: Mapping[str, Any], messages: bool) -> dict[str, Any]:
    """Returns TRL's arguments as lists of one. Prompt and completion are chats if the row's prompt is a chat, or if
    ``messages`` is true."""
    prompt, completion = given["prompt"], given["completion"]
    if messages or isinstance(row.get("prompt"), list):
        prompt, completion = row.get("messages", row.get("prompt")), [{"role": "assistant", "content": completion}]
    columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
    ignored = {"trainer_state": None, "log_extra": _nothing, "log_metric": _nothing, "environments": None}
    lists = {"prompts": [prompt], "completions": [completion], "completion_ids": [list(given["completion_ids"])]}
    return {**columns, **ignored, **lists}


def _nothing(*_: Any, **__: Any) -> None:
    """Ignores a call of TRL's logging functions."""


def _from_trl(value: Any) -> Any:
    """Returns the only entry of the list. TRL's None means *not applicable* and becomes 0."""
    try:
        (only,) = value
    except (TypeError, ValueError):
        return value  # the reader of results reports the wrong type
    return 0.0 if only is None else only


def _for_verl(given: Mapping[str, Any], row: Mapping[str, Any], messages: bool) -> dict[str, Any]:
    """Returns verl's arguments. The ground truth is ``reward_model.ground_truth``, ``ground_truth`` or the row's answer."""
    facts = {"data_source": row.get("data_source", ""), "extra_info": row.get("extra_info")}
    nested = row.get("reward_model")
    source = nested if isinstance(nested, Mapping) else row
    truth = source.get("ground_truth", row.get("answer"))
    return {**row, **facts, "solution_str": given["completion"], "ground_truth": truth}


def _from_verl(value: Any) -> Any:
    """Returns the result: ``score`` of a dict is the reward, and ``acc`` the accuracy."""
    if not isinstance(value, Mapping) or "score" not in value:
        return value
    accuracy = value.get("acc")
    return RewardResult(float(value["score"]), accuracy=None if accuracy is None else float(accuracy))
