"""Adapters on disk, in peft's format: ``PeftModel.from_pretrained(base, folder)`` opens them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tandem.config.errors import ConfigError
from tandem.config.lora import LoRAConfig
from tandem.models.catalog import BUILT_IN, resolve
from tandem.models.lora import merged
from tandem.models.streaming import tensors_of

ADAPTER = "adapter"
"""Folder of an adapter, beside the model that it is merged into."""

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], lora: LoRAConfig, base: str, modules: list[str], *, classifier: bool
) -> None:
    """Writes a new folder. ``tensors``: float32, under the names of `TrainEngine.adapter_weights`; other ones are heads.

    ``base``: the model that it belongs to, as the user named it. ``modules``: the last parts of the names of the matrices.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if classifier else "CAUSAL_LM",
        "base_model_name_or_path": base_of(base),
        "r": lora.rank,
        "lora_alpha": lora.scaling * (lora.rank or 0),
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "modules_to_save": ["score"] if classifier else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    named = {_PREFIX + name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def base_of(path: str) -> str:
    """A hub name as it is; else the folder, so that others find it too."""
    return str(resolve(path).absolute()) if path in BUILT_IN or Path(path).expanduser().is_dir() else path


def read_adapter(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors under the names of `TrainEngine.adapter_weights`, and the settings.

    Raises:
        ConfigError: there is no adapter, or it is damaged.
    """
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder} has no adapter that can be read: {error}") from error
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}, settings


class MergedWeights(Mapping[str, torch.Tensor]):
    """Weights of a base with an adapter merged into it, float32, each computed when it is asked for."""

    def __init__(self, folder: Path):
        """``folder``: of the adapter, which names its base.

        Raises:
            ConfigError: no adapter there, or no base.
        """
        self._own, settings = read_adapter(folder)
        self._scaling = float(settings["lora_alpha"]) / int(settings["r"])
        base = resolve(settings["base_model_name_or_path"])
        found = tensors_of(base)
        if found is None:
            raise ConfigError(f"{base}, the base of the adapter in {folder}, has no *.safetensors")
        self._base = found

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._own:  # a head, which is trained as a whole
            return self._own[name]
        weight, module = self._base[name][:], name.removesuffix(".weight")
        a, b = (self._own.get(f"{module}.{which}.weight") for which in ("lora_A", "lora_B"))
        return (weight if a is None or b is None else merged(weight, a, b, self._scaling)).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._base.keys() | {name for name in self._own if ".lora_" not in name})

    def __len__(self) -> int:
        return sum(1 for _ in self)
