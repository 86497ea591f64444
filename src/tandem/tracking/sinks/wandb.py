"""Weights & Biases; log in before with `wandb login`, or set WANDB_MODE=offline."""

from collections.abc import Mapping

import wandb

from tandem.tracking.sinks.base import SinkRun


class WandbSink:
    def __init__(self, run: SinkRun):
        self._run = wandb.init(project=run.project, name=run.name, config=dict(run.config), dir=str(run.folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
