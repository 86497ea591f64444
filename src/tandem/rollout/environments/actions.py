"""Reads an action from a reply of the model."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

from tandem.api.environment import InvalidAction
from tandem.config.errors import ConfigError

Reading = Literal["text", "last_word", "last_line", "number", "regex", "json"]

WORD = re.compile(r"[^\W_]+(?:['_-][^\W_]+)*")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reader(reading: Reading, pattern: str | None = None) -> Callable[[str], Any]:
    """The function that reads an action; it raises `InvalidAction`, with words for the model, where there is none.

    Raises:
        ConfigError: no such reading, or a pattern that is missing, too many, or wrong.
    """
    if reading not in get_args(Reading):
        raise ConfigError(f"action must be one of {', '.join(get_args(Reading))}, got {reading!r}")
    if (pattern is not None) != (reading == "regex"):
        raise ConfigError("action=regex and pattern belong together: set both, as in pattern='<move>(.*?)</move>', or none")
    if pattern is None:
        return {"text": _text, "last_word": _last_word, "last_line": _last_line, "number": _number, "json": _json}[reading]
    try:
        return partial(_match, re.compile(pattern, re.DOTALL))
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is no regular expression: {error}") from error


def _text(reply: str) -> str:
    if not reply.strip():
        raise InvalidAction("Your reply is empty.")
    return reply.strip()


def _last_word(reply: str) -> str:
    words = WORD.findall(reply)
    if not words:
        raise InvalidAction("Your reply has no word in it.")
    return str(words[-1])


def _last_line(reply: str) -> str:
    return _text(reply).splitlines()[-1].strip()


def _number(reply: str) -> int | float:
    numbers = NUMBER.findall(reply)
    if not numbers:
        raise InvalidAction("Your reply has no number in it.")
    return float(numbers[-1]) if "." in numbers[-1] else int(numbers[-1])


def _match(pattern: re.Pattern[str], reply: str) -> str:
    last = next(iter(list(pattern.finditer(reply))[::-1]), None)
    if last is None:
        raise InvalidAction("Your reply does not have the right form.")
    return (last[1] if pattern.groups else last[0]) or ""


def _json(reply: str) -> dict[str, Any]:
    decoder, place, last = json.JSONDecoder(), reply.find("{"), None
    while place >= 0:
        try:
            last, end = decoder.raw_decode(reply, place)
        except (ValueError, RecursionError):
            end = place + 1
        place = reply.find("{", end)
    if not isinstance(last, dict):
        raise InvalidAction("Your reply has no JSON object in it.")
    return last
