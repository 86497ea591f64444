"""Whole runs with adapters: every kind of training, what is published and saved, and that killed ones go on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.cli.main import main
from tandem.config.algorithm import PRESETS
from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig
from tandem.flow.opening import open_rows, open_session
from tandem.flow.process import start_process
from tandem.trainers import distill, loop, recipes
from tandem.trainers.loop import step
from tests.trainers.test_resume import SAVED_EACH_STEP, Runs, assert_same

LORA = ["actor.lora.rank=4", "actor.lora.alpha=8"]
REWARDS = Path(__file__).parents[1] / "matrix/rewards.py"
TRAINERS = {
    "sft": (recipes, SFTConfig, "addition"),
    "preference": (recipes, PreferenceConfig, "addition_pairs"),
    "reward": (recipes, RewardModelConfig, "addition_pairs"),
}


def loaded(cls, items):
    """The last of two equal keys counts."""
    return load_config(cls, None, list({item.partition("=")[0]: item for item in items}.values()))


def rows_of(summary):
    return [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]


def moved(summary, model):
    """Names of the merged model's tensors that are not the base's."""
    before, after = load_file(model / "model.safetensors"), load_file(summary.checkpoint / "model.safetensors")
    return {name for name in after if name in before and not torch.equal(before[name], after[name])}


def test_a_run_trains_publishes_and_saves_the_adapter_and_proves_what_it_delivered(overrides, model, tmp_path, capsys):
    items = [*overrides, *LORA, "algorithm.kl.coefficient=0.01", "rollout.verify.every_steps=1"]
    summary = loop.train(loaded(TrainConfig, items))
    found = rows_of(summary)
    assert all(row["gap/numeric"] < 1e-3 and row["gap/verified"] > 0.2 for row in found)
    assert found[0]["kl/reference"] == 0 < found[-1]["kl/reference"]  # the reference is the base, to the bit
    layers = {f"model.layers.{i}" for i in (0, 1)}
    assert {".".join(name.split(".")[:3]) for name in moved(summary, model)} == layers
    assert len(moved(summary, model)) == 14
    state = summary.checkpoint / "state"
    held = {name for path in state.glob("tensors-*") for name in load_file(path) if name.startswith("trainer/")}
    assert len(held) == 3 * 28 + 28 and all("lora_" in name for name in held)  # A and B: master, two moments, step

    assert main(["export", str(summary.folder), str(tmp_path / "whole"), "--dtype", "float32"]) == 0
    assert main(["export", str(summary.folder), str(tmp_path / "alone"), "--no-merge"]) == 0
    one, other = (load_file(folder / "model.safetensors") for folder in (summary.checkpoint, tmp_path / "whole"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert not (tmp_path / "whole/adapter").exists()
    assert main(["export", str(summary.folder), str(tmp_path / "third"), "--no-merge", "--dtype", "float32"]) == 2
    assert "an adapter alone stays in float32" in capsys.readouterr().err


def test_there_is_no_second_model_for_the_reference_unless_it_is_asked_for(overrides, model):
    items = [*overrides, *LORA, "algorithm.kl.coefficient=0.01"]
    for more, same in ([], True), (["reference.refresh_every_steps=1"], False), ([f"reference.path={model}"], False):
        config = loaded(TrainConfig, [*items, *more]).config
        with open_session(config, start_process(config), open_rows(config), 3, "test") as session:
            assert (session.reference.engine is session.trainer) == same
            metrics, _ = step(session)
            assert "kl/reference" in metrics and session.engine.version.number == 1


def test_actor_and_critic_have_adapters_of_their_own(overrides, model):
    items = [*overrides, *LORA, "algorithm=ppo", "critic.lora.rank=2", "critic.optimizer.lr=0.01", "actor.mini_batches=2"]
    summary = loop.train(loaded(TrainConfig, items))
    folders = [summary.checkpoint / "adapter", summary.checkpoint / "critic/adapter"]
    settings = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
    assert [(s["r"], s["task_type"]) for s in settings] == [(4, "CAUSAL_LM"), (2, "SEQ_CLS")]
    critic = load_file(folders[1] / "adapter_model.safetensors")
    assert critic["base_model.model.score.weight"].any() and all(tensor.any() for tensor in critic.values())


@pytest.mark.parametrize("kind", TRAINERS)
def test_what_learns_from_rows_learns_through_an_adapter(kind, model, tmp_path):
    trainer, cls, data = TRAINERS[kind]
    items = [f"run.root={tmp_path}", f"actor.path={model}", "actor.dtype=float32", "actor.optimizer.lr=0.02", *LORA]
    items += [f"train_dataset.path={data}", "train_dataset.size=40", "total_train_steps=8", "batch_size=8", "threads=1"]
    items += ["actor.lora.dropout=0.1"] if kind != "preference" else []
    summary = trainer.train(loaded(cls, items))
    found = rows_of(summary)
    assert found[-1]["loss"] < found[0]["loss"] and len(moved(summary, model)) == 14


@pytest.mark.slow
def test_distillation_trains_the_adapter_towards_a_whole_teacher(overrides, model, tmp_path):
    wanted = [item for item in overrides if not item.startswith(("algorithm", "evaluate", "valid"))]
    summary = distill.train(loaded(DistillConfig, [*wanted, *LORA, f"teacher.path={model}"]))
    assert rows_of(summary)[0]["loss"] is not None and (summary.checkpoint / "adapter").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_takes_steps(preset, overrides):
    items = [*overrides, *LORA, f"algorithm={preset}", "total_train_steps=2", "checkpoint.at_end=false"]
    if "labels" in PRESETS[preset].values:
        items = [item for item in items if not item.startswith("reward=")]
        items += ["gconfig.max_new_tokens=16", "gconfig.n_samples=6", "algorithm.update_samples=3"]
    else:
        items.append(f"reward={REWARDS}:parts")  # two named ones
    found = rows_of(loop.train(loaded(TrainConfig, items)))
    assert max(row["grad_norm"] for row in found) > 0


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_that_is_killed_goes_on_to_the_bit(zygote, overrides, tmp_path):
    items = [*overrides, *SAVED_EACH_STEP, *LORA, "algorithm.kl.coefficient=0.01", "rollout.verify.every_steps=2"]
    runs = Runs(zygote, tmp_path, "rl", [*items, "total_train_steps=4", "actor.dtype=bfloat16", "rollout.dtype=bfloat16"])
    runs.go("whole")
    for instant, nth in (("after the optimizer step", 2), ("between state and manifest", 1), ("after the rename", 1)):
        runs.go("killed", instant, nth)
    runs.go("killed")
    assert_same(runs.folder("whole"), runs.folder("killed"), 4)


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_so_does_one_that_learns_from_rows_with_dropout(zygote, model, tmp_path, kind):
    data = TRAINERS[kind][2]
    items = [f"actor.path={model}", "actor.dtype=float32", "actor.optimizer.lr=0.01", f"train_dataset.path={data}", *LORA]
    items += ["train_dataset.size=20", "total_train_steps=4", "batch_size=8", "threads=1", *SAVED_EACH_STEP]
    runs = Runs(zygote, tmp_path, kind, [*items, "actor.lora.dropout=0.2"])
    runs.go("whole")
    runs.go("killed", "after the optimizer step", 3)
    runs.go("killed")
    assert_same(runs.folder("whole"), runs.folder("killed"), 4)


@pytest.mark.slow
def test_another_rank_is_refused_when_a_run_goes_on(overrides, model, tmp_path):
    items = [*overrides, *LORA, "checkpoint.every_steps=1", "actor.lora.rank=2"]
    loop.train(loaded(TrainConfig, items))
    with pytest.raises(ConfigError, match=r"actor\.lora\.rank"):
        loop.train(loaded(TrainConfig, [*items, "actor.lora.rank=4", "total_train_steps=5"]), override=True)
