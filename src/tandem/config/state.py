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

    keep_every: int | None = None
    """Keep besides each checkpoint whose step is a multiple of this."""

    keep_best: str | None = None
    """Keep besides the checkpoint where this metric is highest, such as `eval/accuracy`; `-eval/loss` where it is lowest."""

    at_end: bool = True
    """Save a checkpoint when training ends."""

    resumable: bool = True
    """Save beside the model what resuming needs: 12 bytes a parameter; false saves the model alone."""

    asynchronous: bool = True
    """Training waits for a copy in host memory only (12 bytes a parameter), and goes on while that is written; over several
    ranks, and at the end of a run, it waits for the whole save."""
