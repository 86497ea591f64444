"""What it costs that models take turns in memory: `time/switch_s` against the whole step.

    python benchmarks/switching.py [--path smollm2-135m] [--judges 3] [--limit-gib 2.5] [--steps 5]

Reach: at most 5 % of the step. GRPO with a reference and reward models of the actor's shape, each with a base of its own,
under a limit that holds the actor with its optimizer, the engine, and one or two models more. In the first two steps each
model sleeps for the first time and its folder is compared with it; they are left out. Medians of the others.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.build import build_train_engine
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.trainers.rl import train

MOST = 0.05


def make_judges(path: str, folder: Path, count: int, dtype: str) -> list[Path]:
    """Reward models of one shape whose numbers all differ, so that none shares anything."""
    made = []
    for number in range(count):
        torch.manual_seed(number)
        engine = build_train_engine(TrainEngineConfig(path=path, dtype=dtype), total_steps=1, head="scalar")
        engine.load_weights((name, x + 0.001 * torch.randn_like(x)) for name, x in list(engine.weights()))
        made.append(folder / f"judge-{number}")
        engine.save(made[-1])
        load_tokenizer(resolve(path)).save_pretrained(made[-1])
    return made


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--judges", type=int, default=3)
    parser.add_argument("--limit-gib", type=float, default=2.5)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        judges = make_judges(arguments.path, Path(folder), arguments.judges, arguments.dtype)
        reward = " + ".join(f"0.1*model(path={judge}, name=j{number})" for number, judge in enumerate(judges))
        keys = [f"actor.path={arguments.path}", f"actor.dtype={arguments.dtype}", f"run.root={folder}/runs"]
        keys += ["train_dataset.path=addition", "algorithm.kl.coefficient=0.05", f"reward=gsm8k + {reward}"]
        keys += ["rollout.batch_size=8", "gconfig.n_samples=8", "gconfig.max_new_tokens=64", "evaluate.every_steps=null"]
        keys += ["rollout.engine.kv_cache_gib=0.25"]
        keys += ["rollout.verify.every_steps=null", "checkpoint.at_end=false", "tracking.plot_every_steps=null"]
        keys += [f"total_train_steps={arguments.steps}", f"memory_limit_gib={arguments.limit_gib}"]
        run = train(load_config(TrainConfig, None, keys)).folder
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row.get("step", 0) > 2 and "time/switch_s" in row]
    names = sorted(name for name in rows[-1] if name.startswith("time/") or name == "memory/moved_gib")
    share = statistics.median(row["time/switch_s"] / row["time/step_s"] for row in rows)
    medians = {name: round(statistics.median(row[name] for row in rows), 3) for name in names}
    print(json.dumps({"share": share, "reached": share <= MOST, **medians}, indent=1))


if __name__ == "__main__":
    main()
