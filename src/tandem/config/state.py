"""The run folder, checkpoints, and what watches over a run."""

from dataclasses import dataclass
from typing import Literal


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
    machines, and at the end of a run, it waits for the whole save."""

    on_error: Literal["stop", "continue"] = "stop"
    """A checkpoint that the disk refuses ends the run, or training goes on and tries again at the next one; the last
    checkpoint of a run must always be written."""


@dataclass(frozen=True)
class RecoverConfig:
    """What becomes of a run that is interrupted, breaks or gets nowhere."""

    grace_s: float = 30.0
    """An interrupted run (Ctrl-C, SIGTERM, SIGHUP) may finish its step and be saved for so long; 0 ends it at once."""

    max_restarts: int = 0
    """The command starts all ranks again from the last checkpoint when one dies or gets nowhere, at most so often; needs
    `checkpoint.every_steps`."""

    stalled_after_s: float | None = 3600.0
    """A run in which nothing is done for so long ends with the stacks of all its threads, but never sooner than a minute
    after `rollout.wait_timeout_s` and `episode_timeout_s`; null watches for no progress."""
