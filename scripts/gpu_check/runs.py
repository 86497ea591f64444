"""Whole runs: one that is resumed, one that is repeated, one that learns."""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_check.equalities import STEP, distance
from scripts.gpu_check.place import Line, Place
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.state.tree import read_tree
from tandem.trainers import rl, sft

ROOT = Path(__file__).resolve().parents[2]
LEARNS = 0.2
"""Least rise of the mean reward, last three steps against the first three."""

BF16_STEP = 0.1
"""`STEP` in bfloat16: sums on a GPU have no fixed order, and Adam makes steps of one size of small gradients."""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def masters(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The float32 weights of a checkpoint."""
    found: dict[str, torch.Tensor] = read_tree(folder / f"checkpoints/step_{step}/state")["trainer"]["masters"]
    return found


def resumed_is_uninterrupted(place: Place) -> Iterator[Line]:
    """Fine-tuning over four steps at once, and over two and two; saved after each, beside training."""
    for dtype in ("float32", "bfloat16"):
        items = [f"actor.path={place.model}", f"actor.dtype={dtype}", f"device={kind(place)}", "train_dataset.path=addition"]
        items += ["train_dataset.size=200", "batch_size=16", "total_train_steps=4", "checkpoint.every_steps=1"]
        items += [f"run.root={place.scratch}", f"experiment_name=resume-{dtype}", "actor.optimizer.lr=1e-4"]

        def run(trial: str, until: int | None, items: list[str] = items) -> Path:
            folder = sft.train(load_config(SFTConfig, None, [*items, f"trial_name={trial}"]), until=until).folder
            assert folder is not None
            return folder

        whole = run("whole", None)
        run("halves", 2)
        halves = run("halves", None)
        begun, one, other = (masters(folder, step) for folder, step in ((whole, 3), (whole, 4), (halves, 4)))
        moved = distance(begun, one)
        apart, limit = distance(one, other), STEP if dtype == "float32" else BF16_STEP
        good = moved > 0 and apart <= limit * moved and len(rows_of(halves)) == 4
        said = "to the bit" if apart == 0 else f"{apart / moved:.1e} of the last step"
        yield Line(f"resumed = uninterrupted, {dtype}", said, f"at most {limit:g}", good)
        waited = [row["time/save_s"] for row in rows_of(whole) if "time/save_s" in row]
        written = [row["time/save_background_s"] for row in rows_of(whole) if "time/save_background_s" in row]
        if waited and written:
            said = f"{statistics.median(waited):.3f} s of waiting for {statistics.median(written):.3f} s of writing"
            yield Line(f"a save beside training, {dtype}", said)


def kind(place: Place) -> str:
    """The device as a configuration has it."""
    return "cpu" if place.device == "cpu" else "cuda"


def learning_items(place: Place, trial: str, steps: int) -> list[str]:
    """The run of examples/addition_grpo.yaml here; at small size on any model, rewarded for something that it can do."""
    items = [f"actor.path={place.model}", f"run.root={place.scratch}", f"trial_name={trial}", f"device={kind(place)}"]
    items += [f"total_train_steps={steps}", "checkpoint.at_end=false"]
    if place.quick:
        reward = ROOT / "tests/trainers/small_rewards.py"
        items += [f"reward={reward}:even", "gconfig.n_samples=4", "gconfig.max_new_tokens=6", "rollout.batch_size=2"]
        items += ["rollout.engine.kv_cache_gib=0.05", "evaluate.every_steps=null", "threads=1", "actor.optimizer.lr=0.01"]
    else:
        items += [f"evaluate.every_steps={steps}"]
    return items


def learns(place: Place) -> Iterator[Line]:
    """GRPO on one-digit addition."""
    config = load_config(TrainConfig, ROOT / "examples/addition_grpo.yaml", learning_items(place, "learns", place.of(18, 2)))
    summary = rl.train(config)
    assert summary.folder is not None
    rows = [row for row in rows_of(summary.folder) if row["step"] > 0]
    rewards = [row["reward/mean"] for row in rows]
    told = ", ".join(f"{reward:.2f}" for reward in rewards)
    if place.quick:
        good = len(rewards) == 2 and all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
        yield Line("GRPO runs", f"rewards {told}", "two steps, finite", good)
    else:
        rise = statistics.mean(rewards[-3:]) - statistics.mean(rewards[:3])
        yield Line("GRPO learns addition", f"rewards {told}", f"a rise of {LEARNS:g}", rise >= LEARNS)
        evaluations = ", ".join(f"step {step}: {value:.1%}" for step, value in summary.evaluations.items())
        yield Line("accuracy on held-out rows", evaluations)
    for name, unit in (("time/step_s", "s"), ("tokens_per_s/generate", "tokens/s"), ("tokens_per_s/train", "tokens/s")):
        values = [row[name] for row in rows[1:] if name in row]
        if values:
            yield Line(f"{name} of that run", f"{statistics.median(values):.4g} {unit}")


def repeats(place: Place) -> Iterator[Line]:
    """Two runs with deterministic=true: the same to the bit on a CPU; on a GPU it is only told."""
    items = [*learning_items(place, "first", 2), "deterministic=true"]
    found = []
    try:
        for trial in ("first", "second"):
            own = [*(item for item in items if not item.startswith("trial_name=")), f"trial_name=deterministic-{trial}"]
            summary = rl.train(load_config(TrainConfig, ROOT / "examples/addition_grpo.yaml", own))
            assert summary.folder is not None
            found.append((summary.folder / "weights.jsonl").read_text())
    finally:
        torch.use_deterministic_algorithms(False)
    same = found[0] == found[1]
    said = "the same to the bit" if same else "not the same bits"
    yield Line("two deterministic runs", said, "promised on a CPU", same if place.device == "cpu" else None)
