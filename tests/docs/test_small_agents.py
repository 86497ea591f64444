"""The pages of the number game and of the repository task show what was recorded."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "small_agents.py"))
RECORD = json.loads(BENCHMARK["RECORD"].read_text())


@pytest.mark.parametrize("recipe", BENCHMARK["RECIPES"])
def test_the_page_shows_the_recorded_figures(recipe):
    facts = BENCHMARK["RECIPES"][recipe]
    page = (ROOT / f"docs/recipes/{facts['page']}.md").read_text()
    assert RECORD[recipe].keys() == facts["trials"].keys()
    assert BENCHMARK["with_table"](page, recipe, RECORD[recipe]) == page
    assert (ROOT / f"docs/pictures/{facts['page']}.png").exists()
