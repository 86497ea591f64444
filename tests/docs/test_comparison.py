"""The page that compares the presets says what was recorded, and every preset was."""

import runpy
from pathlib import Path

from tandem.config.algorithm import PRESETS

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "compare_algorithms.py"))
RUNS = BENCHMARK["records"]()


def test_the_page_shows_the_recorded_runs():
    page = (ROOT / "docs" / "comparison.md").read_text()
    assert BENCHMARK["with_table"](page, RUNS) == page


def test_every_preset_went_from_below_three_tenths_to_the_goal():
    learnt = [run for run in RUNS if not run.shuffled]
    assert [run.preset for run in learnt] == list(PRESETS)
    assert all(run.first < 0.3 and run.reached for run in learnt)


def test_no_preset_learnt_from_shuffled_rewards():
    steps = {(run.preset, run.seed): run.steps for run in RUNS if not run.shuffled}
    controls = [run for run in RUNS if run.shuffled]
    assert {run.preset for run in controls} == set(PRESETS)
    assert all(run.last < 0.3 and run.steps == steps[run.preset, run.seed] for run in controls)


def test_what_a_page_says_of_the_addition_example_was_part_of_its_run():
    assert all(set(PRESETS[run.preset].example.split()) <= set(run.settings) for run in RUNS)
