"""Every backend with every preset and every option: a whole run of two steps that learns, or a refusal with its reason."""

import itertools
import runpy

import pytest

from tests.matrix.backend_cells import FACTORS, HAS_ZERO, HERE, RAN, ZERO, Cell, cover, impossible, possible, refusals, row
from tests.matrix.pairing import choices_of
from tests.matrix.workers import results
from tests.tiny import tiny_model_folder

ROOT = HERE.parents[1]
PAGE = ROOT / "docs/matrix_of_backends.md"
MUST_RUN = [line for line in (HERE / "backends_must_run.txt").read_text().splitlines() if line]


def test_every_two_backend_choices_that_can_meet_do_and_the_others_are_tried_once():
    cells = cover()
    assert len(cells) == len(set(cells)) <= 120
    free = [cell for cell in cells if possible(cell)]
    assert {cell for cell in cells if not possible(cell)} == set(impossible())
    every = [cell for cell in itertools.starmap(Cell, itertools.product(*FACTORS.values())) if possible(cell)]
    for (i, a), (j, b) in choices_of(FACTORS):
        met, can_meet = (any(cell[i] == a and cell[j] == b for cell in some) for some in (free, every))
        assert met == can_meet, (a, b)


def test_the_kept_list_of_backends_names_all_cells_that_are_possible():
    assert [str(cell) for cell in cover() if possible(cell)] == MUST_RUN


@pytest.mark.slow
@pytest.mark.invariant
def test_a_twelfth_of_the_backend_cells_run_and_every_refusal_is_that_of_the_page(tmp_path):
    free = [cell for cell in cover() if possible(cell) and (HAS_ZERO or cell.backend not in ZERO)]
    cells = [*impossible(), *free[::12]]
    found = results("tests.matrix.backend_cells", tiny_model_folder(tmp_path, "llama"), tmp_path, cells)
    assert {str(cell): found[cell] for cell in free[::12]} == {str(cell): RAN for cell in free[::12]}
    lines = PAGE.read_text().splitlines()
    told = [line for backend in dict.fromkeys(cell.backend for cell in cells) for line in refusals(backend, found)]
    assert len(told) == len(impossible())
    assert not [line for line in told if line not in lines]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_cell_of_the_backends_runs_or_is_refused_as_the_page_says(tmp_path):
    cells = [cell for cell in cover() if HAS_ZERO or cell.backend not in ZERO]
    found = results("tests.matrix.backend_cells", tiny_model_folder(tmp_path, "llama"), tmp_path, cells)
    refused = {str(cell): result for cell, result in found.items() if result != RAN}
    assert not {name: refused[name] for name in refused if name in MUST_RUN}
    lines = PAGE.read_text().splitlines()
    for backend in dict.fromkeys(cell.backend for cell in cells):
        for line in (row(backend, found), *refusals(backend, found)):
            assert line in lines
    if HAS_ZERO:
        assert PAGE.read_text() == runpy.run_path(str(ROOT / "scripts/matrix.py"))["MATRICES"]["backends"].text(found)
