"""The decision about a command whose run folder holds a run: it goes on, or it is refused with the reason. Imports no
torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig
from tandem.config.load import plain_data
from tandem.config.resume import KeyDifference, differences
from tandem.state.existing import ExistingRun, existing_run, step_of, written_config


class RunFolderTaken(ConfigError):
    """The folder holds a run that does not go on."""


@dataclass(frozen=True)
class Going:
    """A run that goes on."""

    found: ExistingRun
    changed: tuple[KeyDifference, ...] = ()

    def describe(self) -> str:
        """The command's next action in words, for the terminal."""
        changes = "".join(f"\n  {difference}" for difference in self.changed)
        return f"Going on with {self.found.folder}: {self.found.describe()}." + (f" Changed:{changes}" if changes else "")


Examine = Callable[[Path], Going | None]
"""Says of a run folder: None, there is no run yet; or which run goes on. Raises `ConfigError` where none may."""


def refuse_existing(folder: Path) -> None:
    """Raises `RunFolderTaken` where the folder holds a run; says what of it, and how to proceed.

    A run that failed before its first step left nothing worth keeping: its folder may be used again.
    """
    run = existing_run(folder)
    if run is not None and not _left_nothing(run):
        raise RunFolderTaken(_taken(run))


def may_go_on(config: BaseConfig, *, override: bool = False) -> Examine:
    """For a command with this configuration. ``override``: values of `tandem.config.resume.MAY_CHANGE` may be others.

    A run that is finished goes on only where it is made longer. The result raises `ConfigError` where the configurations do
    not agree, with every difference, and `RunFolderTaken` where the run is finished.
    """

    def examine(folder: Path) -> Going | None:
        run = existing_run(folder)
        if run is None or _left_nothing(run):
            return None
        if (run.steps or run.checkpoints) and not (folder / "config.yaml").is_file():
            raise RunFolderTaken(f"{_taken(run)} It cannot go on: its config.yaml is missing.")
        changed = tuple(_changes(folder, config))
        refused = [d for d in changed if not (d.may_change if override else d.passes)]
        longer = any(d.key.startswith("total_train_") for d in changed) and run.checkpoints
        if run.status == "finished" and not longer:
            raise RunFolderTaken(
                f"{_taken(run)} To train it longer, repeat the command with a larger total_train_steps and --override."
            )
        if longer:
            _refuse_shorter(run, config.total_train_steps)
        if refused:
            raise ConfigError(_disagreement(run, refused))
        return Going(run, changed)

    return examine


def value_before(folder: Path, key: str) -> Any:
    """The value that the run in the folder began with; None if there is none, or it does not know the key.

    Raises:
        ConfigError: nobody knows what it was.
    """
    run = existing_run(folder)
    value = None if run is None or _left_nothing(run) else written_config(folder, "what the run was", "restore it")
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _refuse_shorter(run: ExistingRun, total: int | None) -> None:
    """A finished run is not made shorter, and one that was cut off does not end before its newest checkpoint."""
    done = run.steps if run.status == "finished" else step_of(Path(run.checkpoints[-1]))
    if total is not None and total < done:
        raise ConfigError(
            f"{run.folder} holds a run of {done} steps, and total_train_steps={total} would make it shorter: give more "
            "steps than that, or begin another run with trial_name=…"
        )


def _changes(folder: Path, config: BaseConfig) -> list[KeyDifference]:
    """Between the configuration in the folder and this one; none where nothing was written yet."""
    before = written_config(folder, "what the run was", "restore it")
    now = plain_data(config)
    if not isinstance(before, dict):
        raise ConfigError(f"{folder / 'config.yaml'} is no configuration; restore it")
    return list(differences(before, now, plain_data(type(config)()))) if before else []


def _disagreement(run: ExistingRun, refused: list[KeyDifference]) -> str:
    fixed = [difference for difference in refused if not difference.may_change]
    lines = "".join(f"\n  {difference}" for difference in refused)
    if fixed:
        keys = ", ".join(difference.key for difference in fixed)
        remedy = (
            f"{keys} cannot change within a run: give the values that it began with, or begin another run with "
            "trial_name=… (from these weights: actor.path=FOLDER of a checkpoint)"
        )
    else:
        remedy = "add --override to go on with the new values, or give those that it began with"
    return f"{run.folder} holds a run with another configuration ({run.describe()}):{lines}\n{remedy}."


def _left_nothing(run: ExistingRun) -> bool:
    return run.status == "failed" and run.steps == 0 and not run.checkpoints


def _taken(run: ExistingRun) -> str:
    return (
        f"{run.folder} holds a run: {run.describe()}. A run is never overwritten: choose another name with "
        "trial_name=…, or move that folder away."
    )
