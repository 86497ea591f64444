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
    """Dtype to which the trainer rounded them."""


def refuse_other_base(path: str, found: str | None, wanted: str | None) -> None:
    """Checks that an adapter's base is the one that it was trained with. ``found``, ``wanted``: digests; None is unknown and
    equals any.

    Raises:
        ConfigError: the digests differ.
    """
    if found is not None and wanted not in (None, found):
        raise ConfigError(
            f"the weights in {path} are not those that training began with (fingerprint {found}, then {wanted}): an "
            "adapter works only with the base that it was trained with. Put those files back, or begin a new run"
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
    """Writes an adapter into a new folder.

    Args:
        tensors: float32, under the names of `TrainEngine.adapter_weights`; other names are heads.
        modules: last parts of the adapted matrices' names.
        pattern: a regular expression for their full names in a media model, whose towers have matrices of the same names.
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
    """The name of the base as it is saved: a hub name unchanged, a local folder with its absolute path."""
    return str(resolve(path).absolute()) if path in BUILT_IN or Path(path).expanduser().is_dir() else path


def read_adapter(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Reads an adapter: tensors under the names of `TrainEngine.adapter_weights`, and its settings.

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
    """The weights of a base with an adapter merged into it, float32, each computed when it is read. The base is first
    rounded to the dtype that it had while the adapter was trained."""

    def __init__(self, folder: Path):
        """``folder``: the adapter's, which names its base.

        Raises:
            ConfigError: adapter or base are missing, or the base is another one than in training.
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
