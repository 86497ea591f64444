"""Finds the adapter that lies beside a saved model, and the base that both belong to; opens neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from tandem.api.lazy_torch import torch
from tandem.config.lora import LoRAConfig
from tandem.models.catalog import ADAPTER_SETTINGS, fingerprint, present
from tandem.models.catalog import WEIGHTS as WEIGHT_FILES

ADAPTER = "adapter"
"""Folder of an adapter, beside the model that it is merged into."""

WEIGHTS, SETTINGS = "adapter_model.safetensors", ADAPTER_SETTINGS


MODULES = "modules"
"""Entry of the metadata of its tensors: the ends of the names of the matrices, with commas between."""

TOWERS = "towers"
"""Another one: the parts of a media model that have adapters beside its layers."""


def digest_of_base(folder: Path) -> str:
    """Digest of the weight files of a model folder: another one if they are others."""
    return fingerprint(folder, WEIGHT_FILES)


class AdapterBeside(NamedTuple):
    """An adapter in a model's folder, which that model is merged from."""

    folder: Path
    base: str
    """Path of the base, as a configuration takes it."""

    dtype: torch.dtype
    """To which the base was rounded while the adapter was trained."""

    lora: LoRAConfig


def adapter_beside(model: Path) -> AdapterBeside | None:
    """The adapter that Tandem saved with this model, if its base is on this machine as it was then; else None."""
    folder = model / ADAPTER
    if not (folder / SETTINGS).is_file():
        return None
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        with safe_open(folder / WEIGHTS, "pt") as file:
            about = file.metadata() or {}
        rank, base, modules = int(settings["r"]), str(settings["base_model_name_or_path"]), settings["target_modules"]
        if isinstance(modules, str):  # a pattern, for a media model
            modules = about[MODULES].split(",")
        towers = tuple(filter(None, about.get(TOWERS, "").split(",")))
        lora = LoRAConfig(rank, float(settings["lora_alpha"]), tuple(map(str, modules)), towers)
        dtype = getattr(torch, about["base_dtype"])
        here = present(base)
        if here is None or digest_of_base(here) != about["base"] or not isinstance(dtype, torch.dtype):
            return None
    except (AttributeError, LookupError, OSError, SafetensorError, TypeError, ValueError, RecursionError):
        return None
    return AdapterBeside(folder, base, dtype, lora)
