"""Sinks send metrics to other tools. Their libraries are optional, so each is imported when its sink is opened.

The built-in sinks are in the table of services; any class with the methods of `Sink` is a sink.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Receives the metrics of each step. If it raises an exception, `Tracker` logs a warning and drops the sink."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step. A value may be NaN or infinite."""
        ...

    def close(self) -> None:
        """Delivers metrics that are still buffered, and releases resources."""
        ...


@dataclass(frozen=True)
class SinkRun:
    """The run for which a sink is opened. It is passed to a sink whose constructor has an argument ``run``."""

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]
    """The configuration as plain values, as in config.yaml."""


class TensorBoardSink:
    """Writes event files into `<run folder>/tensorboard`, shown by `tensorboard --logdir runs`."""

    def __init__(self, run: SinkRun):
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 — an extra

        self._writer = SummaryWriter(str(run.folder / "tensorboard"))
        self._writer.add_text("config", f"```json\n{json.dumps(dict(run.config), indent=2, default=str)}\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes each metric as a scalar; values that are not finite are left out."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class TrackioSink:
    """Writes metrics into the local database of trackio, shown by `trackio show`."""

    def __init__(self, run: SinkRun):
        import trackio  # noqa: PLC0415 — an extra

        self._run = trackio.init(project=run.project, name=run.name, config=dict(run.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        self._run.finish()


class WandbSink:
    """Sends metrics to Weights & Biases. Log in first with `wandb login`, or set WANDB_MODE=offline."""

    def __init__(self, run: SinkRun):
        import wandb  # noqa: PLC0415 — an extra

        self._run = wandb.init(project=run.project, name=run.name, config=dict(run.config), dir=str(run.folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
