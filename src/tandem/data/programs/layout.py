"""A layout of columns, and the requests that all of them make of a model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.api.program_tests import ProgramTests

Columns = Mapping[str, Any]

FUNCTION = "\n\nAnswer with the whole function in one block of code."
PROGRAM = (
    "\n\nWrite a Python program that reads the standard input and prints the answer. Answer with the whole program in one "
    "block of code."
)

SAME = '''
def _same(value, expected):
    """Equal, with lists and tuples alike, and decimal numbers to six digits."""
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(_same, value, expected))
    numbers = {type(value), type(expected)} <= {int, float}
    if numbers and float in (type(value), type(expected)):
        return abs(value - expected) <= 1e-6 * max(1.0, abs(expected))
    return type(value) is type(expected) and value == expected
'''
"""Setup of tests that JSON gives as arguments and result: it has no tuples."""


@dataclass(frozen=True)
class ProgramLayout:
    """One way in which data sets write programs and their tests."""

    name: str
    columns: tuple[str, ...]
    """Those that every row has, and by which it is recognised."""

    question: Callable[[Columns], str]
    """The question to the model."""

    tests: Callable[[Columns], ProgramTests | None]
    """The tests of the answer; None if the row has none. Raises `ValueError`, `KeyError` or `TypeError` if a column has
    another form than the layout says."""

    reference: Callable[[Columns], str | None]
    """A program that passes, or None."""


def fenced(code: str) -> str:
    """Code as a model should answer it."""
    return f"```python\n{code}\n```"


def text(columns: Columns, name: str) -> str:
    """A column that is text.

    Raises:
        TypeError: it is not.
    """
    value = columns[name]
    if not isinstance(value, str):
        raise TypeError(f"column {name!r} must be text, got {type(value).__name__}")
    return value


def read_json(columns: Columns, name: str) -> Any:
    """A column that is JSON in a text, or is read already; None if it is empty."""
    value = columns.get(name)
    return json.loads(value) if isinstance(value, str) and value.strip() else value or None


def call_test(name: str, arguments: list[Any], expected: list[Any]) -> str:
    """Test code of one call whose result is any of the ``expected``; needs `SAME` as setup."""
    return f"_value = {name}(*{arguments!r})\nassert any(_same(_value, one) for one in {expected!r})"
