"""The last words of a run."""

import json
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tandem.cli.running import describe, run_training, where
from tandem.config.experiment import TrainConfig


@dataclass(frozen=True)
class Outcome:
    """The fields of a trainer's summary."""

    folder: Path | None
    steps: int
    metrics: dict = field(default_factory=dict)
    checkpoint: Path | None = None
    evaluations: dict = field(default_factory=dict)


def arguments(root, **options):
    keys = ["train_dataset.path=addition", f"run.root={root}", "experiment_name=sums", "trial_name=first"]
    return Namespace(arguments=keys, **({"dry_run": False, "json": False, "override": False, "until": None} | options))


def train(resolved, *, dry_run=False):
    """Stands where the loop stands: prints as it does, and gives back what it gives back."""
    print("step 1/1")
    return Outcome(Path("runs/sums/first"), 1, {"reward/mean": 0.5, "gap/max": float("nan")}, evaluations={0: 0.25, 1: 0.5})


def test_the_end_says_where_everything_is():
    outcome = Outcome(Path("runs/a/b"), 3, {"reward/mean": 0.51234}, Path("runs/a/b/checkpoints/step_3"), {0: 0.25, 3: 1.0})

    assert describe(outcome).splitlines() == [
        "Done: 3 steps.",
        "Last step: reward/mean 0.5123",
        "Accuracy on the validation rows: step 0: 25.0%, step 3: 100.0%",
        "Metrics and pictures: runs/a/b",
        "Model: runs/a/b/checkpoints/step_3",
        'Try it: tandem generate runs/a/b/checkpoints/step_3 "…"',
        "Look at it: tandem view runs/a/b",
    ]


def test_json_is_the_only_thing_on_stdout(tmp_path, capsys):
    assert run_training(arguments(tmp_path, json=True), TrainConfig, lambda: train) == 0

    said = capsys.readouterr()
    outcome = json.loads(said.out)
    assert outcome["folder"] == "runs/sums/first" and outcome["metrics"] == {"reward/mean": 0.5, "gap/max": None}
    assert said.err.splitlines()[-1] == "step 1/1"


def test_only_the_first_rank_speaks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run_training(arguments(tmp_path), TrainConfig, lambda: train) == 0
    assert "Done" not in capsys.readouterr().out


def test_after_ctrl_c_one_is_told_what_is_there(tmp_path):
    assert where(arguments(tmp_path), TrainConfig) == "Nothing was written."

    folder = tmp_path / "sums" / "first"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n')
    (folder / "run.json").write_text('{"status": "interrupted"}')
    assert where(arguments(tmp_path), TrainConfig) == (
        f"{folder} has the run so far: 2 steps done; interrupted; last metrics: loss 1; no checkpoint.\n"
        "The same command starts it anew."
    )


@pytest.mark.parametrize("key", ["nonsense=1", "seed=x"])
def test_after_ctrl_c_with_a_wrong_configuration_nothing_was_started(key):
    assert where(Namespace(arguments=[key]), TrainConfig) == "Nothing was started."
