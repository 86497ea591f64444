"""Weights in a Hugging Face folder."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from tandem.api.activity import did
from tandem.api.failures import ConfigError
from tandem.config.errors import kind_and_text


def write_folder(
    folder: Path, model: Any, weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype, *, writes: bool
) -> None:
    """Writes ``weights``, the configuration and the generation configuration of a transformers ``model``.

    ``writes=False`` only takes part in gathering. The file gets its name when it is complete.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        did("save")
        if writes:
            tensors[name] = tensor.to("cpu").contiguous()
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")
    settings = model.config.to_dict() | {
        "dtype": str(dtype).removeprefix("torch."),
        "architectures": [type(model).__name__],
    }
    type(model.config).from_dict(settings).save_pretrained(folder)
    generation_config = getattr(model, "generation_config", None)  # a classifier has none
    if generation_config is not None:
        generation_config.save_pretrained(folder)


def read_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of ``shapes`` from the folder's safetensors files, after checking that all are there.

    Raises:
        ConfigError: no safetensors, a tensor is missing or has another shape; nothing was yielded then.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = _read_index(index)
    elif (folder / "model.safetensors").is_file():
        files = dict.fromkeys(_opened(folder / "model.safetensors").keys(), "model.safetensors")
    else:
        raise ConfigError(f"folder {folder} has no model.safetensors to load weights from")
    missing = sorted(set(shapes) - set(files))
    if missing:
        raise ConfigError(
            f"folder {folder} lacks {len(missing)} tensors of this model, first {missing[0]!r}; is it another model?"
        )
    handles = {name: _opened(folder / name) for name in set(files.values())}
    for name, shape in shapes.items():
        if name not in handles[files[name]].keys():
            raise ConfigError(f"{folder / files[name]} lacks tensor {name!r}, which the index says is there")
        found = torch.Size(handles[files[name]].get_slice(name).get_shape())
        if found != shape:
            raise ConfigError(f"tensor {name!r} in {folder} is {list(found)}, this model has {list(shape)}")
    for name in shapes:
        yield name, handles[files[name]].get_tensor(name)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _read_index(index: Path) -> dict[str, str]:
    """Tensor → its file. An index of somebody else's must not name files outside its folder.

    Raises:
        ConfigError: it is none, or names something that is not a safetensors file beside it.
    """
    try:
        files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} cannot be read as an index: {kind_and_text(error)}") from error
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{index} names {name!r}, which is not a safetensors file in that folder")
        if not (index.parent / name).is_file():
            raise ConfigError(f"{index} names {name!r}, which is not there")
    return files


def write_tensor(path: Path, tensor: torch.Tensor) -> None:
    """One tensor in a file of its own."""
    save_file({"weight": tensor.to("cpu").contiguous()}, path)


def read_tensor(path: Path) -> torch.Tensor:
    """The tensor that `write_tensor` wrote.

    Raises:
        ConfigError: there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"folder {path.parent} has no {path.name}, which this model was saved with; is it another model?")
    return load_file(path)["weight"]
