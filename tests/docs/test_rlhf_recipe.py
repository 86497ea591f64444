"""The page of RLHF on a laptop shows what was recorded."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "rlhf_recipe.py"))


def test_the_page_shows_the_recorded_figures():
    page, record = BENCHMARK["PAGE"].read_text(), json.loads(BENCHMARK["RECORD"].read_text())
    assert BENCHMARK["with_table"](page, record) == page


def test_the_kl_of_an_answer_is_that_of_its_tokens_and_a_curve_is_smoothed_backwards():
    assert BENCHMARK["answer_kl"]({"kl/reference": 0.1, "completion_length/mean": 20.0}) == 2.0
    assert BENCHMARK["smooth"]([1.0, 3.0, 5.0, 7.0, 9.0, 11.0]) == [1.0, 2.0, 3.0, 5.0, 7.0, 9.0]
