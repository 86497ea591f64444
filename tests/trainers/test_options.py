"""Options through the command: what they promise is seen in what was trained."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli.main import main

REWARDS = Path(__file__).parent / "small_rewards.py"


def command(overrides, *more):
    return ["train", *{item.partition("=")[0]: item for item in [*overrides, *more]}.values()]


def rows(tmp_path):
    (metrics,) = tmp_path.glob("*/*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def samples(tmp_path):
    return [json.loads(line) for file in tmp_path.glob("*/*/trajectories/*") for line in file.read_text().splitlines()]


def test_more_episodes_are_started_than_are_needed_and_the_stragglers_are_counted(overrides, tmp_path):
    items = ["rollout.oversample=1.5", "total_train_steps=2", f"reward={REWARDS}:slow_now_and_then"]
    assert main(command(overrides, *items)) == 0
    last = rows(tmp_path)[-1]
    assert last["episodes/trained"] == 2 * 4
    assert last["episodes/dropped/oversampled"] == 2 * 2  # 6 are started for each batch of 4
    assert last["groups/size"] == 4


@pytest.mark.parametrize(("smallest", "trains"), [(2, True), (8, False)])
def test_a_group_that_lost_samples_is_trained_down_to_the_smallest_size(overrides, tmp_path, capsys, smallest, trains):
    items = [f"rollout.min_group_size={smallest}", f"reward={REWARDS}:fails_now_and_then", "gconfig.n_samples=8"]
    items += [
        "rollout.batch_size=2",
        "total_train_steps=2",
        "rollout.max_data_failures=20",
        "tracking.trajectories_per_step=99",
    ]
    assert main(command(overrides, *items)) == (0 if trains else 1)
    if trains:
        assert 2 <= rows(tmp_path)[-1]["groups/size"] < 8
    else:
        assert "reward_raised" in capsys.readouterr().err  # every group is dropped, by the reason of its first failure


@pytest.mark.parametrize("item", ["gconfig.top_k=1", "gconfig.top_p=0.0001"])
def test_truncated_sampling_is_refused_unless_it_is_allowed_and_then_it_truncates(overrides, tmp_path, capsys, item):
    assert main(command(overrides, item)) == 2
    assert "algorithm.allow_truncated_sampling=true" in capsys.readouterr().err
    allowed = ["algorithm.allow_truncated_sampling=true", "total_train_steps=1", "tracking.trajectories_per_step=99"]
    assert main(command(overrides, item, *allowed)) == 0
    (row,) = rows(tmp_path)
    assert row["groups/without_spread"] == 1  # one token is left to draw from: all samples of a prompt are the same
    by_prompt = {}
    for sample in samples(tmp_path):
        by_prompt.setdefault(sample["group"], []).append(sample["completion"])
    assert [len(set(texts)) for texts in by_prompt.values()] == [1] * 4
    assert row["gap/max"] < 1e-3  # log-probabilities are those before the truncation, as the trainer computes them


def test_a_run_with_two_limits_says_which_one_ends_it(overrides, tmp_path, caplog):
    assert main(command(overrides, "total_train_steps=1", "total_train_epochs=1", "train_dataset.size=8")) == 0
    assert "total_train_steps=1 ends the run, before total_train_epochs=1 (2 steps)" in caplog.text
    assert len(rows(tmp_path)) == 1


def test_a_dry_run_of_fine_tuning_says_what_a_step_is_and_makes_nothing(model, tmp_path, capsys):
    items = [f"run.root={tmp_path / 'runs'}", f"actor.path={model}", "train_dataset.path=addition", "batch_size=8"]
    assert main(["sft", *items, "total_train_steps=5", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "Step: 8 rows of at most" in said and "Run: 5 steps, 40 rows" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_dry_run_starts_none_of_the_ranks_that_the_run_will_have(model, tmp_path):
    items = [f"actor.path={model}", "actor.backend=fsdp:d4", "device=cpu", "train_dataset.path=addition"]
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "sft", *items, f"run.root={tmp_path / 'runs'}", "total_train_steps=5", "--dry-run"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()
