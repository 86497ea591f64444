"""Seconds of one GRPO step, against TRL on the same model, task and sizes.

8 prompts × 8 completions × at most 64 new tokens of one-digit addition, two threads. The learning rate is so small that the
policy stays as it is, so that both sides generate completions of the same mean length in every step; medians are over the
steps after the first. Compare like with like: float32 on both sides where the CPU has no bfloat16 instructions.

    python benchmarks/grpo_step.py --trl-python VENV/bin/python --trl-script trl_grpo.py --model MODEL_FOLDER
    python benchmarks/grpo_step.py                       # ours alone
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def ours(steps: int, dtype: str) -> dict[str, float]:
    """Runs `tandem train` and reads its metrics; medians over the steps after the first."""
    with tempfile.TemporaryDirectory() as root:
        overrides = [
            f"run.root={root}",
            f"total_train_steps={steps}",
            f"actor.dtype={dtype}",
            f"rollout.dtype={dtype}",
            "actor.optimizer.lr=1e-12",
            "gconfig.max_new_tokens=64",
            "threads=2",
            "evaluate.every_steps=null",
            "checkpoint.at_end=false",
        ]
        command = [sys.executable, "-m", "tandem.cli.main", "train", str(ROOT / "examples/addition_grpo.yaml"), *overrides]
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=1800)
        lines = next(Path(root).glob("*/*/metrics.jsonl")).read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 1]
    names = {
        "step_s": "time/step_s",
        "generate_s": "time/generate_s",
        "train_s": "time/train_s",
        "length": "completion_length/mean",
    }
    return {name: statistics.median(row[key] for row in rows) for name, key in names.items()}


def trl(python: str, script: str, model: str, steps: int, dtype: str) -> dict[str, float]:
    """Runs the TRL script in its own environment and reads what it prints."""
    command = [python, script, "--model", model, "--steps", str(steps), "--lr", "1e-12", "--dtype", dtype]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder, env=environment, timeout=3600)
    seconds = [float(s) for s in re.findall(r"^step \d+ ([\d.]+) s", done.stdout, re.M)][1:]
    lengths = [float(s) for s in re.findall(r"'completions/mean_length': '?([\d.]+)", done.stdout)][1:]
    return {"step_s": statistics.median(seconds), "length": statistics.median(lengths)}


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python")
    parser.add_argument("--trl-script")
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"], help="of ours")
    parser.add_argument("--trl-dtype", default="fp32", choices=["bf16", "fp32", "amp"], help="of TRL's")
    args = parser.parse_args()
    result: dict[str, object] = {"tandem": ours(args.steps, args.dtype)}
    if args.trl_python:
        result["trl"] = trl(args.trl_python, args.trl_script, args.model, args.steps, args.trl_dtype)
        result["ratio"] = result["trl"]["step_s"] / result["tandem"]["step_s"]  # type: ignore[index]
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
