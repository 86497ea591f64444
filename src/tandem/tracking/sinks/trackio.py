"""trackio: metrics in a local data base, shown by `trackio show`."""

import math
from collections.abc import Mapping

import trackio

from tandem.tracking.sinks.base import SinkRun


class TrackioSink:
    def __init__(self, run: SinkRun):
        self._run = trackio.init(project=run.project, name=run.name, config=dict(run.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        self._run.finish()
