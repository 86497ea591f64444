"""What the engine reads of a Hugging Face folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tandem.api.weights import FolderSource
from tandem.config.errors import ConfigError


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Hugging Face folder's safetensors files. Raises `ConfigError` where there is none."""
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} has no *.safetensors file; save the model with save_pretrained")
    return FolderSource(folder).tensors()


def eos_ids(folder: Path, hf_config: Any) -> set[int]:
    """Tokens that end a completion: those of the generation config, else of the model's."""
    file = folder / "generation_config.json"
    ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    ids = ids if ids is not None else getattr(hf_config, "eos_token_id", None)
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
