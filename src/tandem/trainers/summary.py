"""What a run came to, and the folder it leaves."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tandem.api.collective import from_main, together
from tandem.api.failures import UserCodeFailed
from tandem.config.arithmetic import arithmetic
from tandem.config.experiment import BaseConfig
from tandem.config.load import Resolved, describe, plain_data, to_yaml
from tandem.state.checkpoint import save_checkpoint
from tandem.state.run_folder import RunFolder
from tandem.tracking.tracker import Tracker
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
    """Step → accuracy on the validation rows, where the reward states one; step 0 is before training."""


def announce(resolved: Resolved[Any], config: BaseConfig, num_rows: int) -> Summary:
    """What `--dry-run` prints: the configuration, and in words what training by ``config`` on so many rows comes to."""
    print(describe(resolved))
    print(arithmetic(config, num_rows))
    return Summary(folder=None, steps=0)


def open_run(
    config: BaseConfig, process: Process, stack: contextlib.ExitStack, *, steps: int
) -> tuple[RunFolder | None, Tracker | None]:
    """The run folder and its tracker, on rank 0; what fails there fails on all ranks. Collective.

    Raises:
        ConfigError: the folder holds a run, cannot be written, or a sink is not installed.
        OSError: `metrics.jsonl` cannot be written.
    """
    run = tracker = None
    with together():
        if process.is_main:
            names = config.run.root, config.experiment_name, config.trial_name
            run = stack.enter_context(RunFolder.open(*names, config_text=to_yaml(config), seed=config.seed))
            name = f"{config.experiment_name}/{config.trial_name}"
            tracker = stack.enter_context(
                Tracker(run.path, config.tracking, total_steps=steps, run_name=name, config_dict=plain_data(config))
            )
    return run, tracker


@contextlib.contextmanager
def telling_step(number: int) -> Iterator[None]:
    """Names the step in the error of a user's function that failed in it."""
    try:
        yield
    except UserCodeFailed as error:
        raise UserCodeFailed(f"step {number}: {error}") from error


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
