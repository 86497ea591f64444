"""PPO on the real model: it learns to add, and its critic to tell good answers from bad ones."""

import json

import pytest

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.rl import train

KEYS = [
    "algorithm=ppo",
    "actor.path=smollm2-135m",
    "actor.optimizer.lr=2e-5",
    "actor.max_tokens_per_micro_batch=1024",
    "critic.optimizer.lr=3e-5",
    "critic.epochs_per_batch=2",
    "train_dataset.path=addition",
    "valid_dataset.path=addition",
    "reward=exact_number",
    "gconfig.n_samples=8",
    "gconfig.max_new_tokens=16",
    "rollout.batch_size=8",
    "rollout.engine.kv_cache_gib=0.5",
    "total_train_steps=24",
]


@pytest.mark.slow
def test_ppo_learns_addition_and_its_critic_explains_half_of_the_variance(tmp_path):
    summary = train(load_config(TrainConfig, None, [*KEYS, f"run.root={tmp_path}"]))
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    explained = [row.get("value/explained_variance") or 0.0 for row in rows]

    assert rewards[0] < 0.3
    assert sum(rewards[-3:]) / 3 >= 0.8
    # while there is variance: near the end almost all answers are right, and little is left to explain
    assert max(sum(explained[i : i + 3]) / 3 for i in range(len(explained) - 2)) >= 0.5
