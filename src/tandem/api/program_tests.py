"""The tests of a program in one format, the column ``program_tests`` of the row.

Two kinds. A *program* reads ``stdin`` and its ``stdout`` is compared. A *function* is called by test code, which runs in
another process and reaches the functions of the answer, ``names``, through a pipe.
"""

import ast
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.errors import ConfigError

COLUMN = "program_tests"
FORMAT = (
    '{"cases": [{"stdin": "1 2\\n", "stdout": "3\\n"}]}, or '
    '{"names": ["add"], "cases": ["assert add(1, 2) == 3"], "setup": "…", "preamble": "…"}'
)


def read_program(code: str) -> ast.Module:
    r"""The syntax tree of code from a data set. What Python only warns of, as the escape ``\w`` in a plain string, passes.

    Raises:
        SyntaxError: it is no Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)


@dataclass(frozen=True)
class StdinCase:
    """A program that reads ``stdin`` is to write ``stdout``."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class ProgramTests:
    """The tests of one row.

    Example: ``ProgramTests(("assert add(1, 2) == 3",), names=("add",))``
    """

    cases: tuple[StdinCase | str, ...]
    """All of one kind: `StdinCase`, or test code that raises if the answer is wrong."""

    names: tuple[str, ...] = ()
    """Functions of the answer that the test code calls; empty for programs."""

    setup: str = ""
    """Code that runs before the test code, in its process; the answer never sees it."""

    preamble: str = ""
    """Code that the question shows and that the answer may count on: imports, helpers, the head of a function."""

    def as_column(self) -> dict[str, Any]:
        """The same as plain data."""
        cases = [case if isinstance(case, str) else {"stdin": case.stdin, "stdout": case.stdout} for case in self.cases]
        rest = {"names": list(self.names), "setup": self.setup, "preamble": self.preamble}
        return {"cases": cases} | {name: value for name, value in rest.items() if value}

    @classmethod
    def from_column(cls, value: Any) -> "ProgramTests":
        """Reads the column.

        Raises:
            ConfigError: it has another form, mixes kinds, or has no case; says what it should be.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("cases"), list | tuple) or not value["cases"]:
            raise ConfigError(f"column {COLUMN!r} must be {FORMAT}; got {value!r:.120}")
        unknown = sorted(set(value) - {"cases", "names", "setup", "preamble"})
        if unknown:
            raise ConfigError(f"column {COLUMN!r} has no key {unknown[0]!r}; it is {FORMAT}")
        names, setup, preamble = value.get("names") or (), value.get("setup") or "", value.get("preamble") or ""
        if not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise ConfigError(f"column {COLUMN!r}: names must be a list of Python names, got {names!r:.120}")
        if not isinstance(setup, str) or not isinstance(preamble, str):
            raise ConfigError(f"column {COLUMN!r}: setup and preamble must be text")
        cases = tuple(_case(case, bool(names)) for case in value["cases"])
        if not names and (setup or preamble):
            raise ConfigError(f"column {COLUMN!r}: setup and preamble need names, the functions that the tests call")
        return cls(cases, tuple(names), setup, preamble)


def _case(case: Any, calls: bool) -> StdinCase | str:
    if calls and isinstance(case, str):
        return case
    if not calls and isinstance(case, Mapping):
        given, printed = case.get("stdin", ""), case.get("stdout")
        if isinstance(given, str) and isinstance(printed, str):
            return StdinCase(given, printed)
    wanted = "a text of test code, because there are names" if calls else "{stdin, stdout}, because there are no names"
    raise ConfigError(f"column {COLUMN!r}: a case must be {wanted}; got {case!r:.120}")
