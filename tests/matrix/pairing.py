"""Pairwise cover: of all combinations of some choices a few in which every two of them that can meet do."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

C = TypeVar("C", bound=tuple)


def pairs(cell: tuple) -> set:
    return set(itertools.combinations(enumerate(cell), 2))


def pairwise(candidates: Iterable[C]) -> list[C]:
    """Cells in which every pair occurs that occurs in ``candidates``: the one with the most new pairs comes next."""
    candidates = list(candidates)
    missing, chosen = set().union(*map(pairs, candidates)), []
    while missing:
        best = max(candidates, key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def choices_of(factors: Mapping[str, Iterable[object]]) -> Iterator[tuple[tuple[int, object], tuple[int, object]]]:
    """Every two choices of different factors, each with the place of its factor in a cell."""
    for (i, first), (j, second) in itertools.combinations(enumerate(factors.values()), 2):
        yield from (((i, a), (j, b)) for a, b in itertools.product(first, second))
