"""The forward pass of the engine: embeddings, fused layers, final norm, head.

Attention is given from outside, so prefill and decode share the rest.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from tandem.config.errors import ConfigError
from tandem.engines.inference.fused_weights import FusedWeights, LayerWeights
from tandem.engines.inference.kernels import Kernels
from tandem.engines.inference.row_attention import RowAttention
from tandem.engines.inference.tower import Shown
from tandem.models.architecture import Architecture, Rope

Table = tuple[torch.Tensor, torch.Tensor]
"""Cosines ``[length, 1, D]`` and sines ``[length, 1, D / 2]``, see `rotary_table`."""

Attend = Callable[[int, int | None, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attend(layer, window, queries [T, heads, D], keys [T, kv_heads, D], values) -> [T, heads · D]``; fills the cache."""


class Decoder:
    """Stateless but for its rotary tables; the weights come with each call, so a new version is a new argument.

    ``kernels``: compiled ones, which take the place of torch's norms and gate; None where there are none for ``compute``.
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
        """Final hidden states after the last norm, of all tokens or of those in ``keep``.

        Args:
            weights: which version.
            tokens: ``[T]`` int64.
            positions: ``[T]`` int64, absolute; or ``[T, 3]``, in time, height and width.
            attend: attention over the cache, which it also writes.
            keep: ``[K]`` int64, the tokens whose hidden state is wanted; K may be 0.
            shown: features that take the place of tokens' embeddings, and that are added behind layers.

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
        """The rotary tables of the layers, and the place of each token in them. Tokens with three positions ``[T, 3]`` have
        tables of their own, a line for each."""
        if positions.dim() == 1:
            return self.rotary_tables, positions
        own: dict[int, Table] = {}
        for rope, table in zip(self._a.rope, self.rotary_tables, strict=True):
            if rope is not None and table is not None and id(table) not in own:
                assert rope.axes is not None
                at = positions[:, rope.axes.to(positions.device)]  # [T, D / 2]
                cos, sin = table[0][:, 0].gather(0, torch.cat((at, at), dim=1)), table[1][:, 0].gather(0, at)
                own[id(table)] = cos[:, None], sin[:, None]
        lines = torch.arange(len(positions), device=positions.device)
        return [None if table is None else own[id(table)] for table in self.rotary_tables], lines

    def logits(self, weights: FusedWeights, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, hidden]`` → ``[B, V]`` float32, or what the compiled draw takes."""
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
        """Attention of one layer before its output projection, ``[T, heads · D]``."""
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
        """Output projection and MLP, each with its residual."""
        o, down = layer.projections["o"], layer.projections["down"]
        if self._a.post_norms:
            x = x + self._norm(o(mixed), layer.norms["after_attention"])
            inner = self._gated(layer.projections["gate_up"](self._norm(x, layer.norms["mlp"])))
            return x + self._norm(down(inner), layer.norms["after_mlp"])
        x = o.add_to(x, mixed)
        return down.add_to(x, self._gated(layer.projections["gate_up"](self._norm(x, layer.norms["mlp"]))))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.kernels is not None and x.dim() == 2:  # else of the heads of a model whose attention torch computes
            return self.kernels.rms_norm(x, weight, self._a.rms_eps)
        return functional.rms_norm(x, (x.shape[-1],), weight, self._a.rms_eps)


def rotary_table(rope: Rope, length: int, dtype: torch.dtype, device: torch.device) -> Table:
    """Cosine ``[length, 1, D]`` and sine ``[length, 1, D / 2]`` of every position, times the scaling."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rope.inv_freq)
    cos, sin = angles.cos() * rope.attention_scaling, angles.sin() * rope.attention_scaling
    return torch.cat((cos, cos), dim=-1)[:, None].to(device, dtype), sin[:, None].to(device, dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on ``[T, heads, D]``, first half against second half; three passes and no copies of halves."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def gate(activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """``[T, 2 · I]`` (gate, up) → activation(gate) · up, ``[T, I]``."""
    if activation not in ACT2FN:
        raise ConfigError(f"the model's activation is {activation!r} (hidden_act in config.json), and there is none")
    function = ACT2FN[activation]

    def gated(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return function(gate).mul_(up)

    return gated
