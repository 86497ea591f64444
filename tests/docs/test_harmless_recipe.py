"""The page of the helpful and harmless recipe shows what was recorded, with the limit of its configuration."""

import json
import runpy
from pathlib import Path

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "harmless_recipe.py"))


def test_the_page_shows_the_recorded_figures_and_the_limit_of_the_run():
    page, record = BENCHMARK["PAGE"].read_text(), json.loads(BENCHMARK["RECORD"].read_text())
    assert BENCHMARK["with_table"](page, record) == page
    config = load_config(TrainConfig, ROOT / "examples" / "harmless_grpo.yaml").config
    assert config.constraint.limit == BENCHMARK["LIMIT"]
