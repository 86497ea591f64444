"""Runs by name, wherever a run or a model is asked for: a folder, or EXPERIMENT/TRIAL below the root; both with @STEP.

Imports torch only to find a checkpoint.
"""

import difflib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tandem.config.errors import ConfigError
from tandem.config.keys import leaves
from tandem.config.load import Resolved
from tandem.config.state import RunConfig
from tandem.state.existing import existing_run, run_folders
from tandem.state.resuming import value_before
from tandem.state.run_folder import run_path

C = TypeVar("C")

MODEL_KEYS = ("actor.path", "reference.path", "critic.path", "teacher.path", "model")
"""Keys that name a model."""

PINNED = "pinned: "
"""The beginning of the source of a key that named a run."""

SHOWN = 12


class NamedRun(NamedTuple):
    """A run, and the step that is written behind it: a number, `best`, or None."""

    folder: Path
    step: str | None

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint that is meant: without a step the newest that is whole.

        Raises:
            ConfigError: there is none; says which there are.
        """
        from tandem.state.export import checkpoint_of  # noqa: PLC0415 — imports torch

        return checkpoint_of(self.folder, self.step)


def named_run(text: str) -> NamedRun | None:
    """The run that is named, or None: it may be a model's folder, or a name on the hub.

    Raises:
        ConfigError: a step of a run that is not there; or a folder that holds runs and is none itself.
    """
    try:
        named = "@" not in Path(text).name or Path(text).expanduser().exists()
        name, at, step = (text, "", "") if named else text.rpartition("@")
        places = [Path(name).expanduser(), Path(RunConfig().root, name)]
    except (OSError, RuntimeError):  # a name too long, or a home folder that nobody has: no run's
        return None
    if named and _is_model(places[0]):  # a folder as it is written, also where a run below the root has the same name
        return None
    for place in places:
        if existing_run(place) is not None and not _is_model(place):
            return NamedRun(place, step or None)
    if at:
        raise ConfigError(no_run(name))
    if os.path.isdir(places[0]) and not _is_model(places[0]) and (below := run_names(places[0])):
        raise ConfigError(f"{text} holds runs and is none: give one of them, such as {below[0]}")
    return None


def _is_model(folder: Path) -> bool:
    return os.path.isfile(folder / "config.json")  # False also where the name is none that a folder can have


def named_model(text: str) -> str:
    """The folder of the checkpoint, if a run is named; otherwise the text as it is: a folder, or a name.

    Raises:
        ConfigError: the run is there, and the checkpoint is not.
    """
    run = named_run(text)
    if run is not None:
        return str(run.checkpoint.absolute())
    return text


def run_names(root: Path) -> list[str]:
    """EXPERIMENT/TRIAL of the runs below a folder."""
    folders = [path for path in run_folders(root) if path != root and existing_run(path)] if root.is_dir() else []
    return [f"{path.parent.name}/{path.name}" for path in folders]


def no_run(name: str) -> str:
    """Says that there is no such run, and which there are."""
    place = Path(os.path.expanduser(name))
    if os.path.isfile(place):
        runs = [str(folder) for folder in place.parents if os.path.isfile(folder / "run.json")]
        near = f"; did you mean {runs[0]}" if runs else ""
        return f"{name} is a file: a run is a folder, or EXPERIMENT/TRIAL of one below {RunConfig().root}{near}"
    root = place.parent.parent if len(place.parts) > 2 else Path(RunConfig().root)
    names = run_names(root)
    near = difflib.get_close_matches(f"{place.parent.name}/{place.name}", names, 1, 0.5)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    listed = f"there are {', '.join(names[:SHOWN])}{more} (`tandem runs`)" if names else f"there is none below {root}"
    return f"there is no run {name}" + (f", did you mean {near[0]}" if near else "") + f"; {listed}"


def pinned(resolved: Resolved[Any]) -> Resolved[Any]:
    """The same configuration with each run that stands for a model replaced by its checkpoint, which does not change while
    that run trains on. A run that goes on keeps the checkpoint that it began with.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    config, sources = resolved.config, dict(resolved.sources)
    for key, value in leaves(resolved.config):
        if key not in MODEL_KEYS or not value or (path := named_model(value)) == value:
            continue
        if (run := named_run(value)) is not None and run.step is None and hasattr(config, "trial_name"):
            before = value_before(run_path(config.run.root, config.experiment_name, config.trial_name), key)
            if before and Path(before).parent.parent == run.folder.absolute():
                path = before
        config = _with(config, key.split("."), path)
        sources[key] = f"{PINNED}{'a' if '@' in value else 'the newest'} checkpoint of {value}"
    return Resolved(config, sources)


def pins(resolved: Resolved[Any]) -> list[str]:
    """The words ``key=value`` that give other processes the same checkpoints."""
    values = dict(leaves(resolved.config))
    return [f"{key}={json.dumps(values[key])}" for key, text in resolved.sources.items() if text.startswith(PINNED)]


def _with(config: C, names: list[str], value: str) -> C:
    """The dataclass with another value in it."""
    inner = value if len(names) == 1 else _with(getattr(config, names[0]), names[1:], value)
    return replace(config, **{names[0]: inner})  # type: ignore[type-var]
