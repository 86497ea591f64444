"""The engine's reading of a Hugging Face folder."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from tandem.api.weights import FolderSource
from tandem.config.errors import ConfigError


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Hugging Face folder's safetensors files. Raises `ConfigError` where there is none."""
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} has no *.safetensors file; save the model with save_pretrained")
    return _told(folder)


def _told(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        yield from FolderSource(folder).tensors()
    except SafetensorError as error:
        raise ConfigError(f"the weights in {folder} cannot be read: {error}") from error
