"""Finds the run that a command or a key names, and decides whether a run that is in a folder goes on.

A run is named by its folder, or as EXPERIMENT/TRIAL below the root; an added @STEP chooses a checkpoint. Imports torch only
to find a checkpoint.
"""

import difflib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tandem.config.arithmetic import folder_of
from tandem.config.coming_from import REMOVED
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, RunConfig
from tandem.config.keys import leaves
from tandem.config.load import Resolved, plain_data
from tandem.config.resume import KeyDifference, differences
from tandem.state.existing import ExistingRun, existing_run, run_folders, step_of, written_config


class RunFolderTaken(ConfigError):
    """The folder holds a run that cannot be resumed."""


@dataclass(frozen=True)
class Going:
    """A run that is resumed, and the configuration keys that changed."""

    found: ExistingRun
    changed: tuple[KeyDifference, ...] = ()

    def describe(self) -> str:
        """Returns a message for the terminal: which run is resumed, and what changed."""
        changes = "".join(f"\n  {difference}" for difference in self.changed)
        return f"Going on with {self.found.folder}: {self.found.describe()}." + (f" Changed:{changes}" if changes else "")


Examine = Callable[[Path], Going | None]
"""Returns the run in a run folder that is resumed, or None if there is no run yet. Raises `ConfigError` if the run must not
be resumed."""


def refuse_existing(folder: Path) -> None:
    """Raises `RunFolderTaken` if the folder holds a run; the message describes the run and says how to proceed.

    The folder of a run that failed before its first step may be used again.
    """
    run = existing_run(folder)
    if run is not None and not _left_nothing(run):
        raise RunFolderTaken(_taken(run))


def may_go_on(config: BaseConfig, *, override: bool = False) -> Examine:
    """Returns the function that examines the run folder of a command with this configuration. ``override``: keys of
    `tandem.config.resume.MAY_CHANGE` may have new values.

    A finished run is resumed only if it is made longer; otherwise the function raises `RunFolderTaken`. If the
    configurations do not agree, it raises `ConfigError` with every difference.
    """

    def examine(folder: Path) -> Going | None:
        run = existing_run(folder)
        if run is None or _left_nothing(run):
            return None
        if (run.steps or run.checkpoints) and not (folder / "config.yaml").is_file():
            raise RunFolderTaken(f"{_taken(run)} The run cannot be resumed, because its config.yaml is missing.")
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
    """Returns the value of ``key`` with which the run in the folder began; None if there is no run, or it lacks the key.

    Raises:
        ConfigError: the run's configuration cannot be read.
    """
    run = existing_run(folder)
    value = None if run is None or _left_nothing(run) else written_config(folder, "what the run was", "restore it")
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _refuse_shorter(run: ExistingRun, total: int | None) -> None:
    """Raises `ConfigError` if ``total`` steps would end a finished run earlier, or an interrupted one before its newest
    checkpoint."""
    done = run.steps if run.status == "finished" else step_of(Path(run.checkpoints[-1]))
    if total is not None and total < done:
        raise ConfigError(
            f"{run.folder} holds a run of {done} steps, and total_train_steps={total} would make it shorter: give a larger "
            "total_train_steps, or begin another run with trial_name=…"
        )


def _changes(folder: Path, config: BaseConfig) -> list[KeyDifference]:
    """Returns the differences between the configuration in the folder and ``config``; [] if the folder has none yet."""
    before = written_config(folder, "what the run was", "restore it")
    present = plain_data(config)
    if not isinstance(before, dict):
        raise ConfigError(f"{folder / 'config.yaml'} is not a configuration; restore it")
    return list(differences(before, present, plain_data(type(config)()))) if before else []


def _disagreement(run: ExistingRun, refused: list[KeyDifference]) -> str:
    fixed = [difference for difference in refused if not difference.may_change]
    lines = "".join(f"\n  {difference}" for difference in refused)
    if gone := [difference for difference in fixed if difference.key in REMOVED]:
        ends = "; ".join(f"{difference.key} is no key any more: {REMOVED[difference.key].now}" for difference in gone)
        remedy = f"{ends}. Finish this run with the version of Tandem that began it, or begin another one (trial_name=…)"
    elif fixed:
        keys = ", ".join(difference.key for difference in fixed)
        remedy = (
            f"{keys} cannot change within a run: use the values that it began with, or begin another run with "
            "trial_name=… (from these weights: actor.path=FOLDER of a checkpoint)"
        )
    else:
        remedy = "add --override to go on with the new values, or use the values that it began with"
    return f"{run.folder} holds a run with another configuration ({run.describe()}):{lines}\n{remedy}."


def _left_nothing(run: ExistingRun) -> bool:
    return run.status == "failed" and run.steps == 0 and not run.checkpoints


def _taken(run: ExistingRun) -> str:
    return (
        f"{run.folder} holds a run: {run.describe()}. A run is never overwritten: choose another name with "
        "trial_name=…, or move that folder away."
    )


C = TypeVar("C")

MODEL_KEYS = ("actor.path", "reference.path", "critic.path", "teacher.path", "model")
"""Configuration keys that name a model."""

PINNED = "pinned: "
"""Prefix of the source of a key whose value was the name of a run."""

SHOWN = 12


class NamedRun(NamedTuple):
    """A run and the chosen step: a number as text, `best`, or None."""

    folder: Path
    step: str | None

    @property
    def checkpoint(self) -> Path:
        """The folder of the chosen checkpoint; without a step the newest intact one.

        Raises:
            ConfigError: there is no such checkpoint; the message names the existing ones.
        """
        from tandem.state.export import checkpoint_of  # noqa: PLC0415 — imports torch

        return checkpoint_of(self.folder, self.step)


def named_run(text: str) -> NamedRun | None:
    """Returns the run that ``text`` names; None if it names none and may be a model's folder or a hub name.

    Raises:
        ConfigError: ``text`` has a step, and there is no such run; or it is a folder that holds runs.
    """
    try:
        stepless = "@" not in Path(text).name or Path(text).expanduser().exists()
        name, at, step = (text, "", "") if stepless else text.rpartition("@")
        places = [Path(name).expanduser(), Path(RunConfig().root, name)]
    except (OSError, RuntimeError):  # the name is too long, or `~user` is unknown
        return None
    if stepless and _is_model(places[0]):  # an existing model folder takes precedence over a run of the same name
        return None
    for place in places:
        if existing_run(place) is not None and not _is_model(place):
            return NamedRun(place, step or None)
    if at:
        raise ConfigError(no_run(name))
    if os.path.isdir(places[0]) and not _is_model(places[0]) and (below := run_names(places[0])):
        raise ConfigError(f"{text} holds runs, but is not a run itself: give one of them, such as {below[0]}")
    return None


def _is_model(folder: Path) -> bool:
    return os.path.isfile(folder / "config.json")  # also False for a name that no folder can have


def named_model(text: str) -> str:
    """Returns the checkpoint's folder if ``text`` names a run; otherwise ``text`` unchanged (a model's folder or name).

    Raises:
        ConfigError: the run exists, but not the checkpoint.
    """
    run = named_run(text)
    if run is not None:
        return str(run.checkpoint.absolute())
    return text


def run_names(root: Path) -> list[str]:
    """Returns EXPERIMENT/TRIAL of each run below a folder."""
    folders = [path for path in run_folders(root) if path != root and existing_run(path)] if root.is_dir() else []
    return [f"{path.parent.name}/{path.name}" for path in folders]


def no_run(name: str) -> str:
    """Returns an error message which says that there is no such run, and lists the existing ones."""
    place = Path(os.path.expanduser(name))
    if os.path.isfile(place):
        runs = [str(folder) for folder in place.parents if os.path.isfile(folder / "run.json")]
        near = f"; did you mean {runs[0]}" if runs else ""
        return f"{name} is a file: a run is a folder, or EXPERIMENT/TRIAL of one below {RunConfig().root}{near}"
    root = place.parent.parent if len(place.parts) > 2 else Path(RunConfig().root)
    names = run_names(root)
    alike = difflib.get_close_matches(f"{place.parent.name}/{place.name}", names, 1, 0.5)
    others = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    listed = f"there are {', '.join(names[:SHOWN])}{others} (`tandem runs`)" if names else f"there is none below {root}"
    return f"there is no run {name}" + (f", did you mean {alike[0]}" if alike else "") + f"; {listed}"


def pinned(resolved: Resolved[Any]) -> Resolved[Any]:
    """Returns the configuration with each run that is given as a model replaced by the path of its checkpoint, which does
    not change when that run saves newer ones. A resumed run keeps the checkpoint that it began with.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    config, sources = resolved.config, dict(resolved.sources)
    for key, value in leaves(resolved.config):
        if key not in MODEL_KEYS or not value or (path := named_model(value)) == value:
            continue
        if (run := named_run(value)) is not None and run.step is None and hasattr(config, "trial_name"):
            before = value_before(folder_of(config), key)
            if before and Path(before).parent.parent == run.folder.absolute():
                path = before
        config = _with(config, key.split("."), path)
        sources[key] = f"{PINNED}{'a' if '@' in value else 'the newest'} checkpoint of {value}"
    return Resolved(config, sources)


def pins(resolved: Resolved[Any]) -> list[str]:
    """Returns the arguments ``key=value`` with which other processes use the same checkpoints."""
    values = dict(leaves(resolved.config))
    return [f"{key}={json.dumps(values[key])}" for key, text in resolved.sources.items() if text.startswith(PINNED)]


def _with(config: C, names: list[str], value: str) -> C:
    """Returns a copy of a nested dataclass with the value at the path ``names`` replaced."""
    inner = value if len(names) == 1 else _with(getattr(config, names[0]), names[1:], value)
    return replace(config, **{names[0]: inner})  # type: ignore[type-var]
