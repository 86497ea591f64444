"""Runs on two ranks go on, and go on alone."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.flow.plan import plan_run
from tandem.flow.sleep_plan import GIB, sleep_plan_here
from tandem.trainers import loop
from tandem.trainers.recipes import train
from tests.engines_train.steps import distance
from tests.ranks import on_two
from tests.trainers.colocated import rows


def longer(items, root, ranks):
    """Trains four steps at once, and two and then two more; returns both weights."""
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(torch.distributed.get_rank()), "LOCAL_WORLD_SIZE": str(ranks)}
    items = [*items, f"actor.backend=fsdp:d{ranks}", f"run.root={root}"]

    def run(trial, steps, **options):
        train(load_config(SFTConfig, None, [*items, f"trial_name={trial}", f"total_train_steps={steps}"]), **options)
        torch.distributed.barrier()
        return load_file(root / f"tandem/{trial}/checkpoints/step_{steps}/model.safetensors")

    return {"whole": run("whole", 4), "half": run("longer", 2), "longer": run("longer", 4, override=True)}


@pytest.mark.slow
@pytest.mark.invariant
def test_two_ranks_go_on_to_the_bit_and_one_goes_on_from_two(model, tmp_path):
    items = [f"actor.path={model}", "actor.dtype=float32", "actor.optimizer.lr=0.01", "train_dataset.path=addition"]
    items += ["batch_size=8", "threads=1", "deterministic=true", "train_dataset.size=20", "tracking.plot_every_steps=null"]
    (tmp_path / "out").mkdir()
    found = on_two(longer, items, tmp_path, out=tmp_path / "out")[0]
    moved = distance(found["half"], found["whole"])
    assert distance(found["longer"], found["whole"]) == 0 < moved

    items += [f"run.root={tmp_path}", "trial_name=longer"]
    try:
        alone = train(load_config(SFTConfig, None, [*items, "total_train_steps=5"]), override=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "actor.backend: fsdp:d2 → fsdp:d1" in (alone.folder / "run.json").read_text()
    assert 0 < distance(found["whole"], load_file(alone.checkpoint / "model.safetensors")) < 2 * moved


LIMIT = "memory_limit_gib=0.00145"


def generating(items, root, ranks):
    """The weights after four steps: made at once, made two and two, and with engines that sleep."""
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(torch.distributed.get_rank()), "LOCAL_WORLD_SIZE": str(ranks)}

    def run(trial, *more, **options):
        loop.train(load_config(TrainConfig, None, [*items, f"run.root={root}", f"trial_name={trial}", *more]), **options)
        torch.distributed.barrier()

    run("whole")
    run("resumed", until=2)
    run("resumed")
    run("sleepy", LIMIT)
    folders = {name: root / f"tandem/{name}/checkpoints" for name in ("whole", "resumed", "sleepy")}
    found = {name: load_file(folder / "step_4/model.safetensors") for name, folder in folders.items()}
    return found | {"half": load_file(folders["whole"] / "step_2/model.safetensors")}


@pytest.mark.slow
@pytest.mark.invariant
def test_ranks_that_generate_go_on_and_sleep_to_the_bit(model, tmp_path):
    items = [f"actor.path={model}", "actor.backend=fsdp:d2", "actor.dtype=float32", "rollout.dtype=float32", "threads=1"]
    items += ["algorithm=ppo", "algorithm.kl.coefficient=0.1", "train_dataset.path=addition", "deterministic=true"]
    items += [f"reward={Path(__file__).parent / 'small_rewards.py'}:even", "rollout.batch_size=4", "gconfig.n_samples=4"]
    items += ["gconfig.max_new_tokens=8", "rollout.engine.kv_cache_gib=0.0005", "actor.optimizer.lr=0.01"]
    items += ["evaluate.every_steps=2", "evaluate.max_rows=4", "checkpoint.every_steps=2", "total_train_steps=4"]
    (tmp_path / "out").mkdir()
    for found in on_two(generating, [*items, "tracking.plot_every_steps=null"], tmp_path, out=tmp_path / "out"):
        assert distance(found["resumed"], found["whole"]) == distance(found["sleepy"], found["whole"]) == 0
        assert distance(found["half"], found["whole"]) > 0
    config = load_config(TrainConfig, None, [*items, LIMIT]).config
    plan, last = sleep_plan_here(config, plan_run(config)), rows(tmp_path / "tandem/sleepy")[-1]
    moved = {done.stage.name: done.total / GIB for done in plan.steady() if done.stage.each_step}
    assert sum(moved.values()) > 0  # of both ranks; their parts of a tensor may be padded
    assert {name: last[f"memory/moved_gib/{name.replace(' ', '_')}"] for name in moved} == pytest.approx(moved, rel=0.01)
