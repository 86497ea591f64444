"""Syntax trees of the repository's files, for tests that read the source."""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest


@cache
def tree_of(path: Path) -> ast.Module:
    """The tree of a file, read once for all tests of a module that look at it."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of the file, in the order of `ast.walk`."""
    return list(ast.walk(tree_of(path)))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Turns the collection of garbage off while a module reads source: parsing would set off so many that they take most of
    the time. Forgets all trees afterwards, which later collections would walk over."""
    gc.disable()
    try:
        yield
    finally:
        tree_of.cache_clear()
        nodes_of.cache_clear()
        gc.enable()
