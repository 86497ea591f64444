"""Seconds of one GRPO step on pictures, against TRL on the same model, scenes and sizes.

`clevr_count`: scenes of one to five things, "How many … are there?", at most 4 new tokens, float32, everything trained, the
tower too. The learning rate is so small that the policy stays as it is, and the reward (a sum of the reply's characters,
modulo 7) differs within each group, so that none is left out of the update. Medians are over the steps after the first. TRL
needs an environment of its own, without torchvision: then both sides process pictures with PIL.

    python benchmarks/grpo_pictures.py --trl-python VENV/bin/python --model smolsee-135m
    python benchmarks/grpo_pictures.py --model smolsee-135m          # ours alone
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

from tandem.config.errors import ConfigError
from tandem.data.procedural import clevr_count
from tandem.models.catalog import resolve

TRL_SCRIPT = """
import json, sys, time
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

model, file, steps, prompts, group, new, threads, micro = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:9])
torch.set_num_threads(threads)
rows = [json.loads(line) for line in open(file)]
rows = [{"prompt": [{"role": "user", "content": row["question"]}], "image": Image.open(row["image"])} for row in rows]


def spread(completions, **_):
    return [float(sum(map(ord, completion[0]["content"])) % 7) for completion in completions]


class Clock(TrainerCallback):
    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        print("step", time.perf_counter() - self.began, flush=True)

    def on_log(self, *_, logs=None, **__):
        if logs and "completions/mean_length" in logs:
            print("length", logs["completions/mean_length"], "reward", logs["reward"], flush=True)


args = GRPOConfig(output_dir="out", use_cpu=True, bf16=False, per_device_train_batch_size=micro,
                  gradient_accumulation_steps=prompts * group // micro, num_generations=group, max_completion_length=new,
                  learning_rate=1e-12, max_steps=steps, logging_steps=1, save_strategy="no", report_to=[], temperature=1.0,
                  beta=0.0, gradient_checkpointing=False, lr_scheduler_type="constant", disable_tqdm=True)
GRPOTrainer(model=AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32), reward_funcs=spread, args=args,
            train_dataset=Dataset.from_list(rows), processing_class=AutoProcessor.from_pretrained(model),
            callbacks=[Clock()]).train()
"""


def write_rows(folder: Path, count: int) -> Path:
    """Scenes as PNG files, and ``rows.jsonl`` with their questions."""
    lines = []
    for number, row in enumerate(clevr_count("train", size=count, seed=1)):
        shown, asked = row["messages"][0]["content"]
        shown["image"].save(folder / f"{number}.png")
        lines.append({"image": str(folder / f"{number}.png"), "question": asked["text"], "answer": row["answer"]})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def ours(file: Path, model: Path, args: argparse.Namespace) -> dict[str, float]:
    """Runs `tandem train` and reads its metrics."""
    reward = file.with_name("rewards.py")
    reward.write_text("def spread(completion):\n    return float(sum(map(ord, completion)) % 7)\n")
    items = [
        f"run.root={file.parent}/runs",
        f"total_train_steps={args.steps}",
        f"actor.path={model}",
        "actor.dtype=float32",
        "rollout.dtype=float32",
        f"train_dataset.path={file}",
        f"reward={reward}:spread",
        "algorithm=grpo",
        "actor.optimizer.lr=1e-12",
        f"gconfig.n_samples={args.group}",
        f"gconfig.max_new_tokens={args.new_tokens}",
        f"rollout.batch_size={args.prompts}",
        f"actor.max_tokens_per_micro_batch={args.micro_batch}",
        f"threads={args.threads}",
        "evaluate.every_steps=null",
        "checkpoint.at_end=false",
    ]
    command = [sys.executable, "-m", "tandem.cli.main", "train", *items]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=3600)
    lines = next((file.parent / "runs").glob("*/*/metrics.jsonl")).read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 1]
    names = {"step_s": "time/step_s", "length": "completion_length/mean", "reward": "reward/mean"}
    return {name: statistics.median(row[key] for row in rows) for name, key in names.items()}


def trl(file: Path, model: Path, args: argparse.Namespace) -> dict[str, float]:
    """Runs TRL in its own environment and reads what it prints."""
    script = file.with_name("trl_side.py")
    script.write_text(TRL_SCRIPT)
    sizes = map(str, (args.steps, args.prompts, args.group, args.new_tokens, args.threads, args.trl_micro_batch))
    command = [args.trl_python, str(script), str(model), str(file), *sizes]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=file.parent, env=environment, timeout=3600, check=True
    )
    steps = [float(found) for found in re.findall(r"^step ([\d.]+)", done.stdout, re.M)][1:]
    logged = [(float(a), float(b)) for a, b in re.findall(r"^length ([\d.]+) reward ([\d.]+)", done.stdout, re.M)][1:]
    lengths, rewards = zip(*logged, strict=True)
    return {"step_s": statistics.median(steps), "length": statistics.median(lengths), "reward": statistics.median(rewards)}


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python")
    parser.add_argument("--model", default="smolsee-135m")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=2048, help="tokens of ours")
    parser.add_argument("--trl-micro-batch", type=int, default=32, help="samples of TRL's")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    try:
        model = resolve(args.model).resolve()
    except ConfigError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        file = write_rows(Path(folder), 64)
        result: dict[str, object] = {"tandem": ours(file, model, args)}
        if args.trl_python:
            result["trl"] = trl(file, model, args)
            result["ratio"] = result["trl"]["step_s"] / result["tandem"]["step_s"]  # type: ignore[index]
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
