"""TensorBoard: event files in `<run folder>/tensorboard`, shown by `tensorboard --logdir runs`."""

import json
import math
from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from tandem.tracking.sinks.base import SinkRun


class TensorBoardSink:
    def __init__(self, run: SinkRun):
        self._writer = SummaryWriter(str(run.folder / "tensorboard"))
        self._writer.add_text("config", f"```json\n{json.dumps(dict(run.config), indent=2, default=str)}\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar each; values that are not finite are left out."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
