"""Runs on two ranks go on, and go on alone."""

import os

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config
from tandem.trainers.sft import train
from tests.engines_train.steps import distance
from tests.ranks import on_two


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
