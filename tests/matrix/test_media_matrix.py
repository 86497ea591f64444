"""What learns × which family of models that see or hear: whole runs, and the page of them."""

from pathlib import Path

import pytest

from tests.matrix.media_cells import LEARNS, RAN, cover
from tests.matrix.workers import results

PAGE = Path(__file__).parents[2] / "docs/matrix_of_media.md"


def test_the_page_of_media_has_a_line_for_all_that_learns_and_no_refusal():
    page = PAGE.read_text()
    assert [line.split(" | ")[0][2:] for line in page.splitlines() if " | runs" in line] == list(LEARNS)
    assert "refused" not in page


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.timeout(600)
def test_one_family_of_each_line_of_media_runs(tmp_path):
    """Another family from a line to the next, so that each has some."""
    cells = cover()[::6]
    found = results("tests.matrix.media_cells", tmp_path / "models", tmp_path, cells)
    assert found == dict.fromkeys(cells, RAN)
