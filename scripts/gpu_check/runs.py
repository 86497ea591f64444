"""Whole runs: one that is resumed, and one that is repeated."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_check.equalities import distance
from scripts.gpu_check.place import Line, Place
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.state.tree import read_tree
from tandem.trainers import loop, recipes

ROOT = Path(__file__).resolve().parents[2]
STEP = 0.1
"""A share of what a step moves, in bfloat16: sums on a GPU have no fixed order, and Adam makes steps of one size of small
gradients."""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def masters(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The float32 weights of a checkpoint."""
    found: dict[str, torch.Tensor] = read_tree(folder / f"checkpoints/step_{step}/state")["trainer"]["masters"]
    return found


def resumed_is_uninterrupted(place: Place) -> Iterator[Line]:
    """Fine-tuning over four steps at once, and over two and two, in bfloat16; saved after each, beside training."""
    items = [f"actor.path={place.model}", "actor.dtype=bfloat16", f"device={place.device}", "train_dataset.path=addition"]
    items += ["train_dataset.size=200", "batch_size=8", "total_train_steps=4", "checkpoint.every_steps=1"]
    items += [f"run.root={place.scratch}", "experiment_name=resume", "threads=1", "actor.optimizer.lr=1e-4"]

    def run(trial: str, until: int | None) -> Path:
        folder = recipes.train(load_config(SFTConfig, None, [*items, f"trial_name={trial}"]), until=until).folder
        assert folder is not None
        return folder

    whole = run("whole", None)
    run("halves", 2)
    halves = run("halves", None)
    begun, one, other = (masters(folder, step) for folder, step in ((whole, 3), (whole, 4), (halves, 4)))
    moved, apart = distance(begun, one), distance(one, other)
    said = "to the bit" if apart == 0 else f"{apart / moved:.1e} of the last step"
    good = moved > 0 and apart <= STEP * moved and len(rows_of(halves)) == 4
    yield Line("resumed = uninterrupted, bf16", said, f"at most {STEP:g}", good)


def repeats(place: Place) -> Iterator[Line]:
    """GRPO twice with deterministic=true, rewarded for something that any model can do: the same to the bit on a CPU; on a
    GPU it is only told."""
    items = [f"actor.path={place.model}", f"run.root={place.scratch}", f"device={place.device}", "deterministic=true"]
    items += ["total_train_steps=2", "checkpoint.at_end=false", f"reward={ROOT / 'tests/trainers/small_rewards.py'}:even"]
    items += ["gconfig.n_samples=4", "gconfig.max_new_tokens=6", "rollout.batch_size=2", "threads=1"]
    items += ["rollout.engine.kv_cache_gib=0.05", "evaluate.every_steps=null", "actor.optimizer.lr=0.01"]
    found = []
    for trial in ("first", "second"):
        config = load_config(TrainConfig, ROOT / "examples/addition_grpo.yaml", [*items, f"trial_name={trial}"])
        folder = loop.train(config).folder
        assert folder is not None
        found.append((folder / "weights.jsonl").read_text())
        rewards = ", ".join(f"{row['reward/mean']:.2f}" for row in rows_of(folder) if row["step"] > 0)
    same = found[0] == found[1]
    said = f"{'the same to the bit' if same else 'not the same bits'}; rewards {rewards}"
    yield Line("two deterministic runs", said, "promised on a CPU", same if place.device == "cpu" else None)
