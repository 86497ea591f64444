"""JSON that somebody else wrote, as a value: strict, bounded in depth, its values counted before they are made.

Imports little: a long body is parsed by a process that imports this file alone.
"""

import json
import marshal
import math
import sys
from typing import Any, NoReturn

from tandem.protocol.refusal import Refusal
from tandem.protocol.schema import Schema, SchemaError, check_value

MAX_VALUES = 1 << 20
"""Most values of a JSON text, see `count_values`."""

MAX_DEPTH = 64
"""Deepest nesting of a JSON text that stands in another."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text:.40} is too large a number")
    return value


STRICT = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
"""JSON as its standard has it: no NaN, and no number that would be infinite. Raises `ValueError`."""


def parse(raw: bytes | bytearray, schema: Schema, max_depth: int) -> dict[str, Any]:
    """The value of a body, if the schema allows it; raises `Refusal`."""
    try:
        return check_value(load(raw, max_depth), schema)
    except SchemaError as failure:
        raise Refusal(400, str(failure), param=failure.where or None) from None
    except ValueError as error:
        raise Refusal(400, f"the body {error}") from None


def load(raw: bytes | bytearray, max_depth: int = MAX_DEPTH) -> Any:
    """The value of a JSON text. Raises `ValueError`: it has none; a sentence without its subject."""
    if count_values(raw) > MAX_VALUES:
        raise ValueError(f"must have at most {MAX_VALUES} values, where an array or object counts as 16")
    try:
        value = STRICT.decode(raw.decode())
        check_depth(value, max_depth)
    except RecursionError:
        raise ValueError(f"must be nested at most {max_depth} deep") from None
    except UnicodeEncodeError:
        raise ValueError("has half a character (an unpaired surrogate)") from None
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None
    return value


def count_values(raw: bytes | bytearray) -> int:
    """The number of values in a JSON text, known in one pass before they are made.

    An array or an object counts as 16, because it takes so much more memory and time than a number.
    """
    outside = b"".join(raw.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])  # of strings
    return outside.count(b",") + 16 * (outside.count(b"[") + outside.count(b"{"))


def check_depth(value: Any, max_depth: int = MAX_DEPTH) -> None:
    """Raises `RecursionError` where objects and arrays are nested deeper, and `UnicodeEncodeError` where a string anywhere
    holds half a character."""
    level = [value]
    for _ in range(max_depth + 1):
        inner: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                inner += entry.values()
                inner += entry.keys()
            elif isinstance(entry, list):
                inner += entry
            elif isinstance(entry, str) and not entry.isascii():
                entry.encode()
        if not inner:
            return
        level = inner
    raise RecursionError


def main() -> None:
    """Parses one body in a process of its own: what it needs goes with the process."""
    how = marshal.load(sys.stdin.buffer)
    try:
        parsed: tuple[Any, ...] = (parse(sys.stdin.buffer.read(), *how), 0, "", None)
    except Refusal as refusal:
        parsed = ({}, refusal.status, refusal.message, refusal.param)
    marshal.dump(parsed, sys.stdout.buffer)
