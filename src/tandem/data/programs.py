"""Programming data sets. Each layout of columns turns its tests into `ProgramTests`.

To add a layout, write a `ProgramLayout` and add it to `LAYOUTS`.
"""

import ast
import base64
import builtins
import json
import pickletools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.api.sandbox import COLUMN, ProgramTests, StdinCase, read_program

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
"""Setup of tests whose arguments and results come from JSON. JSON has no tuples, so lists and tuples count as equal."""


@dataclass(frozen=True)
class ProgramLayout:
    """A format in which data sets store programs and their tests."""

    name: str
    columns: tuple[str, ...]
    """Columns that every row has; rows with these columns are recognised as this layout."""

    question: Callable[[Columns], str]
    """Returns the question to the model."""

    tests: Callable[[Columns], ProgramTests | None]
    """Returns the tests of the answer; None if the row has none. Raises `ValueError`, `KeyError` or `TypeError` if a column
    does not have the layout's format."""

    reference: Callable[[Columns], str | None]
    """Returns a program that passes the tests, or None."""


def fenced(code: str) -> str:
    """Puts code into a Markdown code block, as in a model's answer."""
    return f"```python\n{code}\n```"


def text(columns: Columns, name: str) -> str:
    """Returns the value of a text column.

    Raises:
        TypeError: the value is not text.
    """
    value = columns[name]
    if not isinstance(value, str):
        raise TypeError(f"column {name!r} must be text, got {type(value).__name__}")
    return value


def read_json(columns: Columns, name: str) -> Any:
    """Returns the value of a column with JSON text or with an already parsed value; None if it is empty."""
    value = columns.get(name)
    return json.loads(value) if isinstance(value, str) and value.strip() else value or None


def call_test(name: str, arguments: list[Any], expected: list[Any]) -> str:
    """Returns code that tests one call, whose result must equal one of ``expected``. Needs `SAME` as setup."""
    return f"_value = {name}(*{arguments!r})\nassert any(_same(_value, one) for one in {expected!r})"


def contest_question(columns: Columns, name: str, starter: str, calls: bool) -> str:
    """Builds a contest's question: the problem statement in the column ``name``, the starter code if any, and the required
    format of the answer. ``calls``: the answer is a function that the tests call."""
    begin = f"\n\nBegin with this code:\n\n```python\n{starter}\n```" if starter.strip() else ""
    return text(columns, name).strip() + begin + (FUNCTION if calls else PROGRAM)


# HumanEval (arXiv:2107.03374): complete a function with a given signature and docstring; ``check(candidate)`` tests it


def humaneval_tests(columns: Columns) -> ProgramTests:
    """Returns one test case, which is the whole ``check``. The prompt is the preamble of the tests, so that they use the
    data set's version of its helper functions."""
    name = text(columns, "entry_point")
    return ProgramTests((f"{text(columns, 'test')}\ncheck({name})",), (name,), preamble=text(columns, "prompt"))


HUMANEVAL = ProgramLayout(
    name="humaneval",
    columns=("task_id", "prompt", "canonical_solution", "test", "entry_point"),
    question=lambda columns: f"Complete this function.\n\n```python\n{text(columns, 'prompt').strip()}\n```{FUNCTION}",
    tests=humaneval_tests,
    reference=lambda columns: fenced(text(columns, "prompt") + text(columns, "canonical_solution")),
)

# MBPP (arXiv:2108.07732): a task in one sentence with three assertions; the question shows the first


def mbpp_tests(columns: Columns) -> ProgramTests:
    """Returns a test case for each assertion. Tests may use the modules that the reference program imports."""
    cases = columns["test_list"]
    if not isinstance(cases, list) or not all(isinstance(case, str) for case in cases):
        raise TypeError("column 'test_list' must be a list of texts")
    setup = columns.get("test_setup_code") or ""
    names = [node for node in ast.walk(parsed("\n".join([setup, *cases]))) if isinstance(node, ast.Name)]
    used = dict.fromkeys(node.id for node in names if isinstance(node.ctx, ast.Load))
    reference = parsed(text(columns, "code"))
    imports = [ast.unparse(node) for node in ast.walk(reference) if isinstance(node, ast.Import | ast.ImportFrom)]
    defined = names_defined(reference)
    called = tuple(name for name in used if name in defined) or tuple(n for n in used if not hasattr(builtins, n))
    return ProgramTests(tuple(cases), called, setup="\n".join(filter(None, [*imports, setup])))


def parsed(code: str) -> ast.Module:
    """Parses the reference program.

    Raises:
        ValueError: the code is not valid Python.
    """
    try:
        return read_program(code)
    except SyntaxError as error:
        raise ValueError(f"the reference is not valid Python: {error}") from error


def names_defined(program: ast.Module) -> set[str]:
    """Returns the names of functions, classes and variables that are defined at the top level."""
    targets = [target for node in program.body if isinstance(node, ast.Assign) for target in node.targets]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assigned = {target.id for target in targets if isinstance(target, ast.Name)}
    return {node.name for node in program.body if isinstance(node, kinds)} | assigned


def mbpp_question(columns: Columns) -> str:
    """Builds the question: the task and the first assertion, which shows the function's name and arguments. The other
    assertions stay hidden."""
    return f"{text(columns, 'text').strip()}\n\nIt must pass this test:\n{columns['test_list'][0].strip()}{FUNCTION}"


MBPP = ProgramLayout(
    name="mbpp",
    columns=("text", "code", "test_list"),
    question=mbpp_question,
    tests=mbpp_tests,
    reference=lambda columns: fenced(text(columns, "code")),
)

# LiveCodeBench (arXiv:2403.07974): contest problems with public and hidden tests of a program or a class ``Solution``

MOST_BYTES = 1 << 28
"""Maximum number of bytes of the unpacked hidden tests of one problem."""


def livecodebench_tests(columns: Columns) -> ProgramTests | None:
    """Returns the public and the hidden test cases; None if there are none."""
    cases = [*(read_json(columns, "public_test_cases") or ()), *private_cases(columns["private_test_cases"])]
    name = function_name(columns)
    if not cases:
        return None
    if name is None:
        return ProgramTests(tuple(StdinCase(case["input"], case["output"]) for case in cases))
    calls = [
        call_test(name, [json.loads(line) for line in case["input"].split("\n") if line], [json.loads(case["output"])])
        for case in cases
    ]
    return ProgramTests(tuple(calls), (name,), setup=SAME)


def private_cases(packed: Any) -> list[dict[str, Any]]:
    """Reads the hidden cases from JSON, or from base64 of zlib-compressed, pickled JSON text. For safety the pickle is not
    loaded; only its text is extracted. Raises `ValueError` if the pickle does not hold exactly one text."""
    if not isinstance(packed, str) or not packed.strip():
        return list(packed or ())
    if packed.lstrip().startswith("["):
        return list(json.loads(packed))
    unzip = zlib.decompressobj()
    pickled = unzip.decompress(base64.b64decode(packed), MOST_BYTES)
    texts = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str | bytes)]
    if len(texts) != 1:
        raise ValueError("column 'private_test_cases' must hold one pickled text")
    return list(json.loads(texts[0]))


def function_name(columns: Columns) -> str | None:
    """Returns the name of the method of ``Solution`` that the tests call; None for programs."""
    name = (read_json(columns, "metadata") or {}).get("func_name")
    return None if name is None else str(name)


def livecodebench_question(columns: Columns) -> str:
    """Builds the question; see `contest_question`."""
    starter = (columns.get("starter_code") or "").rstrip()
    return contest_question(columns, "question_content", starter, bool(function_name(columns)))


LIVECODEBENCH = ProgramLayout(
    name="livecodebench",
    columns=("question_content", "public_test_cases", "private_test_cases"),
    question=livecodebench_question,
    tests=livecodebench_tests,
    reference=lambda columns: None,
)

# APPS (arXiv:2105.09938): competition problems with inputs and outputs of a program, or of a function ``fn_name``


def apps_tests(columns: Columns) -> ProgramTests | None:
    """Returns a test case for each input; None if the row has no inputs."""
    tables = read_json(columns, "input_output")
    if not tables or not tables["inputs"]:
        return None
    pairs = list(zip(tables["inputs"], tables["outputs"], strict=True))
    name = tables.get("fn_name")
    if name is None:
        return ProgramTests(tuple(StdinCase(as_text(stdin), as_text(expected)) for stdin, expected in pairs))
    # an output may be the result, or a list with only the result
    cases = [
        call_test(name, arguments, [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else ())])
        for arguments, expected in pairs
    ]
    return ProgramTests(tuple(cases), (name,), setup=SAME)


def as_text(lines: str | list[str]) -> str:
    """Returns an input or output as text; the data set has texts or lists of lines."""
    return lines if isinstance(lines, str) else "\n".join(map(str, lines))


def apps_question(columns: Columns) -> str:
    """Builds the question; see `contest_question`."""
    tables = read_json(columns, "input_output") or {}
    return contest_question(columns, "question", (columns.get("starter_code") or "").strip(), bool(tables.get("fn_name")))


def apps_reference(columns: Columns) -> str | None:
    """Returns the first solution, or None if the row has none."""
    solutions = read_json(columns, "solutions")
    return fenced(solutions[0]) if solutions else None


APPS = ProgramLayout("apps", ("question", "solutions", "input_output"), apps_question, apps_tests, apps_reference)

LAYOUTS = (HUMANEVAL, MBPP, LIVECODEBENCH, APPS)


def find_layout(columns: Mapping[str, Any]) -> ProgramLayout | None:
    """Returns the layout with these columns; None for rows without programs, or with tests in Tandem's format already."""
    if COLUMN in columns:
        return None
    return next((layout for layout in LAYOUTS if set(layout.columns) <= set(columns)), None)
