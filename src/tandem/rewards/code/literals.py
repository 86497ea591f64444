"""Python literals as JSON: how arguments and results travel between the processes of the judge.

This file runs in the judge and inside the sandboxes, whose text it becomes: it imports the standard library only. What is
decoded is of exactly the types below, so nothing that a candidate sends has behaviour of its own.
"""

import json
import math
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

MAX_DEPTH = 100
"""Deepest nesting of a value."""

LONG_INT = 1 << 63
"""Larger whole numbers travel in base 16, because Python refuses to read thousands of decimal digits."""

FACTORIES = {f"d{kind.__name__}": partial(defaultdict, kind) for kind in (int, float, str, list, dict, set)}
MAPPINGS: dict[str, Callable[[], dict[Any, Any]]] = {"o": OrderedDict, "n": Counter, "d": dict, **FACTORIES}
"""Mark of a dict → what makes an empty one."""


class NotLiteral(ValueError):
    """A value that is no literal; the text names its type."""


def encode(value: Any, depth: int = 0) -> Any:
    """The value as what `json` can write. A subclass, such as a named tuple, travels as its base type; of dict also
    ``OrderedDict``, ``Counter``, and ``defaultdict`` of a plain type, for code that is given one relies on what it does.

    Raises:
        NotLiteral: another type, or nested too deep.
    """
    if depth > MAX_DEPTH:
        raise NotLiteral(f"nested deeper than {MAX_DEPTH}")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        whole = int.__int__(value)
        return whole if -LONG_INT < whole < LONG_INT else {"i": hex(whole)}
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else {"f": repr(number)}
    if isinstance(value, complex):
        return {"c": [encode(value.real), encode(value.imag)]}
    if isinstance(value, bytes):
        return {"b": bytes.hex(value)}
    if isinstance(value, dict):
        kind, mark = next(
            (kind, mark) for mark, kind in MAPPINGS.items() if isinstance(kind, type) and isinstance(value, kind)
        )
        if isinstance(value, defaultdict):
            mark = next((mark for mark, made in FACTORIES.items() if made.args[0] is value.default_factory), mark)
        return {mark: [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in kind.items(value)]}
    for kind, mark in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            items = [encode(item, depth + 1) for item in kind.__iter__(value)]
            return items if mark == "l" else {mark: items}
    raise NotLiteral(type(value).__name__)


def decode(value: Any, depth: int = 0) -> Any:
    """The value that `encode` was given.

    Raises:
        ValueError, TypeError: it has not the form that `encode` gives.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [decode(item, depth + 1) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("no literal")
    ((mark, inner),) = value.items()
    if mark == "i":
        return int(inner, 16)
    if mark == "f":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[inner]
    if mark == "c":
        real, imaginary = (decode(part) for part in inner)
        return complex(real, imaginary)
    if mark == "b":
        return bytes.fromhex(inner)
    if mark in MAPPINGS:
        made = MAPPINGS[mark]()
        made.update({decode(key, depth + 1): decode(item, depth + 1) for key, item in inner})
        return made
    return {"t": tuple, "s": set, "z": frozenset}[mark](decode(item, depth + 1) for item in inner)


def write(message: dict[str, Any]) -> bytes:
    """A message as one line."""
    return json.dumps(message).encode() + b"\n"


def take_pipes() -> tuple[BinaryIO, Callable[[dict[str, Any]], None]]:
    """The lines that the judge sends, and the function that answers it. What the program itself reads and prints from now on
    is nothing and goes nowhere."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 0)
    os.dup2(silence, 1)

    def send(message: dict[str, Any]) -> None:
        line = write(message)
        while line:
            line = line[os.write(answers, line) :]

    return requests, send
