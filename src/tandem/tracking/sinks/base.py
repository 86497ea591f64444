"""The contract of a sink. Those that there are stand in the table of services; any class with these methods is one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


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
    """The run that a sink is opened for: it asks for it by the argument name ``run``."""

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]
    """Plain values, as in config.yaml."""
