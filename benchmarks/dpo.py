"""Tokens a second of DPO on ragged pairs, against TRL on the same pairs, model, precision and threads.

Pairs have prompts of 20 to 200 words and sides of 1 to 120, drawn from a seed. Tokens are those of every sequence, prompt
and answer, without padding, the same number for both. The time is that of whole steps, in each of which both compute the
reference's log-probabilities; medians over the steps after the first.

    python benchmarks/dpo.py --trl-python VENV/bin/python --model MODEL_FOLDER
    python benchmarks/dpo.py                       # ours alone
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = ("the", "sum", "of", "two", "numbers", "is", "what", "you", "get", "when", "one", "counts", "three", "seven")

TRL_SCRIPT = """
import json, sys, time
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

model, file, steps, batch, dtype, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), sys.argv[5], int(sys.argv[6])
torch.set_num_threads(threads)
rows = [json.loads(line) for line in open(file)]
chat = lambda role, text: [{"role": role, "content": text}]
rows = [{"prompt": chat("user", r["prompt"]), "chosen": chat("assistant", r["chosen"]),
         "rejected": chat("assistant", r["rejected"])} for r in rows]


class Clock(TrainerCallback):
    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        print("step", time.perf_counter() - self.began, flush=True)


kind = getattr(torch, dtype)
args = DPOConfig(output_dir="out", max_steps=steps, per_device_train_batch_size=batch, learning_rate=1e-12, beta=0.1,
                 max_length=None, report_to=[], use_cpu=True, save_strategy="no", bf16=dtype == "bfloat16",
                 gradient_checkpointing=False, disable_tqdm=True)
load = lambda: AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
trainer = DPOTrainer(load(), load(), args=args, train_dataset=Dataset.from_list(rows),
                     processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Clock()])
trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
trainer.train()
"""


def write_pairs(file: Path, count: int) -> None:
    """Ragged pairs."""
    draw = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(low, high)))

    rows = ({"prompt": text(20, 200), "chosen": text(1, 120), "rejected": text(1, 120)} for _ in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours(file: Path, model: str, steps: int, batch: int, dtype: str, threads: int) -> list[tuple[float, int]]:
    """(seconds, tokens) of each step of `tandem preference`."""
    root = file.parent / "runs"
    items = [
        f"run.root={root}",
        f"actor.path={model}",
        f"train_dataset.path={file}",
        "train_dataset.shuffle=false",
        f"total_train_steps={steps}",
        f"batch_size={batch}",
        f"actor.dtype={dtype}",
        "actor.optimizer.lr=1e-12",
        f"threads={threads}",
        "checkpoint.at_end=false",
    ]
    subprocess.run([sys.executable, "-m", "tandem", "preference", *items], check=True, stdout=sys.stderr, timeout=3600)
    lines = next(root.glob("*/*/metrics.jsonl")).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["time/train_s"], round(row["tokens_per_s/train"] * row["time/train_s"])) for row in rows]


def trl(python: str, file: Path, model: str, steps: int, batch: int, dtype: str, threads: int) -> list[float]:
    """Seconds of each step of TRL's DPOTrainer, in its own environment."""
    script = file.parent / "trl_dpo.py"
    script.write_text(TRL_SCRIPT)
    command = [python, str(script), model, str(file), str(steps), str(batch), dtype, str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=file.parent, env=environment, timeout=3600
    )
    return [float(seconds) for seconds in re.findall(r"^step ([\d.]+)", done.stdout, re.M)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder of the model; TRL needs a folder")
    parser.add_argument("--trl-python", help="Python of an environment with TRL")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8, help="pairs a step")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.jsonl"
        write_pairs(file, options.steps * options.batch_size)
        shared = (options.model, options.steps, options.batch_size, options.dtype, options.threads)
        mine = ours(file, *shared)
        rates = [tokens / seconds for seconds, tokens in mine[1:]]
        print(f"tandem: {statistics.median(rates):8.0f} tokens/s")
        if options.trl_python:
            seconds = trl(options.trl_python, file, *shared)
            theirs = [tokens / s for s, (_, tokens) in zip(seconds[1:], mine[1:], strict=True)]
            print(f"TRL:    {statistics.median(theirs):8.0f} tokens/s")
            print(f"ratio:  {statistics.median(rates) / statistics.median(theirs):8.2f}")


if __name__ == "__main__":
    main()
