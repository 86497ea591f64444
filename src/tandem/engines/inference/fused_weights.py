"""The engine's own copy of the weights: projections fused, laid out for the matrix kernels, built from a stream of tensors.

Query, key and value become one matrix, gate and up another. On a CPU matrices are packed for oneDNN, which is 15 to 50 %
faster at the sizes of a decode step than the plain layout. On a CPU without bfloat16 instructions bfloat16 weights are kept
as the float32 numbers that they are: computing in bfloat16 would be four times slower there, and less exact.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tandem.api.failures import WeightUpdateFailed
from tandem.api.weight_files import stored_entries
from tandem.config.errors import ConfigError
from tandem.models.architecture import Architecture
from tandem.models.precision import fast_bfloat16

if TYPE_CHECKING:
    from tandem.engines.inference.tower import Tower


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that matrices are multiplied in where ``dtype`` is asked for."""
    return dtype if dtype != torch.bfloat16 or fast_bfloat16(device) else torch.float32


def packs(device: torch.device) -> bool:
    """True if a `Linear` there holds its matrix in oneDNN's layout, a copy."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available()


class Linear:
    """One projection ``[out, in]`` with its bias; packed on a CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.bias = bias
        self.weight = weight
        self.packed = packs(weight.device)
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` → ``[T, out]``."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The projection of ``x`` plus ``residual``."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return functional.linear(x, self.weight, self.bias).add_(residual)


@dataclass
class LayerWeights:
    """One decoder layer; norms that the architecture lacks are absent. Norm offsets (Gemma's 1 + w) are already added."""

    projections: dict[str, Linear] = field(default_factory=dict)
    norms: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class FusedWeights:
    """All weights of one version, ready to compute with."""

    embedding: torch.Tensor
    """``[V, hidden]``."""

    head: Linear
    norm: torch.Tensor
    layers: list[LayerWeights]


@dataclass
class NewWeights:
    """Weights that were delivered and wait for `EngineCore.swap`."""

    weights: FusedWeights
    num_bytes: int
    tower: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those of a media model's towers that are not what the engine has."""


@dataclass
class _Target:
    """The place of one named tensor: rows ``start`` onwards of a fused tensor."""

    shape: tuple[int, ...]
    fused: str
    start: int = 0


@dataclass
class _Fused:
    """A fused tensor under construction."""

    shape: tuple[int, ...]
    missing: int
    tensor: torch.Tensor | None = None


def _layer_parts(a: Architecture) -> dict[str, tuple[tuple[str, int], ...]]:
    """Fused matrix → its parts in order, each (Hugging Face name in the layer, rows)."""
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    return {
        "qkv": (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)),
        "o": (("self_attn.o_proj", a.hidden_size),),
        "gate_up": (("mlp.gate_proj", a.intermediate_size), ("mlp.up_proj", a.intermediate_size)),
        "down": (("mlp.down_proj", a.hidden_size),),
    }


def _layer_norms(a: Architecture) -> dict[str, tuple[str, int]]:
    """Our name of a norm → (Hugging Face name in the layer, size)."""
    norms = {"attention": ("input_layernorm", a.hidden_size)}
    if a.post_norms:
        norms["after_attention"] = ("post_attention_layernorm", a.hidden_size)
        norms["mlp"] = ("pre_feedforward_layernorm", a.hidden_size)
        norms["after_mlp"] = ("post_feedforward_layernorm", a.hidden_size)
    else:
        norms["mlp"] = ("post_attention_layernorm", a.hidden_size)
    if a.qk_norm:
        norms["query"] = ("self_attn.q_norm", a.head_dim)
        norms["key"] = ("self_attn.k_norm", a.head_dim)
    return norms


class _Plan:
    """The tensors that are expected, and those that they are built into."""

    def __init__(self, a: Architecture):
        self.targets: dict[str, _Target] = {}
        self.fused: dict[str, _Fused] = {}
        inputs = {"qkv": a.hidden_size, "o": a.num_heads * a.head_dim, "gate_up": a.hidden_size, "down": a.intermediate_size}
        biases = {"qkv": a.qkv_bias, "o": a.o_bias, "gate_up": a.mlp_bias, "down": a.mlp_bias}
        self._add("embedding", (("model.embed_tokens.weight", a.vocab_size),), (a.hidden_size,))
        if not a.tied:
            self._add("head", (("lm_head.weight", a.vocab_size),), (a.hidden_size,))
        self._add("norm", (("model.norm.weight", a.hidden_size),), ())
        for layer in range(a.num_layers):
            for fused, parts in _layer_parts(a).items():
                named = [(f"model.layers.{layer}.{name}", rows) for name, rows in parts]
                self._add(f"{layer}.{fused}.weight", tuple((f"{n}.weight", r) for n, r in named), (inputs[fused],))
                if biases[fused]:
                    self._add(f"{layer}.{fused}.bias", tuple((f"{n}.bias", r) for n, r in named), ())
            for norm, (name, size) in _layer_norms(a).items():
                self._add(f"{layer}.{norm}.norm", ((f"model.layers.{layer}.{name}.weight", size),), ())

    def _add(self, fused: str, parts: tuple[tuple[str, int], ...], rest: tuple[int, ...]) -> None:
        start = 0
        for name, rows in parts:
            self.targets[name] = _Target((rows, *rest), fused, start)
            start += rows
        self.fused[fused] = _Fused((start, *rest), len(parts))


class _Scratch:
    """Memory in which a matrix is put together until it is packed.

    Used again for the next one: allocated anew each time, it would leave a hole between the packed ones that stay.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self._numel, self._dtype, self._device = numel, dtype, device
        self._free: list[torch.Tensor] = []

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """``shape``, of any values; more than one at a time where the parts of several matrices come mixed."""
        flat = self._free.pop() if self._free else torch.empty(self._numel, dtype=self._dtype, device=self._device)
        return flat[: math.prod(shape)].view(shape)

    def give(self, tensor: torch.Tensor) -> None:
        """Nobody reads it any more."""
        self._free.append(torch.as_strided(tensor, (self._numel,), (1,), 0))


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")


class FusedWeightsBuilder:
    """Builds `FusedWeights` from tensors that come one by one, in any order, each valid only until the next."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device, tower: "Tower | None" = None):
        """``tower``: of a media model; it says which tensors are whose."""
        self._a, self._tower = architecture, tower
        self._plan = _Plan(architecture)
        self._dtype, self._device = dtype, device
        self._compute = compute_dtype(dtype, device)
        self._seen: set[str] = set()
        self._done: dict[str, torch.Tensor | Linear] = {}
        self._num_bytes = 0
        self._new_tower: dict[str, torch.Tensor] = {}
        packed = [math.prod(fused.shape) for name, fused in self._plan.fused.items() if self._is_packed(name)]
        self._scratch = _Scratch(max(packed, default=0), self._compute, device)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes one tensor under its Hugging Face name.

        Raises:
            WeightUpdateFailed: the architecture has no such tensor, or it has another shape, or it came before.
        """
        if self._tower is not None and (name := self._tower.family.own_name(name)) in self._tower.shapes:
            self._seen.add(name)
            new = self._tower.new(name, tensor, self._dtype)
            if new is not None:
                self._new_tower[name] = new
            return
        if self._tower is not None:
            name = self._tower.text_name(name)
        if self._a.tied and name == "lm_head.weight":
            return  # the same tensor as the embedding, by the configuration
        target = self._plan.targets.get(name)
        if target is None:
            raise WeightUpdateFailed(f"weights: {name} is not a tensor of this model ({len(self._plan.targets)} are)")
        if tuple(tensor.shape) != target.shape:
            raise WeightUpdateFailed(f"weights: {name} must be {list(target.shape)}, got {list(tensor.shape)}")
        if name in self._seen:
            raise WeightUpdateFailed(f"weights: {name} came twice")
        self._seen.add(name)
        self._num_bytes += tensor.numel() * tensor.element_size()
        fused = self._plan.fused[target.fused]
        if fused.tensor is None:
            fused.tensor = self._room(target.fused, fused.shape)
        # Rounded to the dtype asked for also where it is computed in another.
        fused.tensor[target.start : target.start + target.shape[0]] = tensor.detach().to(self._dtype)
        fused.missing -= 1
        if not fused.missing:
            self._finish(target.fused, fused)

    def _is_packed(self, name: str) -> bool:
        return packs(self._device) and (name == "head" or name.endswith(".weight"))

    def _room(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if self._is_packed(name):
            return self._scratch.take(shape)
        return torch.empty(shape, dtype=self._compute, device=self._device)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        linear = Linear(weight, bias)
        if linear.packed:
            self._scratch.give(weight)
        return linear

    def _finish(self, name: str, fused: _Fused) -> None:
        tensor, fused.tensor = fused.tensor, None
        assert tensor is not None
        if name == "norm" or name.endswith(".norm"):
            # In float32 until the offset is added: 1 + w has more digits than bfloat16.
            self._done[name] = (tensor.float() + self._a.norm_offset).to(self._compute)
        elif name.endswith(".weight") and not self._plan_has_bias(name):
            self._done[name] = self._linear(tensor)
        else:
            self._done[name] = tensor
            base = name.rsplit(".", 1)[0]
            if name == "head":
                self._done[name] = self._linear(tensor)
            elif f"{base}.weight" in self._done and f"{base}.bias" in self._done:
                weight, bias = self._done[f"{base}.weight"], self._done.pop(f"{base}.bias")
                self._done[f"{base}.weight"] = self._linear(weight, bias)  # type: ignore[arg-type]

    def _plan_has_bias(self, name: str) -> bool:
        return name.removesuffix("weight") + "bias" in self._plan.fused

    def finish(self) -> NewWeights:
        """All weights, once every tensor came.

        Raises:
            WeightUpdateFailed: tensors are missing; the message names them.
        """
        missing = self._plan.targets.keys() - self._seen
        if self._tower is not None:
            missing |= self._tower.missing(self._seen)
        if missing:
            raise WeightUpdateFailed(
                f"weights: {len(missing)} of {len(self._plan.targets)} tensors are missing: {_names(missing)}"
            )
        done = self._done
        embedding = done["embedding"]
        assert isinstance(embedding, torch.Tensor)
        layers = []
        for index in range(self._a.num_layers):
            projections = {name: done[f"{index}.{name}.weight"] for name in _layer_parts(self._a)}
            norms = {name: done[f"{index}.{name}.norm"] for name in _layer_norms(self._a)}
            layers.append(LayerWeights(projections, norms))  # type: ignore[arg-type]
        head = Linear(embedding) if self._a.tied else done["head"]
        weights = FusedWeights(embedding, head, done["norm"], layers)  # type: ignore[arg-type]
        return NewWeights(weights, self._num_bytes, self._new_tower)


def check_stored(folder: Path, architecture: Architecture, tower: "Tower | None" = None) -> None:
    """Passes if the files of a model folder hold the tensors of ``architecture``, by their headers.

    Raises:
        ConfigError: one is missing, unknown or of another shape, or there are no safetensors.
    """
    stored = stored_entries(folder)
    if not stored:
        raise ConfigError(f"{folder} has no weights in safetensors files; save the model with save_pretrained")
    builder = FusedWeightsBuilder(architecture, torch.float32, torch.device("meta"), tower)
    try:
        for name, entry in stored.items():
            place = entry.file
            builder.add(name, torch.empty(entry.shape, device="meta"))
        place = folder
        builder.finish()
    except WeightUpdateFailed as error:
        raise ConfigError(f"{place} does not hold the model that {folder / 'config.json'} describes: {error}") from error
