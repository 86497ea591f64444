"""`tandem plan` against runs on this machine: ten configurations, predicted and measured, as a table for docs/planning.md.

    python benchmarks/plan.py --fit          # five configurations; what they show becomes part of the calibration
    python benchmarks/plan.py                # the other five, with it
    python benchmarks/plan.py --cells 1,6    # some of the ten
    python benchmarks/plan.py --list

Reach: peak memory within 10 %, time of a step within 15 % of the median of five steps, in the five configurations that were
not fitted. Random models of two sizes with the built-in model's tokenizer, and the built-in model itself; completions of
exactly `gconfig.max_new_tokens`; a reward that differs within groups. Run it on a machine that does nothing else.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tandem.models.catalog import resolve
from tandem.trainers.planning.calibrate import kept_file, this_machine, write

MEMORY_WITHIN, TIME_WITHIN = 0.10, 0.15
STEPS = 6  # the first one warms up
POLL_S = 0.1

REWARD = """
import hashlib

def spread(completion, **_):
    return hashlib.sha256(completion.encode()).digest()[0] / 255
"""

MODELS = {
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4},
    "medium": {"hidden_size": 448, "intermediate_size": 1216, "num_hidden_layers": 12, "num_attention_heads": 7},
}


@dataclass(frozen=True)
class Cell:
    """One configuration. ``fitted``: it is one of the five whose measurement the calibration sees."""

    name: str
    command: str
    model: str
    keys: tuple[str, ...]
    fitted: bool
    ranks: int = 1


def _rl(batch_size: int, samples: int, new_tokens: int, *more: str) -> tuple[str, ...]:
    fixed = f"gconfig.min_new_tokens={new_tokens}", f"gconfig.max_new_tokens={new_tokens}"
    fixed += ("algorithm.allow_truncated_sampling=true",)  # at a learning rate of nothing it spoils nothing
    return (
        f"rollout.batch_size={batch_size}", f"gconfig.n_samples={samples}", *fixed, "rollout.engine.kv_cache_gib=0.5",
        "actor.max_tokens_per_micro_batch=1024", "evaluate.every_steps=null", *more,
    )  # fmt: skip


CELLS = (
    Cell("GRPO, small", "train", "small", _rl(8, 8, 32), True),
    Cell("GRPO, 135M", "train", "smollm2-135m", _rl(4, 4, 24), True),
    Cell("PPO with a critic, small", "train", "small", _rl(8, 4, 48, "algorithm=ppo"), True),
    Cell("GRPO with a reference, small", "train", "small", _rl(8, 4, 64, "algorithm.kl.coefficient=0.05"), True),
    Cell("SFT, medium", "sft", "medium", ("batch_size=32", "actor.max_tokens_per_micro_batch=1024"), True),
    Cell("GRPO, medium, long answers", "train", "medium", _rl(4, 8, 96), False),
    Cell("asynchronous GRPO, small", "train", "small", _rl(8, 8, 48, "async_training=true"), False),
    Cell("DPO, medium", "preference", "medium", ("batch_size=32", "actor.max_tokens_per_micro_batch=1024"), False),
    Cell("GRPO, medium, checkpointing", "train", "medium", _rl(8, 4, 48, "actor.gradient_checkpointing=true"), False),
    Cell("SFT on two ranks, medium", "sft", "medium", ("batch_size=32", "actor.backend=fsdp:d2"), False, ranks=2),
)


def make_model(name: str, folder: Path) -> str:
    """A random model with the built-in one's tokenizer, or the built-in name itself."""
    if name not in MODELS:
        return name
    import torch  # noqa: PLC0415 - only where a model is made
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415

    place = folder / name
    if not place.is_dir():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49152, num_key_value_heads=1, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
            bos_token_id=1, eos_token_id=2, pad_token_id=2, **MODELS[name],
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
        for file in resolve("smollm2-135m").iterdir():
            if "token" in file.name or file.suffix == ".jinja":
                shutil.copy(file, place)
    return str(place)


def arguments(cell: Cell, folder: Path) -> list[str]:
    """Keys of the run, as the plan gets them too."""
    data = {"preference": "addition_pairs"}.get(cell.command, "addition")
    keys = [f"actor.path={make_model(cell.model, folder)}", f"train_dataset.path={data}", *cell.keys]
    keys += [
        "actor.optimizer.lr=1e-9",
        "checkpoint.at_end=false",
        f"total_train_steps={STEPS}",
        f"run.root={folder / 'runs'}",
    ]
    if cell.command == "train":
        keys.append(f"reward={folder / 'spread.py'}:spread")
    return keys


def predicted(cell: Cell, keys: list[str]) -> dict[str, Any]:
    """What `tandem plan` says."""
    command = [sys.executable, "-m", "tandem", "plan", "--for", cell.command, "--json", *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def measured(cell: Cell, keys: list[str], folder: Path) -> dict[str, float]:
    """Medians of the steps after the first, and the sum of the largest resident sizes of the run's processes."""
    started = [sys.executable, "-m", "tandem"]
    if cell.ranks > 1:
        started = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={cell.ranks}", "-m", "tandem"]
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if cell.ranks > 1 else {})
    process = subprocess.Popen([*started, cell.command, *keys], stdout=sys.stderr, env=environment)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for one in tree(process.pid, launcher=cell.ranks > 1):
            peaks[one] = max(peaks.get(one, 0), high_water(one))
        time.sleep(POLL_S)
    if process.returncode:
        raise RuntimeError(f"{cell.name} ended with {process.returncode}")
    lines = next((folder / "runs").glob("*/*/metrics.jsonl")).read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 1]
    shutil.rmtree(folder / "runs")
    names = {"step_s": "time/step_s", "generate_s": "time/generate_s", "train_s": "time/train_s"}
    names["publish_s"] = "time/update_weights_s"
    found = {name: statistics.median(row.get(key, 0.0) for row in rows) for name, key in names.items()}
    return found | {"peak_gib": sum(peaks.values()) / 2**30}


def tree(pid: int, *, launcher: bool) -> Iterator[int]:
    """The processes of a run; without torchrun's own."""
    try:
        here = psutil.Process(pid)
        yield from ([] if launcher else [pid])
        yield from (child.pid for child in here.children(recursive=True))
    except psutil.NoSuchProcess:
        return


def high_water(pid: int) -> int:
    """Largest resident size so far, bytes; 0 once the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM:")), 0)


def fit(rows: list[dict[str, Any]]) -> None:
    """Keeps the median of measured over predicted time, by phase, and of the holes in memory, in this machine's
    calibration."""
    families = {"generate_s": ("prefill", "decode"), "train_s": ("score", "update"), "publish_s": ("publish",)}
    machine = this_machine()
    factors = dict(machine.factors)
    for key, names in families.items():
        ratios = [row["measured"][key] / row["predicted"][key] for row in rows if row["predicted"][key] > 1e-3]
        if ratios:
            factors |= {name: statistics.median(ratios) * factors.get(name, 1.0) for name in names}
    holes = [
        (row["measured"]["peak_gib"] - row["predicted"]["peak_gib"] + row["predicted"]["holes_gib"])
        / (row["predicted"]["holes_gib"] / machine.slack)
        for row in rows
        if row["predicted"]["holes_gib"] > 0
    ]
    slack = max(0.01, statistics.median(holes)) if holes else machine.slack
    write(kept_file(machine), replace(machine, factors=factors, slack=slack))


def row_of(number: int, cell: Cell, folder: Path) -> dict[str, Any]:
    """Prediction and measurement of one cell."""
    keys = arguments(cell, folder)
    said = predicted(cell, keys)
    plan = {key: said["time"][key] for key in ("step_s", "generate_s", "train_s", "publish_s")}
    plan["peak_gib"] = said["memory"]["peak_gib"]
    plan["holes_gib"] = said["memory"]["phases"][said["memory"]["worst"]].get("process: allocator_gib", 0.0)
    real = measured(cell, keys, folder)
    print(json.dumps({"cell": number, "predicted": plan, "measured": real}), file=sys.stderr, flush=True)
    return {"number": number, "cell": cell, "predicted": plan, "measured": real}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| | configuration | peak memory: predicted | measured | off | step: predicted | measured | off |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        plan, real = row["predicted"], row["measured"]
        off = {key: plan[key] / real[key] - 1 for key in ("peak_gib", "step_s")}
        mark = "fitted" if row["cell"].fitted else ""
        lines.append(
            f"| {row['number']} {mark} | {row['cell'].name} | {plan['peak_gib']:.2f} GiB | {real['peak_gib']:.2f} GiB "
            f"| {off['peak_gib']:+.0%} | {plan['step_s']:.2f} s | {real['step_s']:.2f} s | {off['step_s']:+.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints the table; exit code 1 where a cell that was not fitted is further off than it may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", help="numbers from 1 on, separated by commas")
    parser.add_argument("--fit", action="store_true", help="measure the five cells that are fitted, and keep their factors")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    numbered = dict(enumerate(CELLS, 1))
    if given.list:
        print("\n".join(f"{number:>3} {cell.name}{' (fitted)' if cell.fitted else ''}" for number, cell in numbered.items()))
        return
    wanted = (
        [int(n) for n in given.cells.split(",")]
        if given.cells
        else [n for n, c in numbered.items() if c.fitted == given.fit]
    )
    this_machine()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "spread.py").write_text(REWARD)
        rows = [row_of(number, numbered[number], folder) for number in wanted]
    print(table(rows))
    if given.fit:
        fit(rows)
        return
    wrong = [
        row
        for row in rows
        if not row["cell"].fitted
        and (
            abs(row["predicted"]["peak_gib"] / row["measured"]["peak_gib"] - 1) > MEMORY_WITHIN
            or abs(row["predicted"]["step_s"] / row["measured"]["step_s"] - 1) > TIME_WITHIN
        )
    ]
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
