"""trackio: metrics in a local data base, shown by `trackio show`."""

import math
from collections.abc import Mapping

import trackio

from tandem.tracking.sinks.base import SinkRun


class TrackioSink:
    """See `Sink`."""

    def __init__(self, run: SinkRun):
        self._run = trackio.init(project=run.project, name=run.name, config=dict(run.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All finite metrics of the step at once."""
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """Writes the rest."""
        self._run.finish()
