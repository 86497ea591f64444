"""The recipe of docs/constraints.md runs by its commands, and comes to what the page says."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tandem.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def last(run: Path, count: int) -> dict[str, float]:
    """Means over the last lines of a run's metrics."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-count:]
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0] if all(name in row for row in rows)}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_recipe_keeps_the_cost_below_its_limit_and_the_control_does_not(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/constraints.md").read_text(), re.M | re.S)
    for line in block.splitlines():
        program, *words = shlex.split(line)
        if program == "python":
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")
        else:
            assert main([*words, "threads=1", "tracking.plot_every_steps=null"]) == 0, line
    runs = tmp_path / "runs" / "harmless"
    assert last(runs / "reward", 1)["eval/accuracy"] >= 0.85
    cost = last(runs / "cost", 1)
    assert cost["eval/accuracy"] >= 0.9 and cost["eval/accuracy/safety"] >= 0.9
    held, free = last(runs / "constrained", 5), last(runs / "free", 5)
    assert held["constraint/cost"] <= -0.8 < 0 < free["constraint/cost"]
    assert held["accuracy"] >= 0.8 > 0.2 >= free["accuracy"]  # the truth: answers without a shortcut
    assert held["reward/mean"] > 0.5  # and helpful all the same
