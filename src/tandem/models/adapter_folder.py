"""Adapters on disk, in peft's format: ``PeftModel.from_pretrained(base, folder)`` opens them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from tandem.api.weight_files import save_tensors
from tandem.config.errors import ConfigError, kind_and_text
from tandem.config.lora import LoRAConfig
from tandem.models.adapter_beside import MODULES, SETTINGS, TOWERS, WEIGHTS, digest_of_base
from tandem.models.catalog import BUILT_IN, resolve
from tandem.models.lora import merged
from tandem.models.streaming import tensors_of

_PREFIX = "base_model.model."


class Base(NamedTuple):
    """The frozen weights that an adapter was trained beside."""

    path: str
    digest: str
    """Digest of its files; see `digest_of_base`."""

    dtype: torch.dtype
    """To which they were rounded."""


def refuse_other_base(path: str, found: str | None, wanted: str | None) -> None:
    """``found``, ``wanted``: digests; None is not known, and not compared.

    Raises:
        ConfigError: they differ.
    """
    if found is not None and wanted not in (None, found):
        raise ConfigError(
            f"the weights in {path} are not those that training began with (fingerprint {found}, then {wanted}): what was "
            "trained belongs to what was frozen beside it. Put those files back, or begin a new run"
        )


def write_adapter(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    lora: LoRAConfig,
    base: Base,
    modules: list[str],
    *,
    classifier: bool,
    pattern: str = "",
) -> None:
    """Writes a new folder. ``tensors``: float32, under the names of `TrainEngine.adapter_weights`; other ones are heads.

    ``modules``: the last parts of the names of the matrices. ``pattern``: of their whole names in a media model, whose
    towers have matrices of the same names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if classifier else "CAUSAL_LM",
        "base_model_name_or_path": base_of(base.path),
        "r": lora.rank,
        "lora_alpha": lora.scaling * (lora.rank or 0),
        "lora_dropout": lora.dropout,
        "target_modules": pattern or modules,
        "modules_to_save": ["score"] if classifier else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    named = {_PREFIX + name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}
    # beside the tensors: peft takes keys in its settings that it does not know for those of a newer peft, and says so
    about = {"format": "pt", "base": base.digest, "base_dtype": str(base.dtype).removeprefix("torch.")}
    about |= {MODULES: ",".join(modules), TOWERS: ",".join(lora.towers)}
    save_tensors(named, folder / WEIGHTS, metadata=about)
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
        if not isinstance(settings, dict):
            raise ValueError(f"{SETTINGS} holds no object")
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ConfigError(f"{folder} has no adapter that can be read: {error}") from error
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}, settings


class MergedWeights(Mapping[str, torch.Tensor]):
    """Weights of a base with an adapter merged into it, float32, each computed when it is asked for. The base is rounded to
    what it was while the adapter was trained."""

    def __init__(self, folder: Path):
        """``folder``: of the adapter, which names its base.

        Raises:
            ConfigError: no adapter there, or no base, or another one.
        """
        self._own, settings = read_adapter(folder)
        try:
            self._scaling = float(settings["lora_alpha"]) / int(settings["r"])
            name = str(settings["base_model_name_or_path"])
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder / SETTINGS} cannot be read: {kind_and_text(error)}") from error
        base = resolve(name)
        with safe_open(folder / WEIGHTS, "pt") as file:
            about = file.metadata() or {}
        refuse_other_base(name, digest_of_base(base), about.get("base"))
        self._dtype = getattr(torch, about.get("base_dtype", "float32"), None)
        if not isinstance(self._dtype, torch.dtype):
            raise ConfigError(f"{folder / WEIGHTS} names {about['base_dtype']!r}, which is no precision of weights")
        self._base = tensors_of(base)
        if not self._base:
            raise ConfigError(f"{base}, the base of the adapter in {folder}, has no *.safetensors")

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._own:  # a head, which is trained as a whole
            return self._own[name]
        weight, module = self._base[name][:].to(self._dtype), name.removesuffix(".weight")
        a, b = (self._own.get(f"{module}.{which}.weight") for which in ("lora_A", "lora_B"))
        return (weight if a is None or b is None else merged(weight, a, b, self._scaling)).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._base.keys() | {name for name in self._own if ".lora_" not in name})

    def __len__(self) -> int:
        return sum(1 for _ in self)
