"""PPO's critic on the real model: it comes to know which questions the policy will answer. That PPO learns to add is shown
with the other presets, in tests/learning."""

import json
import random

import pytest

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.loop import train

KEYS = [
    "algorithm=ppo",
    "threads=1",
    "actor.path=smollm2-135m",
    "actor.optimizer.lr=3e-5",
    "actor.max_tokens_per_micro_batch=1024",
    "critic.optimizer.lr=1e-4",
    "critic.epochs_per_batch=2",
    "system_prompt=Calculate.",
    "reward=exact_number",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=12",
    "rollout.batch_size=8",
    "rollout.engine.kv_cache_gib=0.25",
    "checkpoint.at_end=false",
    "total_train_steps=10",
    "tracking.plot_every_steps=null",
]


def questions(seed=0):
    """Half of them the policy learns to answer at once, the others not at all."""
    draw = random.Random(seed)
    for _ in range(200):
        x, y = draw.randint(1, 9), draw.randint(1, 9)
        yield {"question": f"What is {x} + {y}? Answer with just the number.", "answer": str(x + y)}
        x, y = draw.randint(101, 999), draw.randint(101, 999)
        yield {"question": f"What is {x} * {y}? Answer with just the number.", "answer": str(x * y)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_critic_explains_half_of_the_variance(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in questions()))
    keys = [*KEYS, f"run.root={tmp_path}", f"train_dataset.path={file}"]
    summary = train(load_config(TrainConfig, None, keys))
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    explained = [row["value/explained_variance"] for row in rows]

    assert sum(row["reward/mean"] for row in rows[-3:]) / 3 > 0.3  # the actor has learnt as well
    assert explained[0] == 0.0  # the head begins at 0
    assert sum(explained[-3:]) / 3 >= 0.5, explained
