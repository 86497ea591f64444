"""The page of two models that talk shows what was recorded."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "two_models.py"))


def test_the_page_shows_the_recorded_figures():
    page, record = BENCHMARK["PAGE"].read_text(), json.loads(BENCHMARK["RECORD"].read_text())
    assert BENCHMARK["with_table"](page, record) == page
    assert BENCHMARK["PICTURE"].exists()
