"""Weights in a Hugging Face folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tandem.api.activity import did
from tandem.api.failures import ConfigError
from tandem.api.weight_files import save_tensors
from tandem.models.streaming import tensors_of


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
    save_tensors(tensors, partial, metadata={"format": "pt"})
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
    files = tensors_of(folder)
    if not files:
        raise ConfigError(f"folder {folder} has no model.safetensors to load weights from")
    missing = sorted(set(shapes) - set(files))
    if missing:
        raise ConfigError(
            f"folder {folder} lacks {len(missing)} tensors of this model, first {missing[0]!r}; is it another model?"
        )
    for name, shape in shapes.items():
        found = files[name].get_shape()
        if found != list(shape):
            raise ConfigError(f"tensor {name!r} in {folder} is {found}, this model has {list(shape)}")
    for name in shapes:
        yield name, files[name][:]


def write_tensor(path: Path, tensor: torch.Tensor) -> None:
    """One tensor in a file of its own."""
    save_tensors({"weight": tensor.to("cpu").contiguous()}, path)


def read_tensor(path: Path) -> torch.Tensor:
    """The tensor that `write_tensor` wrote.

    Raises:
        ConfigError: there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"folder {path.parent} has no {path.name}, which this model was saved with; is it another model?")
    return load_file(path)["weight"]
