"""Docstrings are noun phrases or sentences: none begins in the middle of one. One word names one thing, and the name of a
test is a sentence of at most 80 characters."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.syntax import nodes_of, tree_of, trees  # noqa: F401 the fixture is for all tests here

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
FRAGMENT = re.compile(r"(Of|What|Whether|Which|Where|See|As|None|That|How)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Every string that stands alone: the docstrings of modules, classes, functions, and those under fields."""
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_no_docstring_begins_in_the_middle_of_a_sentence():
    fragments = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()[:60]}"
        for folder in ("src", "scripts", "benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(path)
        if FRAGMENT.match(text.strip())
    ]
    assert not fragments


def test_a_class_name_stands_for_one_class():
    homes: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    repeated = {name: files for name, files in homes.items() if len(files) > 1}
    assert not repeated, "name each after what sets it apart: a reader searches for one and finds the other"


def test_the_name_of_a_test_has_at_most_80_characters():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_") and len(node.name) > 80
    ]
    assert not long, "say the same in fewer words"
