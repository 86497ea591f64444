"""HumanEval (arXiv:2107.03374): complete a function whose head and docstring are given; ``check(candidate)`` tests it."""

from tandem.api.program_tests import ProgramTests
from tandem.data.programs.layout import FUNCTION, Columns, ProgramLayout, fenced, text


def tests(columns: Columns) -> ProgramTests:
    """One case, the whole ``check``. The prompt is the preamble: in the tests its helpers are the data set's own."""
    name = text(columns, "entry_point")
    return ProgramTests((f"{text(columns, 'test')}\ncheck({name})",), (name,), preamble=text(columns, "prompt"))


HUMANEVAL = ProgramLayout(
    name="humaneval",
    columns=("task_id", "prompt", "canonical_solution", "test", "entry_point"),
    question=lambda columns: f"Complete this function.\n\n```python\n{text(columns, 'prompt').strip()}\n```{FUNCTION}",
    tests=tests,
    reference=lambda columns: fenced(text(columns, "prompt") + text(columns, "canonical_solution")),
)
