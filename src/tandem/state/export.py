"""Writes the model of a checkpoint as a Hugging Face folder, without the training state."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tandem.api.weights import save_tensors
from tandem.config.errors import ConfigError, TandemError
from tandem.state.checkpoint import FILE, STATE, InvalidCheckpoint, best_of, verify
from tandem.state.existing import checkpoints, existing_run, step_of, written_config
from tandem.state.tree import read_parts

log = logging.getLogger(__name__)

ADAPTER = "adapter"
"""Subfolder of a model folder with the adapter that is merged into the model, in peft's format."""

LEFT_OUT = (STATE, "critic", ADAPTER)
"""Subfolders of a checkpoint that are not exported with the model."""

WEIGHTS = "model.safetensors"
PREFIX = "model."
"""The prefix that the train engine adds to transformers' tensor names."""


class NotExported(TandemError, OSError):
    """Writing failed; nothing was left behind."""


def checkpoint_of(run: Path, step: str | None = None) -> Path:
    """Returns the folder of a run's checkpoint: of ``step``, ``"best"``, or (None) the newest intact one. ``run`` may also
    be a checkpoint's folder.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged; the message names the existing ones.
    """
    if step is None and step_of(run) >= 0 and (run / "config.json").is_file():
        return _intact(run)
    if existing_run(run) is None:
        raise ConfigError(f"{run} is not a run with a checkpoint; `tandem runs` lists all runs")
    saved = checkpoints(run / "checkpoints")
    if not saved:
        raise ConfigError(f"{run} has no checkpoint yet; a run writes one at its end, and every checkpoint.every_steps")
    names = ", ".join(path.name for path in saved)
    if step == "best":
        best = best_of(saved, _keep_best(run))
        if best is None:
            raise ConfigError(f"{run}: no checkpoint states the metric {_keep_best(run)}; there are {names}")
        return _intact(best)
    if step is not None:
        path = run / "checkpoints" / f"step_{step.removeprefix('step_')}"
        if path not in saved:
            raise ConfigError(f"{run} has no checkpoint of step {step!r}; there are {names}")
        return _intact(path)
    for path in reversed(saved):
        try:
            return _intact(path)
        except ConfigError as error:
            log.warning("%s; the previous checkpoint is used", error)
    raise ConfigError(f"no checkpoint of {run} is intact: {names}")


def export(
    checkpoint: Path,
    target: Path,
    dtype: str | None = None,
    *,
    part: str = ".",
    masters: Callable[[Path], Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Writes the model of a checkpoint into the new folder ``target``, which appears atomically.

    ``dtype``: dtype to which the weights are rounded once, from float32 if the checkpoint has a state; None: unchanged.
    ``part``: subfolder of the checkpoint to export instead. ``masters``: function that reads the float32 weights by their
    Hugging Face names; None: from the state.

    Raises:
        ConfigError: ``target`` is not empty, or is inside a run's folder, where it could be mistaken for a file of the run.
        NotExported: writing failed.
    """
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists; give a new folder")
    target = target.resolve()
    of_run = next((path for path in target.parents if _is_run(path)), None)
    if of_run is not None:
        raise ConfigError(f"{target} is inside {of_run}, a run's folder, where only the run writes; give another folder")
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
        # the error of `copytree` lists source, target and reason of each failed file
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        if not checkpoint.is_dir():
            remedy = f"{checkpoint} was removed meanwhile: name another step"
        else:
            remedy = f"{checkpoint} is unchanged: free some space, or give a folder that can be created"
        raise NotExported(f"{target} could not be written: {reason}. Nothing of it was left behind, and {remedy}") from error
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
    """Reads the float32 weights from the checkpoint's state; {} if only the model was saved."""
    if not (checkpoint / FILE).is_file():
        return {}
    masters: Mapping[str, torch.Tensor] = read_parts(checkpoint / STATE)["trainer"]["masters"]
    return {name.removeprefix(PREFIX): tensor for name, tensor in masters.items()}


def _intact(path: Path) -> Path:
    """Returns ``path`` if the checkpoint is intact; raises `ConfigError` otherwise."""
    try:
        if (path / FILE).is_file():
            verify(path)
            return path
        with safe_open(path / WEIGHTS, "pt"):  # compares the file's size with its header
            return path
    except InvalidCheckpoint as reason:
        raise ConfigError(f"{path} {reason}") from reason
    except FileNotFoundError:
        raise ConfigError(f"{path} has no {WEIGHTS}") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is damaged: {WEIGHTS} cannot be read: {error}") from error


def _keep_best(run: Path) -> str:
    config = written_config(run, "what is best", "give a step")
    options = config.get("checkpoint") if isinstance(config, dict) else None
    metric = options.get("keep_best") if isinstance(options, dict) else None
    if not metric:
        raise ConfigError(f"{run} was begun without checkpoint.keep_best, so its best step is unknown; give a step")
    return str(metric)
