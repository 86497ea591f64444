"""Writes the model of a checkpoint as a Hugging Face folder, without the training state."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tandem.api.weight_files import save_tensors
from tandem.config.errors import ConfigError, TandemError
from tandem.state.checkpoint import best_of
from tandem.state.existing import checkpoints, existing_run, step_of, written_config
from tandem.state.manifest import FILE, STATE, InvalidCheckpoint, verify
from tandem.state.tree import read_parts

log = logging.getLogger(__name__)

ADAPTER = "adapter"
"""Folder of an adapter in peft's format, beside the model that it is merged into."""

LEFT_OUT = (STATE, "critic", ADAPTER)
"""Folders of a checkpoint that are not the model."""

WEIGHTS = "model.safetensors"
PREFIX = "model."
"""The prefix that the training engine puts before the names of transformers."""


class NotExported(TandemError, OSError):
    """The disk refuses; nothing was left behind."""


def checkpoint_of(run: Path, step: str | None = None) -> Path:
    """The folder of a run's checkpoint: of ``step``, ``"best"``, or the newest that is whole; ``run`` may be one itself.

    Raises:
        ConfigError: there is no such one, or it is damaged; says what is there.
    """
    if step is None and step_of(run) >= 0 and (run / "config.json").is_file():
        return _whole(run)
    saved = checkpoints(run / "checkpoints")
    if existing_run(run) is None or not saved:
        raise ConfigError(f"{run} is no run with a checkpoint; `tandem runs` lists the runs that there are")
    names = ", ".join(path.name for path in saved)
    if step == "best":
        best = best_of(saved, _keep_best(run))
        if best is None:
            raise ConfigError(f"{run}: no checkpoint states the metric {_keep_best(run)}; there are {names}")
        return _whole(best)
    if step is not None:
        path = run / "checkpoints" / f"step_{step.removeprefix('step_')}"
        if path not in saved:
            raise ConfigError(f"{run} has no checkpoint of step {step!r}; there are {names}")
        return _whole(path)
    for path in reversed(saved):
        try:
            return _whole(path)
        except ConfigError as error:
            log.warning("%s; the one before is taken", error)
    raise ConfigError(f"no checkpoint of {run} is whole: {names}")


def export(
    checkpoint: Path,
    target: Path,
    dtype: str | None = None,
    *,
    part: str = ".",
    masters: Callable[[Path], Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Writes the model into the new folder ``target``, there whole or not at all.

    ``dtype``: weights are rounded to it once, from float32 where the checkpoint has its state. ``part``: a folder of the
    checkpoint that is written instead. ``masters``: gives the float32 weights under their Hugging Face names.

    Raises:
        ConfigError: ``target`` exists, or lies in the folder of a run, which would take it for its own.
        NotExported: the disk refuses.
    """
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists; give a folder that does not")
    target = target.resolve()
    of_run = next((path for path in target.parents if _is_run(path)), None)
    if of_run is not None:
        raise ConfigError(f"{target} lies in {of_run}, the folder of a run, where only the run writes; give another one")
    temporary = target.with_name(f".{target.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        ignored = shutil.ignore_patterns(*LEFT_OUT, *((WEIGHTS,) if dtype else ()))
        shutil.copytree(checkpoint / part, temporary, ignore=ignored)
        if dtype:
            _write_weights(checkpoint, temporary, getattr(torch, dtype), (masters or _masters)(checkpoint))
        if target.exists():
            target.rmdir()
        os.rename(temporary, target)
    except (OSError, SafetensorError) as error:
        # of a tree that was copied in part: source, target and reason of each file
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        if not checkpoint.is_dir():
            remedy = f"{checkpoint} was removed meanwhile: name another step"
        else:
            remedy = f"{checkpoint} is as it was: free some space, or give a folder that may be made"
        raise NotExported(f"{target} could not be made: {reason}. Nothing of it was left behind, and {remedy}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_run(folder: Path) -> bool:
    return os.path.isfile(folder / "run.json") and os.path.isfile(folder / "config.yaml")


def _write_weights(checkpoint: Path, folder: Path, dtype: torch.dtype, masters: Mapping[str, torch.Tensor]) -> None:
    with safe_open(checkpoint / WEIGHTS, "pt") as file:
        names = list(file.keys())
        tensors = {name: (masters[name] if masters else file.get_tensor(name)).to(dtype) for name in names}
    save_tensors(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"}
    )
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _masters(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """The float32 weights; empty where the model alone was saved."""
    if not (checkpoint / FILE).is_file():
        return {}
    masters: Mapping[str, torch.Tensor] = read_parts(checkpoint / STATE)["trainer"]["masters"]
    return {name.removeprefix(PREFIX): tensor for name, tensor in masters.items()}


def _whole(path: Path) -> Path:
    try:
        if (path / FILE).is_file():
            verify(path, step_of(path), None)
            return path
        with safe_open(path / WEIGHTS, "pt"):  # which compares its size with what its head says
            return path
    except InvalidCheckpoint as reason:
        raise ConfigError(f"{path} {reason}") from reason
    except FileNotFoundError:
        raise ConfigError(f"{path} has no {WEIGHTS}") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is damaged: {WEIGHTS} cannot be read: {error}") from error


def _keep_best(run: Path) -> str:
    config = written_config(run, "what is best", "give a step")
    wish = config.get("checkpoint") if isinstance(config, dict) else None
    metric = wish.get("keep_best") if isinstance(wish, dict) else None
    if not metric:
        raise ConfigError(f"{run} was begun without checkpoint.keep_best, so its best step is unknown; give a step")
    return str(metric)
