"""The run folder, checkpoints, and what watches over a run."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RunConfig:
    """The folder where a run keeps its files."""

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
    """Also keep every checkpoint whose step is a multiple of this."""

    keep_best: str | None = None
    """Also keep the checkpoint with the highest value of this metric, such as `eval/accuracy`; `-eval/loss` keeps the
    lowest."""

    at_end: bool = True
    """Save a checkpoint when training ends."""

    resumable: bool = True
    """Save what resuming needs (12 bytes a parameter) with the model; false saves the model only."""

    asynchronous: bool = True
    """Save in the background: training waits only for a copy in host memory (12 bytes a parameter). On several machines, and
    at the end of a run, it waits for the whole save."""

    on_error: Literal["stop", "continue"] = "stop"
    """If the disk refuses a checkpoint: `stop` ends the run, `continue` trains on and tries again at the next one. The last
    checkpoint of a run must be written in any case."""


@dataclass(frozen=True)
class RecoverConfig:
    """The behaviour of a run that is interrupted, fails or hangs."""

    grace_s: float = 30.0
    """Seconds that an interrupted run (Ctrl-C, SIGTERM, SIGHUP) may take to finish and save its step; 0 ends it at once."""

    max_restarts: int = 0
    """Number of times that all ranks may be started again from the last checkpoint after one died or hung; needs
    `checkpoint.every_steps`. With `runner=ray`: also times that a worker which died is replaced, and the others go on."""

    silent_after_s: float | None = 15.0
    """With `runner=ray`: a worker that does not answer for this long has died, and is killed; null waits for ever."""

    cut_off_after_s: float | None = 300.0
    """On several machines: one that is not heard of for this long ends the run; it is told of after 15 s. null waits on."""

    stalled_after_s: float | None = 3600.0
    """A run that makes no progress for this long is ended, and the stacks of its threads are written. It is at least a
    minute more than `rollout.wait_timeout_s` and `episode_timeout_s`; null turns this off."""
