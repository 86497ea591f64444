"""The run folder and checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunConfig:
    """Where a run keeps its files."""

    root: str = "runs"
    """Folder under which `<experiment>/<trial>/` is made."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the model is saved."""

    every_steps: int | None = None
    """Save a Hugging Face folder every so many steps; null saves only at the end."""

    keep_last: int | None = 2
    """Keep this many of the newest checkpoints; null keeps all."""

    at_end: bool = True
    """Save a checkpoint when training ends."""
