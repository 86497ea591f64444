"""What preferences, reward models and a teacher teach the real model; each bounded to a few minutes on two cores."""

import json
import random
import re

import pytest

from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig
from tandem.data.procedural import addition
from tandem.trainers import distill, recipes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"
LEARNING_RATES = {"dpo": 3e-5, "ipo": 3e-5, "kto": 5e-5, "simpo": 3e-5, "orpo": 5e-5}


def common(tmp_path, steps, rows=8):
    return [
        f"run.root={tmp_path}",
        "threads=1",
        f"actor.path={MODEL}",
        "train_dataset.path=addition_pairs",
        "actor.max_tokens_per_micro_batch=2048",
        "system_prompt=Add.",
        "checkpoint.at_end=false",
        "tracking.plot_every_steps=null",
        f"total_train_steps={steps}",
        f"evaluate.every_steps={steps}",
        "evaluate.max_rows=16",
        f"batch_size={rows}",
    ]


def evaluations(summary):
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/loss" in row or "kl/teacher" in row]


@pytest.mark.parametrize("loss", list(LEARNING_RATES))
def test_every_loss_raises_the_margin_of_held_out_pairs(tmp_path, loss):
    items = [*common(tmp_path, 8), f"loss={loss}", f"actor.optimizer.lr={LEARNING_RATES[loss]}"]
    before, after = evaluations(recipes.train(load_config(PreferenceConfig, None, items)))
    assert after["eval/margin"] > before["eval/margin"]
    assert after["eval/loss"] < before["eval/loss"]
    assert after["eval/accuracy"] >= before["eval/accuracy"]


def pairs_by_size(split, size):
    """A right sum, and a number that no sum of two digits can be."""
    draw = random.Random(split)
    for row in addition(split, size=size, seed=0):
        yield {"prompt": row["question"], "chosen": row["answer"], "rejected": str(draw.randint(19, 99))}


def test_the_reward_model_ranks_held_out_pairs(tmp_path):
    files = {split: tmp_path / f"{split}.jsonl" for split in ("train", "test")}
    for split, file in files.items():
        file.write_text("".join(json.dumps(row) + "\n" for row in pairs_by_size(split, 400)))
    items = [item for item in common(tmp_path, 6, rows=16) if not item.startswith("train_dataset")]
    items += [f"train_dataset.path={files['train']}", f"valid_dataset.path={files['test']}"]
    items += ["actor.optimizer.lr=1e-4", "actor.optimizer.warmup_steps=2"]
    before, after = evaluations(recipes.train(load_config(RewardModelConfig, None, items)))
    assert before["eval/accuracy"] == 0.0  # the head begins at 0, so that no side is ahead
    assert after["eval/accuracy"] >= 0.9


def worked_sums():
    """Answers in a form that the student writes itself now and then: what it never writes, no teacher can tell it to."""
    for row in addition("train", size=200, seed=0):
        left, right = re.findall(r"\d", row["question"])
        yield {"prompt": row["question"], "completion": f"{left} + {right} = {row['answer']}"}


def test_distillation_halves_the_kl_to_its_teacher(tmp_path):
    teach = [item for item in common(tmp_path, 8) if not item.startswith(("train_dataset", "checkpoint", "evaluate"))]
    file = tmp_path / "worked.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in worked_sums()))
    teach += [f"train_dataset.path={file}", "actor.optimizer.lr=5e-5", "trial_name=teacher"]
    teacher = recipes.train(load_config(SFTConfig, None, teach)).checkpoint
    items = [item for item in common(tmp_path, 8) if not item.startswith(("train_dataset", "batch_size", "evaluate"))]
    items += [
        "train_dataset.path=addition",
        f"teacher.path={teacher}",
        "actor.optimizer.lr=3e-5",
        "rollout.batch_size=6",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=8",
        "rollout.engine.kv_cache_gib=0.25",
        "trial_name=student",
    ]
    rows = evaluations(distill.train(load_config(DistillConfig, None, items)))
    first = sum(row["kl/teacher_k3"] for row in rows[:2]) / 2
    last = sum(row["kl/teacher_k3"] for row in rows[-2:]) / 2
    assert last <= 0.5 * first
