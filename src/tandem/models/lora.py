"""Low-rank adapters (LoRA, arXiv:2106.09685): ``W x + scaling · B (A x)``, of which only A and B are trained.

A matrix with an adapter keeps its name and has ``lora_A`` and ``lora_B`` beside its ``weight``, so models are read, sharded
and published as without adapters. (peft would rename each matrix, and initialise A from the global random generator, whose
state differs among ranks when a model is filled layer by layer.) Adapters are saved in peft's
format: ``PeftModel.from_pretrained(base, folder)`` opens them.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import dropout, linear

from tandem.api.weights import save_tensors
from tandem.config.errors import ConfigError, kind_and_text
from tandem.config.train_engine import LoRAConfig
from tandem.models.catalog import ADAPTER_SETTINGS, ADAPTER_WEIGHTS, BUILT_IN, MODULES, TOWERS, digest_of_base, resolve
from tandem.models.load import tensors_of
from tandem.models.media.family import tower_matrices
from tandem.models.packed import PackedModel
from tandem.models.shape import refuse_unknown_targets, targets

A, B = "lora_A", "lora_B"
HEADS = ("model.score.weight", "value.weight")
"""Names of heads that begin at 0 and are trained whole, beside the adapters."""


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, base: nn.Linear, lora: LoRAConfig):
        """``base``: the layer whose parameters are used. A is not initialised, B is 0; both are float32."""
        super().__init__()
        assert lora.rank is not None
        self.weight, device = base.weight, base.weight.device
        self.register_parameter("bias", base.bias)
        outputs, inputs = base.weight.shape
        self.lora_A = nn.Parameter(torch.empty(lora.rank, inputs, device=device))
        self.lora_B = nn.Parameter(torch.zeros(outputs, lora.rank, device=device))
        self.scaling, self.dropout, self.enabled = lora.scaling, lora.dropout, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, in]`` → ``[…, out]``."""
        out = linear(x, self.weight, self.bias)
        if not self.enabled:
            return out
        # passes without gradients only score tokens, and must not be random
        inputs = dropout(x, self.dropout) if self.dropout and torch.is_grad_enabled() else x
        return out + linear(linear(inputs, self.lora_A) * self.scaling, self.lora_B)


@dataclass(frozen=True)
class Drawn:
    """The initial values of one matrix A. Indexing draws the whole matrix from its seed and returns rows of it, so every
    rank sees the same matrix."""

    name: str
    shape: torch.Size
    seed: int

    def __getitem__(self, part: slice) -> torch.Tensor:
        """Returns rows of A, uniform in ±1/√inputs, like the initial values of `nn.Linear`."""
        digest = hashlib.sha256(f"{self.seed} {self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1 / math.sqrt(self.shape[1])
        return torch.empty(self.shape).uniform_(-bound, bound, generator=generator)[part]


def put_adapters(packed: PackedModel, lora: LoRAConfig, dtype: torch.dtype, seed: int) -> dict[str, Drawn]:
    """Freezes a model, converts its weights to ``dtype`` and adds adapters to its matrices. Returns the initial values of
    every A by its name in ``packed``; if the model has memory, they are already written.

    Every B begins at 0, so the model computes the same as before. Adapters and new heads are float32.

    Raises:
        ConfigError: see `refuse_unknown_targets`.
    """
    for name, parameter in packed.named_parameters():
        trained = name in HEADS
        parameter.requires_grad_(trained)
        parameter.data = parameter.data.to(torch.float32 if trained else dtype)
    matrices = set()
    for layer in packed.decoder.layers:
        for path, module in list(layer.named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            matrices.add(path)
            if targets(lora, path):
                _put(layer, path, module, lora)
    if packed.media is not None:
        for path, module in tower_matrices(packed.media.family, packed.model, lora.towers):
            matrices.add(path)
            if targets(lora, path):
                _put(packed.model, path, module, lora)
        packed.media.find_weights()
    refuse_unknown_targets(lora, matrices)
    drawn = {n: Drawn(n, p.shape, seed) for n, p in packed.named_parameters() if n.endswith(f".{A}")}
    with torch.no_grad():
        for name, values in drawn.items():
            parameter = packed.get_parameter(name)
            if not parameter.is_meta:
                parameter.copy_(values[:])
    return drawn


def _put(within: nn.Module, path: str, matrix: nn.Linear, lora: LoRAConfig) -> None:
    parent, _, name = path.rpartition(".")
    setattr(within.get_submodule(parent), name, LoRALinear(matrix, lora))


def fill_adapters(packed: PackedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies the tensors of an adapter's file into adapters and heads. ``tensors``: named as by `read_adapter`.

    Raises:
        ConfigError: names or shapes of the tensors differ from those of the model.
    """
    parameters = {name: parameter for name, parameter in packed.named_parameters() if name.endswith((A, B)) or name in HEADS}
    stored = {f"model.{name.removesuffix('.weight') if '.lora_' in name else name}": x for name, x in tensors.items()}
    for name in sorted(parameters.keys() | stored.keys()):
        if name not in parameters or name not in stored or parameters[name].shape != stored[name].shape:
            raise ConfigError(f"the adapter does not fit its model: {name!r} is in only one of them, or its shapes differ")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])


def lora_matrices(packed: PackedModel) -> dict[str, LoRALinear]:
    """Returns the matrices with an adapter, by their names in ``packed``."""
    return {name: module for name, module in packed.named_modules() if isinstance(module, LoRALinear)}


@contextlib.contextmanager
def without_adapters(packed: PackedModel) -> Iterator[None]:
    """A context in which the model computes without its adapters."""
    layers = lora_matrices(packed).values()
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Returns ``weight + scaling · b a`` in float32: ``weight [out, in]``, ``a [r, in]``, ``b [out, r]``. If b is 0, returns
    ``weight`` unchanged, in its dtype."""
    if not bool(b.any()):
        return weight
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)


_PREFIX = "base_model.model."


class Base(NamedTuple):
    """The frozen weights that an adapter was trained beside."""

    path: str
    digest: str
    """Digest of the base's weight files; see `digest_of_base`."""

    dtype: torch.dtype
    """The dtype to which the trainer rounded these weights."""


def refuse_other_base(path: str, found: str | None, wanted: str | None) -> None:
    """Checks that the base in ``path`` is the one that the adapter was trained with. ``found``, ``wanted``: digests now and
    in training; None means unknown and matches any.

    Raises:
        ConfigError: the digests differ.
    """
    if found is not None and wanted not in (None, found):
        raise ConfigError(
            f"the weights in {path} are not those that training began with (fingerprint {found} now, {wanted} then): an "
            "adapter works only with the base that it was trained with. Restore those files, or begin a new run"
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
        pattern: for a media model, a regular expression for the full names of the adapted matrices, because matrices of
            towers may have the same last parts.
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
    # in the tensors' metadata, because peft warns about unknown keys in its settings
    about = {"format": "pt", "base": base.digest, "base_dtype": str(base.dtype).removeprefix("torch.")}
    about |= {MODULES: ",".join(modules), TOWERS: ",".join(lora.towers)}
    save_tensors(named, folder / ADAPTER_WEIGHTS, metadata=about)
    (folder / ADAPTER_SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def base_of(path: str) -> str:
    """Returns the base's name to be saved: a hub name unchanged, the absolute path of a local folder or built-in model."""
    return str(resolve(path).absolute()) if path in BUILT_IN or Path(path).expanduser().is_dir() else path


def read_adapter(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Reads an adapter; returns its tensors, named as in `TrainEngine.adapter_weights`, and its settings.

    Raises:
        ConfigError: the folder has no adapter, or a damaged one.
    """
    try:
        settings = json.loads((folder / ADAPTER_SETTINGS).read_text(encoding="utf-8"))
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        if not isinstance(settings, dict):
            raise ValueError(f"{ADAPTER_SETTINGS} holds no object")
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ConfigError(f"{folder} has no readable adapter: {error}") from error
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}, settings


class MergedWeights(Mapping[str, torch.Tensor]):
    """The weights of a base with a merged adapter, float32, each computed when it is read. The base is first rounded to the
    dtype that it had while the adapter was trained."""

    def __init__(self, folder: Path):
        """``folder``: the adapter's folder, whose settings name the base.

        Raises:
            ConfigError: the adapter or its base is missing, or the base has changed since training.
        """
        self._own, settings = read_adapter(folder)
        try:
            self._scaling = float(settings["lora_alpha"]) / int(settings["r"])
            name = str(settings["base_model_name_or_path"])
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder / ADAPTER_SETTINGS} cannot be read: {kind_and_text(error)}") from error
        base = resolve(name)
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            about = file.metadata() or {}
        refuse_other_base(name, digest_of_base(base), about.get("base"))
        self._dtype = getattr(torch, about.get("base_dtype", "float32"), None)
        if not isinstance(self._dtype, torch.dtype):
            raise ConfigError(
                f"{folder / ADAPTER_WEIGHTS} names the base_dtype {about['base_dtype']!r}, which is not a torch dtype"
            )
        self._base = tensors_of(base)
        if not self._base:
            raise ConfigError(f"{base}, the base of the adapter in {folder}, has no *.safetensors")

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._own:  # a head, which is stored whole
            return self._own[name]
        weight, module = self._base[name][:].to(self._dtype), name.removesuffix(".weight")
        a, b = (self._own.get(f"{module}.{which}.weight") for which in ("lora_A", "lora_B"))
        return (weight if a is None or b is None else merged(weight, a, b, self._scaling)).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._base.keys() | {name for name in self._own if ".lora_" not in name})

    def __len__(self) -> int:
        return sum(1 for _ in self)
