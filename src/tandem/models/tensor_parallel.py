"""Tensor parallelism: every matrix of a model is divided among ranks that compute the same sequences together.

Queries, keys, values and the first half of the MLP are divided by columns (heads, inner width), the matrices after them by
rows, so a layer needs one sum after attention and one after the MLP (arXiv:1909.08053). Embedding and head are divided by
tokens. The pieces are plain tensors, which FSDP can shard further.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, pad

from tandem.api.state import TensorPart
from tandem.models.context_parallel import refuse_uneven_heads, share, sum_parts
from tandem.models.logprobs import Vocabulary
from tandem.models.packed import PackedModel

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
PER_HEAD = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms that are whole on every rank and applied to the rank's heads, so that their gradients must be summed over ranks."""


@dataclass(frozen=True)
class Pieces:
    """The divided parameters of a model, and this rank's place among the ranks."""

    group: dist.ProcessGroup
    index: int
    size: int
    dims: Mapping[str, tuple[int, int]]
    """Name of a divided parameter → the divided dimension, and its length in the whole parameter."""

    summed: frozenset[str]
    """Names of parameters that are whole on every rank, and whose gradients must be summed over the ranks."""

    def bounds(self, total: int) -> tuple[int, int]:
        """Returns begin and end of this rank's piece of ``total`` rows; the last ranks may have fewer rows."""
        each = -(-total // self.size)
        return min(total, self.index * each), min(total, (self.index + 1) * each)

    def shape(self, name: str, own: torch.Size) -> torch.Size:
        """Returns the shape of the whole parameter. ``own``: shape of this rank's piece."""
        if name not in self.dims:
            return own
        dim, total = self.dims[name]
        return torch.Size([*own[:dim], total, *own[dim + 1 :]])

    def piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece of a whole tensor, as a view."""
        if name not in self.dims:
            return whole
        dim, total = self.dims[name]
        start, end = self.bounds(total)
        return whole.narrow(dim, start, end - start)

    def part(self, name: str, part: TensorPart) -> TensorPart:
        """Translates a part of this rank's piece into a part of the whole parameter. For a parameter that is not divided,
        only the first rank keeps the values."""
        if name not in self.dims:
            return part if self.index == 0 else replace(part, values=part.values.new_empty(0))
        dim, total = self.dims[name]
        start = (*part.start[:dim], part.start[dim] + self.bounds(total)[0], *part.start[dim + 1 :])
        return replace(part, start=start, shape=(*part.shape[:dim], total, *part.shape[dim + 1 :]))

    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Returns the whole parameter, put together from all pieces. Collective if the parameter is divided."""
        if name not in self.dims:
            return piece
        dim, total = self.dims[name]
        rows = piece.detach().movedim(dim, 0)
        # all_gather needs equal shapes: a shorter last piece is padded, and the padding removed afterwards
        missing = -(-total // self.size) - len(rows)
        rows = pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)).contiguous()
        pieces = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(pieces, rows, group=self.group)
        return torch.cat(pieces)[:total].movedim(0, dim).contiguous()


def cut_matrices(packed: PackedModel, group: dist.ProcessGroup, key: str = "actor.backend") -> Pieces:
    """Replaces every matrix by this rank's piece, and makes the model compute together with the other ranks of ``group``.

    Also works on a model without memory (device ``meta``). ``key``: the configuration key of the layout, for messages.

    Raises:
        ConfigError: the numbers of heads are not divisible by the size of the group.
    """
    cutter = _Cutter(packed, group, key)
    for layer in packed.decoder.layers:
        cutter.layer(layer)
    cutter.vocabulary()
    return cutter.pieces


class _Cutter:
    def __init__(self, packed: PackedModel, group: dist.ProcessGroup, key: str):
        self._packed, self._group = packed, group
        self._names = {id(parameter): name for name, parameter in packed.named_parameters()}
        self._dims: dict[str, tuple[int, int]] = {}
        self._summed: set[str] = set()
        size = dist.get_world_size(group)
        refuse_uneven_heads(packed.architecture.num_heads, packed.architecture.num_kv_heads, size, key)
        self._bare = Pieces(group, dist.get_rank(group), size, {}, frozenset())

    @property
    def pieces(self) -> Pieces:
        return Pieces(self._group, self._bare.index, self._bare.size, dict(self._dims), frozenset(self._summed))

    def layer(self, layer: nn.Module) -> None:
        # Columns first, then rows (as in Megatron-LM): the activation between the two matrices stays on its rank, so a layer
        # needs one sum for attention and one for the MLP.
        for path in COLUMNS:
            module = layer.get_submodule(path)
            self._cut(module, "weight", 0)
            if module.bias is not None:
                self._cut(module, "bias", 0)
        for path in ROWS:
            parent, _, name = path.rpartition(".")
            module = layer.get_submodule(path)
            self._cut(module, "weight", 1)
            setattr(layer.get_submodule(parent), name, RowParallel(module.weight, module.bias, self._group))
        for path in PER_HEAD:
            parent, _, name = path.rpartition(".")
            # a norm per head sees only this rank's heads, so its gradient must be summed over the ranks
            if hasattr(layer.get_submodule(parent), name):
                self._summed.add(self._names[id(layer.get_submodule(path).weight)])
        layer.self_attn.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.mlp.register_forward_pre_hook(self._enter, with_kwargs=True)

    def vocabulary(self) -> None:
        """Divides the embedding, and the head if the model has one."""
        model, total = self._packed.model, self._packed.architecture.vocab_size
        embedding = model.get_input_embeddings()
        head = getattr(model, "lm_head", None)
        tied = head is not None and head.weight is embedding.weight
        self._cut(embedding, "weight", 0)
        start, end = self._bare.bounds(total)
        _look_up_together(embedding, start, end - start, self._group)
        if head is not None:
            if tied:
                # the embedding is a new parameter now; head and embedding must remain one parameter
                head.weight = embedding.weight
            else:
                self._cut(head, "weight", 0)
            self._packed.vocabulary = Vocabulary(self._group, start)

    def _cut(self, module: nn.Module, name: str, dim: int) -> None:
        parameter = getattr(module, name)
        self._dims[self._names[id(parameter)]] = dim, parameter.shape[dim]
        start, end = self._bare.bounds(parameter.shape[dim])
        piece = parameter.detach().narrow(dim, start, end - start).clone(memory_format=torch.contiguous_format)
        setattr(module, name, nn.Parameter(piece, requires_grad=parameter.requires_grad))

    def _enter(self, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """Pre-forward hook: marks the hidden states as shared, since each rank computes a part from here on."""
        if "hidden_states" in named:
            return positional, named | {"hidden_states": share(named["hidden_states"], self._group)}
        return (share(positional[0], self._group), *positional[1:]), named


class RowParallel(nn.Module):
    """A linear layer divided by rows: each rank has a part of the inputs, and all ranks get the whole output."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: dist.ProcessGroup):
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self._group = group

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        """``[…, own inputs]`` → ``[…, outputs]``."""
        out = sum_parts(linear(part, self.weight), self._group)
        # after the sum, because otherwise each rank would add the bias
        return out if self.bias is None else out + self.bias


def _look_up_together(embedding: nn.Module, start: int, count: int, group: dist.ProcessGroup) -> None:
    """Makes an embedding that has only the rows of ``count`` tokens from ``start`` work for all tokens. Collective."""
    look_up = embedding.forward
    padding = embedding.padding_idx
    here = padding is not None and start <= padding < start + count
    embedding.padding_idx = padding - start if here else None  # the padding row has no gradient

    def forward(ids: torch.Tensor) -> torch.Tensor:
        """``ids [1, T]`` → ``[1, T, H]``."""
        at = ids - start
        inside = (at >= 0) & (at < count)
        return sum_parts(look_up(at.where(inside, 0)).masked_fill(~inside[..., None], 0.0), group)

    embedding.forward = forward
