"""The engine's reading of a Hugging Face folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tandem.api.weights import FolderSource
from tandem.config.errors import ConfigError
from tandem.models.foreign import read_generation_config


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Hugging Face folder's safetensors files. Raises `ConfigError` where one cannot be read."""
    try:
        yield from FolderSource(folder).tensors()
    except SafetensorError as error:
        raise ConfigError(f"the weights in {folder} cannot be read: {error}") from error


def eos_ids(folder: Path, hf_config: Any) -> set[int]:
    """Tokens that end a completion: those of the generation config, else of the model's. Raises `ConfigError` where that
    cannot be read."""
    generation = read_generation_config(folder)
    ids = None if generation is None else generation.eos_token_id
    ids = ids if ids is not None else getattr(hf_config, "eos_token_id", None)
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
