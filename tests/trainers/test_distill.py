"""On-policy distillation: the advantages are the teacher's, and the student approaches it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.api.batch import unpack
from tandem.config.load import load_config
from tandem.config.preference import DistillConfig, training_config
from tandem.roles.reference import Student, Teacher
from tandem.trainers import distill
from tests.roles.batches import rollout_batch, tiny_actor
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("teachers")
    return tiny_model_folder(tmp, seed=0), tiny_model_folder(tmp, seed=1)


def test_the_advantage_is_the_teachers_log_probability_less_the_students(folders):
    student, teacher = tiny_actor(folders[0], advantage="reinforce", policy_loss="reinforce"), tiny_actor(folders[1])
    role, judge = Student(student), Teacher(teacher.engine)
    batch = judge.compute_logprobs(role.compute_proximal(rollout_batch([[(1.0, 3), (0.0, 2)]])))
    batch = role.compute_advantages(batch)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    with torch.no_grad():
        for row in unpack(batch):
            ours, theirs = (model(row["input_ids"][None]).logits[0].log_softmax(-1) for model in models)
            for t in range(len(row["input_ids"])):
                token = row["input_ids"][t]
                expected = float(theirs[t - 1, token] - ours[t - 1, token]) if row["loss_mask"][t] else 0.0
                assert float(row["advantages"][t]) == pytest.approx(expected, abs=1e-4)
    found = role.ppo_update(batch)
    mask = batch["loss_mask"]
    assert found["kl/teacher"] == pytest.approx(float(-batch["advantages"][mask].mean()), rel=1e-4)


def test_a_student_that_is_its_teacher_does_not_move(folders):
    student = tiny_actor(folders[0], advantage="reinforce", policy_loss="reinforce")
    role, judge = Student(student), Teacher(tiny_actor(folders[0]).engine)
    before = {name: tensor.clone() for name, tensor in student.engine.weights()}
    batch = judge.compute_logprobs(role.compute_proximal(rollout_batch([[(1.0, 3), (0.0, 2)]])))
    found = role.ppo_update(role.compute_advantages(batch))
    assert found["step_without_signal"] == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in student.engine.weights())


def test_the_run_has_the_shape_of_reinforcement_learning_and_the_teacher_is_frozen(folders, tmp_path):
    items = [
        f"run.root={tmp_path}",
        f"actor.path={folders[0]}",
        f"teacher.path={folders[1]}",
        "actor.optimizer.lr=0.003",
        "actor.dtype=float32",
        "rollout.dtype=float32",
        "rollout.batch_size=8",
        "rollout.engine.kv_cache_gib=0.05",
        "gconfig.max_new_tokens=8",
        "train_dataset.path=addition",
        "total_train_steps=8",
        "tracking.plot_every_steps=null",
        "threads=1",
    ]
    summary = distill.train(load_config(DistillConfig, None, items))
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["kl/teacher"] for row in rows[-2:]) < sum(row["kl/teacher"] for row in rows[:2])
    assert {"loss", "reward/mean", "gap/mean", "completion_length/mean"} <= set(rows[-1])
    assert (summary.checkpoint / "model.safetensors").exists()


def test_distillation_is_rl_with_one_sample_a_prompt_and_no_algorithm_to_choose(folders):
    config = load_config(
        DistillConfig, None, [f"actor.path={folders[0]}", f"teacher.path={folders[1]}", "train_dataset.path=addition"]
    ).config
    inner = training_config(config)
    assert (inner.gconfig.n_samples, inner.algorithm.aggregation.name, inner.reward) == (1, "token_mean", "math")
    assert inner.algorithm.correction.weight == "none"
    assert training_config(load_config(DistillConfig, None, [
        f"teacher.path={folders[1]}", "train_dataset.path=addition", "async_training=true"
    ]).config).algorithm.correction.weight == "truncate"  # fmt: skip


@pytest.mark.slow
def test_a_student_that_writes_while_it_learns_keeps_within_the_staleness_bound(folders, tmp_path):
    items = [
        f"run.root={tmp_path}",
        f"actor.path={folders[0]}",
        f"teacher.path={folders[1]}",
        "async_training=true",
        "actor.optimizer.lr=0.003",
        "actor.dtype=float32",
        "rollout.dtype=float32",
        "rollout.batch_size=8",
        "rollout.engine.kv_cache_gib=0.05",
        "gconfig.max_new_tokens=8",
        "train_dataset.path=addition",
        "total_train_steps=4",
        "tracking.plot_every_steps=null",
        "threads=2",
    ]
    summary = distill.train(load_config(DistillConfig, None, items))
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["staleness/max"] <= 1 for row in rows)
    assert {"kl/teacher", "correction/ess"} <= set(rows[-1])
