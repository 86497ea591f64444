"""What a run came to, and the folder it leaves."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tandem.api.collective import from_main, together
from tandem.config.experiment import BaseConfig
from tandem.config.load import to_yaml
from tandem.state.checkpoint import save_checkpoint
from tandem.state.run_folder import RunFolder
from tandem.trainers.process import Process


class Saves(Protocol):
    """A training engine, or several."""

    def save(self, folder: Path) -> None:
        """See `TrainEngine.save`."""
        ...


@dataclass(frozen=True)
class Summary:
    """What a run came to."""

    folder: Path | None
    steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step."""

    checkpoint: Path | None = None
    evaluations: dict[int, float] = field(default_factory=dict)
    """Step → greedy accuracy; step 0 is before training."""


def open_run(config: BaseConfig, process: Process, stack: contextlib.ExitStack) -> RunFolder | None:
    """The run folder, on rank 0; refuses one that holds a run, on all ranks. Collective."""
    run = None
    with together():
        if process.is_main:
            names = config.run.root, config.experiment_name, config.trial_name
            run = stack.enter_context(RunFolder.open(*names, config_text=to_yaml(config), seed=config.seed))
    return run


def run_id(run: RunFolder | None) -> str:
    """The run's own name, as rank 0 has it, on all ranks. Collective."""
    return from_main(lambda: run.id if run is not None else "")


def save_if_due(
    config: BaseConfig, run: RunFolder | None, step: int, steps: int, engine: Saves, save_tokenizer: object
) -> Path | None:
    """Saves a checkpoint where `checkpoint` asks for one at this step; returns its folder on rank 0. Collective."""
    every = config.checkpoint.every_steps
    if not ((every and step % every == 0) or (step == steps and config.checkpoint.at_end)):
        return None
    return save_checkpoint(run, step, engine.save, save_tokenizer, keep_last=config.checkpoint.keep_last)
