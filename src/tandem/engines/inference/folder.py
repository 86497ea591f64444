"""The engine's reading of a Hugging Face folder."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from tandem.api.weights import FolderSource
from tandem.config.errors import ConfigError


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Hugging Face folder's safetensors files. Raises `ConfigError` where one cannot be read."""
    try:
        yield from FolderSource(folder).tensors()
    except SafetensorError as error:
        raise ConfigError(f"the weights in {folder} cannot be read: {error}") from error
