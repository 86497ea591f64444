"""Preference learning, for tests of `memory_limit_gib`; also a process of its own:

python -m tests.trainers.preferring ROOT MODEL CAP_MIB KEY=VALUE…   (prints a JSON line: peaks over the start, in MiB)
"""

import json
import sys
from pathlib import Path

from tandem.config.load import load_config
from tandem.config.preference import PreferenceConfig
from tandem.trainers.recipes import train
from tests.trainers.colocated import measured


def keys_of(root: Path, model: Path, *more: str) -> list[str]:
    """The configuration of a run, with data that it makes; of two equal keys the last one counts."""
    root.mkdir(exist_ok=True)
    for split, numbers in (("train", range(24)), ("test", range(24, 32))):
        rows = ({"prompt": f"Is {number} a number?", "chosen": "yes", "rejected": "no, never"} for number in numbers)
        (root / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [
        f"run.root={root}",
        f"actor.path={model}",
        "actor.dtype=float32",
        "actor.optimizer.lr=0.003",
        f"train_dataset.path={root}",
        "total_train_steps=3",
        "tracking.plot_every_steps=null",
        "batch_size=4",
        "evaluate.every_steps=1",
        "evaluate.max_rows=4",
        "checkpoint.every_steps=1",
        "threads=1",
        "deterministic=true",
        *more,
    ]
    return list({key.partition("=")[0]: key for key in keys}.values())


def main(root: str, model: str, cap_mib: str, *more: str) -> None:
    """Trains, under a limit of this process's data unless ``cap_mib`` is 0."""
    keys = keys_of(Path(root), Path(model), *more)
    measured(int(cap_mib), lambda: train(load_config(PreferenceConfig, None, keys)))


if __name__ == "__main__":
    main(*sys.argv[1:])
