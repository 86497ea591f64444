"""What tests of scores in a run share: its configuration, and what it wrote."""

import json

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config


def resolved(overrides, *more):
    keys = {
        item.partition("=")[0]: item
        for item in [*overrides, "total_train_steps=2", "gconfig.n_samples=4", "tracking.trajectories_per_step=99", *more]
    }
    return load_config(TrainConfig, None, list(keys.values()))


def steps(summary):
    return [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]


def samples_of(summary, step=1):
    return [json.loads(line) for line in (summary.folder / f"trajectories/step_{step}.jsonl").read_text().splitlines()]
