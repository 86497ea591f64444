"""Reward functions written for TRL or verl, as functions of Tandem's signature. Imports nothing heavy.

TRL: ``f(prompts, completions, **columns)`` judges a list of completions and returns a list (huggingface/trl,
``GRPOTrainer.reward_funcs``). verl: ``f(data_source, solution_str, ground_truth, extra_info)`` returns a number, or a dict
whose ``score`` is the reward (``verl/utils/reward_score``). Here a reward judges one completion.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tandem.api.workflow import RewardResult
from tandem.rewards.outcome import is_async

TRL_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""The arguments that TRL gives beside the columns; the last ones are None here, or do nothing."""

OURS = frozenset({"completion", "prompt", "prompt_ids", "row", "messages"})
"""The arguments that a function of Tandem's signature has beside ``completion_ids`` and columns."""

VERL_GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")


def origin_of(function: Callable[..., Any]) -> str:
    """``TRL`` or ``verl`` where a function has the signature of theirs, empty otherwise."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ""
    plural = "completion" not in names and not {"completions", "prompts"}.isdisjoint(names)
    rest = any(one.kind is one.VAR_KEYWORD for one in names.values())
    ids_alone = rest and "completion_ids" in names and OURS.isdisjoint(names)  # ours would name what it wants of the rest
    plural = plural or ids_alone
    trl = plural or str(getattr(function, "__module__", "")).startswith("trl.")
    return "TRL" if trl else "verl" if "solution_str" in names else ""


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or what calls it as TRL or verl do: it asks for the same columns of a row."""
    origin = origin_of(function)
    if not origin:
        return function
    theirs = inspect.signature(function).parameters
    theirs_given = TRL_GIVEN if origin == "TRL" else VERL_GIVEN
    columns = [name for name, one in theirs.items() if name not in theirs_given and one.kind is not one.VAR_KEYWORD]
    columns = [name for name in columns if origin == "TRL" or theirs[name].default is inspect.Parameter.empty]
    rest = any(one.kind is one.VAR_KEYWORD for one in theirs.values())
    arguments = _for_trl if origin == "TRL" else _for_verl
    read = _from_trl if origin == "TRL" else _from_verl

    def call(row: Mapping[str, Any], messages: bool = False, **given: Any) -> Any:
        every = arguments(given, row, messages)
        keep = {*columns, *theirs_given} if origin == "verl" else every if rest else theirs
        return function(**{name: value for name, value in every.items() if name in keep and (rest or name in theirs)})

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

    made: Any = functools.wraps(function)(called) if is_async(function) else judged
    keyword = inspect.Parameter.KEYWORD_ONLY
    asked = ("prompt", "completion", "completion_ids", "row", *(["answer"] if origin == "verl" else []))
    own = [inspect.Parameter(name, keyword) for name in asked]
    more = (theirs[name].replace(kind=keyword) for name in columns if name not in asked)
    made.__signature__ = inspect.Signature([*own, *more])
    return made


def _chat_wanted(origin: str, error: TypeError) -> bool:
    """True for a function that read texts as if they were chats, ``completion[0]["content"]``. Others raise again."""
    if origin != "TRL" or "string indices must be integers" not in str(error):
        raise error
    return True


def _for_trl(given: Mapping[str, Any], row: Mapping[str, Any], messages: bool) -> dict[str, Any]:
    """Lists of one. Prompt and completion are chats where the row's prompt is one, or the function reads ``messages``."""
    prompt, completion = given["prompt"], given["completion"]
    if messages or isinstance(row.get("prompt"), list):
        prompt, completion = row.get("messages", row.get("prompt")), [{"role": "assistant", "content": completion}]
    columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
    ignored = {"trainer_state": None, "log_extra": _nothing, "log_metric": _nothing, "environments": None}
    lists = {"prompts": [prompt], "completions": [completion], "completion_ids": [list(given["completion_ids"])]}
    return {**columns, **ignored, **lists}


def _nothing(*_: Any, **__: Any) -> None:
    """Logs nothing."""


def _from_trl(value: Any) -> Any:
    """The only entry. TRL takes None for *does not apply*, which adds nothing."""
    try:
        (only,) = value
    except (TypeError, ValueError):
        return value  # what it is not is said by whoever reads results
    return 0.0 if only is None else only


def _for_verl(given: Mapping[str, Any], row: Mapping[str, Any], messages: bool) -> dict[str, Any]:
    """The answer of a row is the ground truth: ``ground_truth`` and ``reward_model.ground_truth`` are read to it."""
    facts = {"data_source": row.get("data_source", ""), "extra_info": row.get("extra_info")}
    nested = row.get("reward_model")
    whole = nested if isinstance(nested, Mapping) else row
    truth = whole.get("ground_truth", row.get("answer"))
    return {**row, **facts, "solution_str": given["completion"], "ground_truth": truth}


def _from_verl(value: Any) -> Any:
    """``score`` of a dict is the reward, and ``acc`` the accuracy."""
    if not isinstance(value, Mapping) or "score" not in value:
        return value
    accuracy = value.get("acc")
    return RewardResult(float(value["score"]), accuracy=None if accuracy is None else float(accuracy))
