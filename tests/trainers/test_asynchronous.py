"""Asynchronous training does what it is for: generation goes on while the trainer trains, within the staleness bound."""

import json
from pathlib import Path

import pytest

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.loop import train

REWARDS = Path(__file__).parent / "small_rewards.py"
STEPS, ETA = 12, 2


def train_once(model, root):
    """Metrics by step, and the samples: a tiny model whose answers take longer than a step of training.

    Few more episodes run than a step takes, so that each spans a step or two, and its first tokens are seldom too old.
    """
    items = [
        f"run.root={root}",
        f"actor.path={model}",
        "actor.optimizer.lr=0.001",
        "actor.dtype=float32",
        "rollout.dtype=float32",
        "rollout.batch_size=4",
        "rollout.max_concurrent=5",
        "rollout.engine.kv_cache_gib=0.1",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=96",
        "async_training=true",
        f"rollout.max_head_offpolicyness={ETA}",
        f"reward={REWARDS}:even",
        "train_dataset.path=addition",
        "evaluate.every_steps=null",
        "tracking.trajectories_per_step=16",
        f"total_train_steps={STEPS}",
        "tracking.plot_every_steps=null",
    ]
    folder = train(load_config(TrainConfig, None, items)).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted((folder / "trajectories").iterdir())
    return rows, [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    return train_once(model, tmp_path_factory.mktemp("runs"))


def share(rows, name, weight):
    return sum(row[name] * row[weight] for row in rows) / sum(row[weight] for row in rows)


def test_generation_goes_on_during_at_least_30_percent_of_the_training_time(run, model, tmp_path):
    assert len(run[0]) == STEPS
    shares = [share(run[0], "time/overlap", "time/train_s")]
    while max(shares) < 0.3 and len(shares) < 4:  # a busy machine may leave the two of them one core
        rows, _ = train_once(model, tmp_path / str(len(shares)))
        shares.append(share(rows, "time/overlap", "time/train_s"))
    assert max(shares) >= 0.3, shares


def test_tokens_are_older_than_the_trainer_but_never_too_old_and_few_expire(run):
    ages = [row["staleness/max"] for row in run[0]]
    assert max(ages) >= 1
    assert all(age <= ETA for age in ages)
    assert share(run[0], "expired", "completion_length/mean") <= 0.1


def test_trajectories_carry_two_versions_whose_digests_differ(run):
    pieces = [parts for sample in run[1] for parts in sample["versions"]]
    assert all(part["digest"] for parts in pieces for part in parts)  # of version 0 too
    mixed = [parts for parts in pieces if len(parts) > 1]
    assert mixed
    assert all(len({part["digest"] for part in parts}) == len(parts) for parts in mixed)
