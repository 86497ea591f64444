"""The model as the engine runs it: its own copy of the weights, and the forward pass (embeddings, fused layers, norm, head).

Weights are built from a stream of tensors. Query, key and value become one matrix, gate and up another. On a CPU, matrices
are packed for oneDNN, which is 15 to 50 % faster at the sizes of a decode step than the plain layout. On a CPU without
bfloat16 instructions, bfloat16 weights are stored as float32: computing in bfloat16 would be four times slower there, and
less exact.

The caller passes the attention function, so prefill and decode share all other code.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from tandem.api.failures import WeightUpdateFailed
from tandem.api.weights import stored_entries
from tandem.config.errors import ConfigError
from tandem.engines.inference.kernels import Kernels, RowAttention
from tandem.engines.inference.tower import Shown
from tandem.models.architecture import Architecture, Rope
from tandem.models.hardware import fast_bfloat16

if TYPE_CHECKING:
    from tandem.engines.inference.tower import Tower


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of matrix products for the configured ``dtype``: float32 instead of bfloat16 where that is slow."""
    return dtype if dtype != torch.bfloat16 or fast_bfloat16(device) else torch.float32


def packs(device: torch.device) -> bool:
    """True if a `Linear` on this device holds its matrix as a copy in oneDNN's layout."""
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
        """Returns the projection of ``x`` plus ``residual``."""
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
    """Delivered weights that wait for `EngineCore.swap`."""

    weights: FusedWeights
    num_bytes: int
    tower: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights of a media model's towers that differ from those that the engine has."""


@dataclass
class _Target:
    """Destination of one named tensor: rows ``start`` onwards of a fused tensor."""

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
    """The expected tensors, and the fused tensors that they become parts of."""

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

    def _add(self, fused: str, parts: tuple[tuple[str, int], ...], columns: tuple[int, ...]) -> None:
        start = 0
        for name, rows in parts:
            self.targets[name] = _Target((rows, *columns), fused, start)
            start += rows
        self.fused[fused] = _Fused((start, *columns), len(parts))


class _Scratch:
    """Memory in which a matrix is assembled before it is packed.

    The memory is reused for the next matrix; allocated anew, it would leave holes between the packed matrices.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self._numel, self._dtype, self._device = numel, dtype, device
        self._free: list[torch.Tensor] = []

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns memory of this shape, with arbitrary values. Several pieces of memory are in use at a time if the parts of
        several matrices arrive interleaved."""
        flat = self._free.pop() if self._free else torch.empty(self._numel, dtype=self._dtype, device=self._device)
        return flat[: math.prod(shape)].view(shape)

    def give(self, tensor: torch.Tensor) -> None:
        """Takes back memory that is no longer read."""
        self._free.append(torch.as_strided(tensor, (self._numel,), (1,), 0))


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")


class FusedWeightsBuilder:
    """Builds `FusedWeights` from tensors that come one by one, in any order. A tensor need only be valid during `add`."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device, tower: "Tower | None" = None):
        """``tower``: the towers of a media model, to which some of its tensors belong."""
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
        """Adds one tensor under its Hugging Face name.

        Raises:
            WeightUpdateFailed: the architecture has no such tensor, its shape differs, or it was added before.
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
            return  # tied to the embedding
        target = self._plan.targets.get(name)
        if target is None:
            raise WeightUpdateFailed(f"weights: {name} is not one of this model's {len(self._plan.targets)} tensors")
        if tuple(tensor.shape) != target.shape:
            raise WeightUpdateFailed(f"weights: {name} must be {list(target.shape)}, got {list(tensor.shape)}")
        if name in self._seen:
            raise WeightUpdateFailed(f"weights: {name} came twice")
        self._seen.add(name)
        self._num_bytes += tensor.numel() * tensor.element_size()
        fused = self._plan.fused[target.fused]
        if fused.tensor is None:
            fused.tensor = self._room(target.fused, fused.shape)
        # Rounded to the configured dtype even if computed in another one.
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
        """Returns the weights; all tensors must have been added.

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
    """Passes if a model folder holds the tensors of ``architecture``, according to the headers of its files.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape, or there are no safetensors files.
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


Table = tuple[torch.Tensor, torch.Tensor]
"""Cosines ``[length, 1, D]`` and sines ``[length, 1, D / 2]``, see `rotary_table`."""

Attend = Callable[[int, int | None, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attend(layer, window, queries [T, heads, D], keys [T, kv_heads, D], values) -> [T, heads · D]``; fills the cache."""


class Decoder:
    """Holds only rotary tables; the weights are an argument of each call.

    ``kernels``: compiled kernels that replace torch's norms and gate; None if there are none for the dtype ``compute``.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        compute: torch.dtype,
        device: torch.device,
        max_len: int,
        kernels: Kernels | None = None,
    ):
        self._a = architecture
        self.kernels = kernels
        self.windows = set(architecture.sliding_windows)
        ropes: dict[int, Table] = {}
        self.rotary_tables: list[Table | None] = []
        for rope in architecture.rope:
            if rope is not None and id(rope) not in ropes:
                ropes[id(rope)] = rotary_table(rope, max_len, compute, device)
            self.rotary_tables.append(None if rope is None else ropes[id(rope)])
        # transformers rounds the scale to the weights' dtype
        self._embedding_scale = float(torch.tensor(architecture.embedding_scale).to(dtype))
        compiled = kernels is not None and architecture.activation == "silu"
        self._gated = kernels.silu_gate if kernels is not None and compiled else gate(architecture.activation)

    def hidden(
        self,
        weights: FusedWeights,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend | RowAttention,
        keep: torch.Tensor | None = None,
        shown: Shown | None = None,
    ) -> torch.Tensor:
        """Returns the hidden states after the last norm, of all tokens or of those in ``keep``.

        Args:
            weights: the weights of the version to compute with.
            tokens: ``[T]`` int64.
            positions: ``[T]`` int64, absolute; or ``[T, 3]``, in time, height and width.
            attend: attention over the cache; also writes the new keys and values.
            keep: ``[K]`` int64, indices of the tokens whose hidden states are returned; K may be 0. None: all.
            shown: media features that replace the embeddings of their tokens, and are added after the first layers.

        Returns:
            ``[T, hidden]`` or ``[K, hidden]``.
        """
        x = functional.embedding(tokens, weights.embedding)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if shown is not None:
            x[shown.places] = shown.features[0]
        tables, positions = self._tables_at(positions)
        rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            table = tables[index]
            if table is not None and id(table) not in rotations and not isinstance(attend, RowAttention):
                rotations[id(table)] = table[0][positions], table[1][positions]
            rotation = rotations.get(id(table))
            qkv = layer.projections["qkv"](self._norm(x, layer.norms["attention"]))
            if isinstance(attend, RowAttention):
                norms = (layer.norms["query"], layer.norms["key"], self._a.rms_eps) if self._a.qk_norm else None
                mixed = attend(index, self._a.sliding_windows[index], qkv, positions, table, norms)
            else:
                mixed = self._attention(layer, index, qkv, rotation, attend)
            if index == last and keep is not None:
                mixed, x = mixed[keep], x[keep]
            x = self._after_attention(layer, x, mixed)
            if shown is not None and index + 1 < len(shown.features):
                x[shown.places] += shown.features[index + 1]
        return self._norm(x, weights.norm)

    def _tables_at(self, positions: torch.Tensor) -> tuple[Sequence[Table | None], torch.Tensor]:
        """Returns each layer's rotary table, and the index of each token into the tables. Positions ``[T, 3]`` get tables of
        their own, with one line per token."""
        if positions.dim() == 1:
            return self.rotary_tables, positions
        gathered: dict[int, Table] = {}
        for rope, table in zip(self._a.rope, self.rotary_tables, strict=True):
            if rope is not None and table is not None and id(table) not in gathered:
                assert rope.axes is not None
                at = positions[:, rope.axes.to(positions.device)]  # [T, D / 2]
                cos, sin = table[0][:, 0].gather(0, torch.cat((at, at), dim=1)), table[1][:, 0].gather(0, at)
                gathered[id(table)] = cos[:, None], sin[:, None]
        lines = torch.arange(len(positions), device=positions.device)
        return [None if table is None else gathered[id(table)] for table in self.rotary_tables], lines

    def logits(self, weights: FusedWeights, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, hidden]`` → ``[B, V]``, in float32 unless the compiled draw reads the compute dtype."""
        logits, cap = weights.head(hidden), self._a.final_softcap
        if self.kernels is not None and cap is None:
            return logits
        logits = logits.float()
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _attention(
        self,
        layer: LayerWeights,
        index: int,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        attend: Attend,
    ) -> torch.Tensor:
        """Returns the attention of one layer before its output projection, ``[T, heads · D]``."""
        a = self._a
        qkv = qkv.view(len(qkv), a.num_heads + 2 * a.num_kv_heads, a.head_dim)
        rotated, values = qkv[:, : -a.num_kv_heads], qkv[:, -a.num_kv_heads :]
        if a.qk_norm:
            queries = self._norm(rotated[:, : a.num_heads], layer.norms["query"])
            rotated = torch.cat((queries, self._norm(rotated[:, a.num_heads :], layer.norms["key"])), dim=1)
        if rotation is not None:
            rotated = rotate(rotated, *rotation)
        return attend(index, a.sliding_windows[index], rotated[:, : a.num_heads], rotated[:, a.num_heads :], values)

    def _after_attention(self, layer: LayerWeights, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Applies output projection and MLP, each with its residual."""
        o, down = layer.projections["o"], layer.projections["down"]
        if self._a.post_norms:
            x = x + self._norm(o(mixed), layer.norms["after_attention"])
            inner = self._gated(layer.projections["gate_up"](self._norm(x, layer.norms["mlp"])))
            return x + self._norm(down(inner), layer.norms["after_mlp"])
        x = o.add_to(x, mixed)
        return down.add_to(x, self._gated(layer.projections["gate_up"](self._norm(x, layer.norms["mlp"]))))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.kernels is not None and x.dim() == 2:  # 3 dimensions: query or key heads, where torch computes attention
            return self.kernels.rms_norm(x, weight, self._a.rms_eps)
        return functional.rms_norm(x, (x.shape[-1],), weight, self._a.rms_eps)


def rotary_table(rope: Rope, length: int, dtype: torch.dtype, device: torch.device) -> Table:
    """Returns cosines ``[length, 1, D]`` and sines ``[length, 1, D / 2]`` of every position, times the scaling."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rope.inv_freq)
    cos, sin = angles.cos() * rope.attention_scaling, angles.sin() * rope.attention_scaling
    return torch.cat((cos, cos), dim=-1)[:, None].to(device, dtype), sin[:, None].to(device, dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates ``[T, heads, D]`` by position, first half against second half, in three passes without copies of halves."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def gate(activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function ``[T, 2 · I]`` (gate, up) → activation(gate) · up, ``[T, I]``."""
    if activation not in ACT2FN:
        raise ConfigError(f"the model's activation {activation!r} (hidden_act in config.json) is unknown to transformers")
    function = ACT2FN[activation]

    def gated(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return function(gate).mul_(up)

    return gated
