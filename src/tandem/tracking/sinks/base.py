"""What a sink is, which there are, and how one is opened."""

import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem.config.errors import ConfigError
from tandem.config.extras import install_extra
from tandem.config.nearest import nearest_names


class Sink(Protocol):
    """Receives the metrics of each step. May raise: whoever calls it warns and goes on without it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Finite and non-finite values alike."""
        ...

    def close(self) -> None:
        """Deliver what is left."""
        ...


@dataclass(frozen=True)
class SinkRun:
    """What a sink is told of the run."""

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]
    """Plain values, as in config.yaml."""


SINKS = {
    "tensorboard": ("tensorboard", "tandem.tracking.sinks.tensorboard:TensorBoardSink"),
    "wandb": ("wandb", "tandem.tracking.sinks.wandb:WandbSink"),
    "trackio": ("trackio", "tandem.tracking.sinks.trackio:TrackioSink"),
}
"""Name → (package it needs, which is also the extra that installs it; module and class)."""


def find_sink(name: str) -> Callable[[SinkRun], Sink]:
    """The class of this sink; imports its library.

    Raises:
        ConfigError: no such sink (names the nearest), or its package is missing (says what to install).
    """
    if name not in SINKS:
        raise ConfigError(f"tracking.sinks has {name!r}; {nearest_names(name, SINKS)}")
    package, place = SINKS[name]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"tracking.sinks has {name!r}, whose package is not installed: {install_extra(name)}")
    return pkgutil.resolve_name(place)
