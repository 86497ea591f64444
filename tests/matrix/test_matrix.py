"""No combination does nothing silently: each runs two steps and learns, or is refused with its reason."""

import runpy

import pytest

from tests.matrix.cells import FACTORS, HERE, RAN, cover, possible
from tests.matrix.pairing import choices_of
from tests.matrix.workers import results
from tests.tiny import tiny_model_folder

ROOT = HERE.parents[1]
MUST_RUN = [line for line in (HERE / "must_run.txt").read_text().splitlines() if line]


def test_every_pair_of_choices_that_can_meet_does():
    cells = cover()
    assert len(cells) == len(set(cells)) <= 80
    for (i, a), (j, b) in choices_of(FACTORS):
        if {a, b} != {"asynchronous", "colocate"}:
            assert any(cell[i] == a and cell[j] == b and possible(cell) for cell in cells), (a, b)


def test_the_kept_list_names_cells_of_the_matrix_and_every_preset():
    cells = {str(cell): cell for cell in cover()}
    assert not set(MUST_RUN) - set(cells)
    for preset in FACTORS["preset"]:
        assert any(cells[line].preset == preset for line in MUST_RUN), preset


@pytest.mark.slow
@pytest.mark.invariant
def test_every_sixth_cell_runs_or_is_refused_as_the_page_says(tmp_path):
    cells = cover()[::6]
    found = results("tests.matrix.cells", tiny_model_folder(tmp_path, "llama"), tmp_path, cells)
    told = (ROOT / "docs/matrix.md").read_text()
    assert {str(cell) for cell in cells if found[cell] == RAN} >= {str(cell) for cell in cells} & set(MUST_RUN)
    assert not [reason for reason in found.values() if reason != RAN and reason not in told]


@pytest.mark.slow
@pytest.mark.timeout(900)  # some four minutes on a core of its own
def test_each_cell_runs_or_is_refused_as_the_page_says(tmp_path):
    found = results("tests.matrix.cells", tiny_model_folder(tmp_path, "llama"), tmp_path)
    refused = {str(cell) for cell, result in found.items() if result != RAN}
    assert not refused & set(MUST_RUN), {str(cell): found[cell] for cell in found if str(cell) in refused & set(MUST_RUN)}
    page = runpy.run_path(str(ROOT / "scripts/matrix.py"))["MATRICES"]["algorithms"].text(found)
    assert (ROOT / "docs/matrix.md").read_text() == page
