"""MBPP (arXiv:2108.07732): a sentence, and three assertions of which the question shows the first."""

import ast
import builtins

from tandem.api.program_tests import ProgramTests, read_program
from tandem.data.programs.layout import FUNCTION, Columns, ProgramLayout, fenced, text


def tests(columns: Columns) -> ProgramTests:
    """A case for each assertion."""
    cases = columns["test_list"]
    if not isinstance(cases, list) or not all(isinstance(case, str) for case in cases):
        raise TypeError("column 'test_list' must be a list of texts")
    setup = columns.get("test_setup_code") or ""
    used = names_read("\n".join([setup, *cases]))
    defined = names_defined(text(columns, "code"))
    imports = "\n".join(ast.unparse(node) for node in ast.walk(defined_tree(text(columns, "code"))) if is_import(node))
    names = tuple(name for name in used if name in defined) or tuple(n for n in used if not hasattr(builtins, n))
    return ProgramTests(tuple(cases), names, setup="\n".join(filter(None, [imports, setup])))


def is_import(node: ast.AST) -> bool:
    """True for ``import …`` and ``from … import …``: tests may use what their reference imports."""
    return isinstance(node, ast.Import | ast.ImportFrom)


def defined_tree(code: str) -> ast.Module:
    """The reference, read.

    Raises:
        ValueError: it is no Python.
    """
    try:
        return read_program(code)
    except SyntaxError as error:
        raise ValueError(f"the reference is no Python: {error}") from error


def names_defined(code: str) -> set[str]:
    """Functions and classes at the top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assigned = {
        target.id
        for node in defined_tree(code).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {node.name for node in defined_tree(code).body if isinstance(node, kinds)} | assigned


def names_read(code: str) -> list[str]:
    """Names that code uses, in their order."""
    nodes = [node for node in ast.walk(defined_tree(code)) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(node.id for node in nodes if isinstance(node.ctx, ast.Load)))


def question(columns: Columns) -> str:
    """The sentence and the first assertion, which shows name and arguments; the other assertions stay hidden."""
    return f"{text(columns, 'text').strip()}\n\nIt must pass this test:\n{columns['test_list'][0].strip()}{FUNCTION}"


MBPP = ProgramLayout(
    name="mbpp",
    columns=("text", "code", "test_list"),
    question=question,
    tests=tests,
    reference=lambda columns: fenced(text(columns, "code")),
)
