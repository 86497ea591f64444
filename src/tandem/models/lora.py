"""Low-rank adapters (LoRA, arXiv:2106.09685): ``W x + scaling · B (A x)``, of which only A and B are trained.

A matrix that gets one keeps its name, and has ``lora_A`` and ``lora_B`` beside its ``weight``: models are read, sharded and
published as without adapters. (peft wraps each matrix and renames it, and draws A from the global generator, which a model
that is filled layer by layer on every rank has no common state of.) What is saved is peft's format: `adapter_folder.py`.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import dropout, linear

from tandem.config.errors import ConfigError
from tandem.config.lora import ALL_LINEAR, LoRAConfig
from tandem.models.media.features import tower_matrices
from tandem.models.packed import PackedModel

A, B = "lora_A", "lora_B"
HEADS = ("model.score.weight", "value.weight")
"""Heads that begin at 0: trained as a whole, beside the adapters."""


class LoRALinear(nn.Module):
    """A linear layer that is frozen, and its adapter."""

    def __init__(self, base: nn.Linear, lora: LoRAConfig):
        """``base``: whose parameters it takes over, as they are. A and B are float32, and have no values yet."""
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
        # passes that only score have no gradients, and must not be random
        kept = dropout(x, self.dropout) if self.dropout and torch.is_grad_enabled() else x
        return out + linear(linear(kept, self.lora_A) * self.scaling, self.lora_B)


@dataclass(frozen=True)
class Drawn:
    """The first values of an A, drawn when they are asked for: the same on every rank, whatever part of it that has."""

    name: str
    shape: torch.Size
    seed: int

    def __getitem__(self, part: slice) -> torch.Tensor:
        """Uniform within 1/√inputs, as `nn.Linear` begins."""
        digest = hashlib.sha256(f"{self.seed} {self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1 / math.sqrt(self.shape[1])
        return torch.empty(self.shape).uniform_(-bound, bound, generator=generator)[part]


def targets(lora: LoRAConfig, module: str) -> list[str]:
    """The names of ``lora.target_modules`` that match this matrix of a layer, such as ``self_attn.q_proj``."""
    return [name for name in lora.target_modules if name == ALL_LINEAR or f".{module}".endswith(f".{name}")]


def refuse_unknown_targets(lora: LoRAConfig, modules: Iterable[str]) -> None:
    """Passes if each of ``lora.target_modules`` names one of ``modules``, the matrices of a layer.

    Raises:
        ConfigError: one does not; says which matrices there are.
    """
    there = sorted(modules)
    named = {name for module in there for name in targets(lora, module)}
    shown = sorted({".".join(module.split(".")[-2:]) for module in there})
    for name in lora.target_modules:
        if name not in named:
            raise ConfigError(
                f"lora.target_modules has {name!r}, which no matrix of this model's layers ends with; there are "
                f"{', '.join(shown)}, and {ALL_LINEAR}"
            )


def put_adapters(packed: PackedModel, lora: LoRAConfig, dtype: torch.dtype, seed: int) -> dict[str, Drawn]:
    """Freezes a model, whose weights then have ``dtype``, and puts adapters beside its matrices; returns the first values of
    every A by its name in ``packed``. Where the model has memory, they are in place.

    Every B begins at 0, so that the model is the one that it was. Adapters and new heads are float32.

    Raises:
        ConfigError: ``lora.target_modules`` names no matrix of a layer; says which there are.
    """
    for name, parameter in packed.named_parameters():
        trained = name in HEADS
        parameter.requires_grad_(trained)
        parameter.data = parameter.data.to(torch.float32 if trained else dtype)
    seen = set()
    for layer in packed.decoder.layers:
        for path, module in list(layer.named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            seen.add(path)
            if targets(lora, path):
                _put(layer, path, module, lora)
    if packed.media is not None:
        for path, module in tower_matrices(packed.media.family, packed.model, lora.towers):
            seen.add(path)
            if targets(lora, path):
                _put(packed.model, path, module, lora)
        packed.media.find_weights()
    refuse_unknown_targets(lora, seen)
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
    """Gives adapters, and a head beside them, the numbers of an adapter's file; names are `read_adapter`'s.

    Raises:
        ConfigError: the file has other tensors than the model.
    """
    own = {name: parameter for name, parameter in packed.named_parameters() if name.endswith((A, B)) or name in HEADS}
    given = {f"model.{name.removesuffix('.weight') if '.lora_' in name else name}": x for name, x in tensors.items()}
    for name in sorted(own.keys() | given.keys()):
        if name not in own or name not in given or own[name].shape != given[name].shape:
            raise ConfigError(f"the adapter and its model do not fit: {name!r} is in one of them alone, or has other shapes")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(given[name])


def lora_matrices(packed: PackedModel) -> dict[str, LoRALinear]:
    """The matrices that have an adapter, by the name in ``packed``."""
    return {name: module for name, module in packed.named_modules() if isinstance(module, LoRALinear)}


@contextlib.contextmanager
def without_adapters(packed: PackedModel) -> Iterator[None]:
    """A block in which the model computes as it would without its adapters."""
    layers = lora_matrices(packed).values()
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """``weight + scaling · b a``, in float32: ``weight [out, in]``, ``a [r, in]``, ``b [out, r]``. The weight itself while
    b is 0."""
    if not bool(b.any()):
        return weight
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
