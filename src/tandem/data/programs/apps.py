"""APPS (arXiv:2105.09938): competition problems with inputs and outputs, of a program or of a function ``fn_name``."""

from tandem.api.program_tests import ProgramTests, StdinCase
from tandem.data.programs.layout import FUNCTION, PROGRAM, SAME, Columns, ProgramLayout, call_test, fenced, read_json, text


def tests(columns: Columns) -> ProgramTests | None:
    """A case for each input; None if the row has none."""
    tables = read_json(columns, "input_output")
    if not tables or not tables["inputs"]:
        return None
    pairs = list(zip(tables["inputs"], tables["outputs"], strict=True))
    name = tables.get("fn_name")
    if name is None:
        return ProgramTests(tuple(StdinCase(as_text(given), as_text(expected)) for given, expected in pairs))
    # an output may be the result, or a list that holds the result alone
    cases = [
        call_test(name, given, [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else ())])
        for given, expected in pairs
    ]
    return ProgramTests(tuple(cases), (name,), setup=SAME)


def as_text(lines: str | list[str]) -> str:
    """Inputs and outputs are texts, or lists of lines."""
    return lines if isinstance(lines, str) else "\n".join(map(str, lines))


def question(columns: Columns) -> str:
    """The statement, the code to begin with if there is some, and the form of the answer."""
    tables = read_json(columns, "input_output") or {}
    starter = columns.get("starter_code") or ""
    begin = f"\n\nBegin with this code:\n\n```python\n{starter.strip()}\n```" if starter.strip() else ""
    return text(columns, "question").strip() + begin + (FUNCTION if tables.get("fn_name") else PROGRAM)


def reference(columns: Columns) -> str | None:
    """The first of the solutions."""
    solutions = read_json(columns, "solutions")
    return fenced(solutions[0]) if solutions else None


APPS = ProgramLayout("apps", ("question", "solutions", "input_output"), question, tests, reference)
