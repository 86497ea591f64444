"""The table of metrics and the page made from it."""

import re
from pathlib import Path

import pytest

from tandem.tracking.catalog import METRICS, explain, markdown
from tandem.tracking.plots import PANELS
from tandem.tracking.tracker import PARTS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

PROMISED = [
    "reward/mean",
    "reward/std",
    "loss",
    "grad_norm",
    "lr",
    "entropy",
    "kl/rollout_proximal",
    "clip_fraction",
    "groups/without_spread",
    "completion_length/mean",
    "staleness/mean",
    "staleness/max",
    "time/step_s",
    "time/generate_s",
    "time/train_s",
    "time/update_weights_s",
    "time/overlap",
    "tokens_per_s/generate",
    "tokens_per_s/train",
    "episodes/trained",
    "episodes/dropped/<reason>",
    "memory/peak_gib",
    "gap/mean",
    "gap/max",
]


def test_the_page_is_the_table():
    assert PAGE.read_text() == markdown(), "run: python -m tandem.tracking.catalog > docs/metrics.md"


@pytest.mark.parametrize("name", PROMISED)
def test_each_promised_metric_is_explained(name):
    assert all(METRICS[name])


def test_what_is_drawn_or_printed_is_explained():
    shown = {metric for _, metrics in PANELS for metric in metrics} | {name for name, _ in PARTS}

    assert [name for name in sorted(shown - {"episodes/dropped", "samples/failed"}) if explain(name) is None] == []


def test_names_with_a_free_part_are_found():
    assert explain("episodes/dropped/reward_timeout") == METRICS["episodes/dropped/<reason>"]
    assert explain("reward/mean") == METRICS["reward/mean"]
    assert explain("something/else") is None


def test_the_table_holds_no_character_that_breaks_it():
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]

    assert len(rows) == len(METRICS)
    assert all(len(re.findall(r"\|", row)) == 5 for row in rows)
