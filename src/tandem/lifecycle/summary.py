"""The outcome of a run, and the folder that it leaves."""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tandem.api.failures import UserCodeFailed
from tandem.api.team import Team
from tandem.config.arithmetic import arithmetic, first_limit, is_save_due
from tandem.config.cache import cache_folder
from tandem.config.commands import COMMANDS
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig
from tandem.config.load import Resolved, describe, plain_data, to_yaml
from tandem.flow.draw import text
from tandem.flow.parts import Rows
from tandem.flow.plan import RunPlan
from tandem.flow.process import Process
from tandem.flow.state_parts import describe_sleep, sleep_plan_here
from tandem.launch.rank import failed_elsewhere
from tandem.models.catalog import BUILT_IN, present
from tandem.state.checkpoint import CheckpointFailed, save_checkpoint
from tandem.state.existing import run_info
from tandem.state.resuming import Examine, refuse_existing
from tandem.state.run_folder import RunFolder, run_path
from tandem.tracking.tracker import Tracker

log = logging.getLogger(__name__)

SEEN_S = 90.0
"""Seconds to wait for a file that another machine wrote to a shared disk: an NFS client may remember for 60 s that the file
was absent."""


class Saveable(Protocol):
    """A training engine, or several."""

    def save(self, folder: Path) -> None: ...


@dataclass(frozen=True, repr=False)
class Summary:
    """The outcome of a run."""

    folder: Path | None
    steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step."""

    checkpoint: Path | None = None
    evaluations: dict[int, float] = field(default_factory=dict)
    """Step → accuracy on the validation rows, where the reward states one; step 0 is before training."""

    def __repr__(self) -> str:
        """Short, because a notebook shows it below a cell."""
        shown = ", ".join(f"{name} {self.metrics[name]:.4g}" for name in ("reward/mean", "loss") if name in self.metrics)
        saved = "no checkpoint" if self.checkpoint is None else f"checkpoint {self.checkpoint}"
        return f"<{self.steps} steps, {shown or 'no metrics'}, {saved}>"


def announce(
    resolved: Resolved[Any],
    config: BaseConfig,
    rows: Rows,
    plan: RunPlan,
    devices: Iterable[str] = (),
    *,
    every: bool = False,
) -> Summary:
    """Prints what a run would do, for `--dry-run`: the configuration, what is read of the rows, what training by
    ``config`` on them comes to in words, the models and the stages of a step, and what sleeps between them. ``devices``:
    lines about who holds what on which device. ``every``: the values that are as by default are shown too."""
    _print_config(resolved, every=every)
    for line in rows.told():
        print(line)
    print(arithmetic(config, len(rows.train)))
    print(text(plan))
    for line in devices:
        print(line)
    sleeping = sleep_plan_here(config, plan)
    if sleeping is not None:
        print(describe_sleep(sleeping))
    return Summary(folder=None, steps=0)


def to_be_fetched(plan: RunPlan) -> str | None:
    """The first built-in model of the run that this machine has not made yet."""
    paths = [resident.engine.path for resident in plan.residents if resident.engine is not None]
    return next((path for path in paths if path in BUILT_IN and present(path) is None), None)


def _print_config(resolved: Resolved[Any], *, every: bool) -> None:
    print(describe(resolved, hidden=() if every else ("default",)))
    if not every:
        print("Defaults are not listed; --all shows them too.")


def announce_absent(resolved: Resolved[Any], plan: RunPlan, model: str, *, every: bool = False) -> Summary:
    """Prints what `--dry-run` can say before a built-in model is here, and that the start fetches it."""
    _print_config(resolved, every=every)
    print(text(plan))
    print(f"The start will make the built-in model {model} once, in {cache_folder()}: {BUILT_IN[model].cost}.")
    print("What is checked with its tokenizer, such as rows and lengths, is checked then.")
    return Summary(folder=None, steps=0)


def tell_limit(config: BaseConfig, num_rows: int) -> None:
    """If two limits are set, warns which of them ends the run. (The dry run prints it with its arithmetic.)"""
    limit = first_limit(config, num_rows)
    if limit:
        log.warning("%s", limit)


def open_run(
    config: BaseConfig,
    process: Process,
    stack: contextlib.ExitStack,
    *,
    steps: int,
    examine: Examine = refuse_existing,
    notes: Sequence[str] = (),
) -> tuple[RunFolder | None, Tracker | None]:
    """The run folder and its tracker, on rank 0; what fails there fails on all ranks. Collective.

    ``examine``: says whether a run that is in the folder goes on (`may_go_on`); none does unless it is given. ``notes``:
    lines for the README of the folder.

    Raises:
        ConfigError: the folder holds a run that does not go on, cannot be written, or a sink is not installed.
        OSError: `metrics.jsonl` cannot be written.
    """
    run = tracker = None
    with process.team.together():
        if process.is_main:
            names = config.run.root, config.experiment_name, config.trial_name
            text, command = to_yaml(config), COMMANDS.get(type(config))
            run = stack.enter_context(
                RunFolder.open(*names, config_text=text, seed=config.seed, command=command, examine=examine)
            )
            name = f"{config.experiment_name}/{config.trial_name}"
            tracker = Tracker(
                run.path, config.tracking, total_steps=steps, run_name=name, config_dict=plain_data(config), notes=notes
            )
            # A launcher that ends this rank gives it a few seconds, and a picture would take them. The next start draws it.
            stack.callback(lambda: tracker.close(draw=failed_elsewhere() is None))
            print(f"Run folder: {run.path}. Loading {config.actor.path} …", flush=True)
    return run, tracker


def check_seen(config: BaseConfig, run: str, patience_s: float = SEEN_S) -> None:
    """Passes once this machine sees the folder that rank 0 has opened for the run of this name, as all must.

    Raises:
        ConfigError: it does not.
    """
    path, until = run_path(config.run.root, config.experiment_name, config.trial_name), time.monotonic() + patience_s
    while run_info(path).get("id") != run:
        if time.monotonic() > until:
            raise ConfigError(
                f"{socket.gethostname()} does not see the run folder of rank 0, {path.absolute()}: all machines must see "
                "run.root under the same path, on a disk that they share"
            )
        time.sleep(0.2)


def check_run_folder(config: BaseConfig, examine: Examine) -> None:
    """Passes if `open_run` would take the run folder; writes nothing.

    Raises:
        ConfigError: as `open_run`.
    """
    RunFolder.check(config.run.root, config.experiment_name, config.trial_name, examine)


def end_run(summary: Summary, run: RunFolder | None, steps: int) -> Summary:
    """The summary of a run of ``steps``; one that was told to stop earlier goes on some other time."""
    if run is not None and summary.steps < steps:
        run.finish("interrupted")
    return summary


@contextlib.contextmanager
def telling_step(number: int) -> Iterator[None]:
    """Names the step in the error of a user's function that failed in it."""
    try:
        yield
    except UserCodeFailed as error:
        raise UserCodeFailed(f"step {number}: {error}") from error


def save_if_due(
    team: Team,
    config: BaseConfig,
    run: RunFolder | None,
    step: int,
    steps: int,
    engine: Saveable,
    save_tokenizer: Callable[[Path], object],
    *,
    write_state: Callable[[Path], None] | None = None,
    metrics: Mapping[str, float] | None = None,
    leaving: bool = False,
) -> Path | None:
    """Saves a checkpoint where `checkpoint` asks for one at this step; returns its folder on rank 0. Collective.

    ``write_state``: writes what resuming needs, where `checkpoint.resumable` asks for it. ``metrics``: of this step.
    ``leaving``: the run is interrupted after this step, and saved if it saves at all and can go on from there.

    Raises:
        CheckpointFailed: the disk refuses, unless `checkpoint.on_error` lets training go on.
    """
    wish = config.checkpoint
    if not is_save_due(config, step, steps, leaving):
        return None
    try:
        return save_checkpoint(
            team,
            run,
            step,
            engine.save,
            save_tokenizer,
            wish.keep_last,
            write_state=write_state if wish.resumable else None,
            metrics=metrics,
            keep_every=wish.keep_every,
            keep_best=wish.keep_best,
        )
    except CheckpointFailed as error:
        if wish.on_error == "stop" or step == steps or leaving:
            raise
        if run is not None:
            run.failed_saves += 1
        log.warning("training goes on (checkpoint.on_error=continue), but %s", error)
        return None
