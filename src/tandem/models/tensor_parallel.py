"""Tensor parallelism: every matrix of a model is cut among ranks that compute the same sequences together.

Queries, keys, values and the first half of the MLP are cut by columns (heads, inner width), what follows them by rows, so
a layer needs one sum after attention and one after the MLP (arXiv:1909.08053). Embedding and head are cut by tokens. The
pieces are plain tensors: FSDP shards them further as it would any other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, pad

from tandem.api.state import TensorPart
from tandem.models.context_parallel import refuse_uneven_heads
from tandem.models.exchanges import share, sum_parts
from tandem.models.logprobs import Vocabulary
from tandem.models.packed import PackedModel

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
PER_HEAD = ("self_attn.q_norm", "self_attn.k_norm")
"""Whole on every rank, applied to the heads that it has: the gradients are parts of a sum."""


@dataclass(frozen=True)
class Pieces:
    """The parameters of a model that are cut, and the place of this rank's piece in the whole."""

    group: dist.ProcessGroup
    index: int
    size: int
    dims: Mapping[str, tuple[int, int]]
    """Name → dimension that is cut, and its length in the whole."""

    summed: frozenset[str]
    """Parameters that are whole everywhere, but whose gradient is the sum of what the ranks have."""

    def bounds(self, total: int) -> tuple[int, int]:
        """Begin and end of this rank's piece of ``total`` rows; the last ranks may have fewer."""
        each = -(-total // self.size)
        return min(total, self.index * each), min(total, (self.index + 1) * each)

    def shape(self, name: str, own: torch.Size) -> torch.Size:
        """The whole's shape."""
        if name not in self.dims:
            return own
        dim, total = self.dims[name]
        return torch.Size([*own[:dim], total, *own[dim + 1 :]])

    def piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, a view."""
        if name not in self.dims:
            return whole
        dim, total = self.dims[name]
        start, end = self.bounds(total)
        return whole.narrow(dim, start, end - start)

    def part(self, name: str, part: TensorPart) -> TensorPart:
        """The place of a part of this rank's piece in the whole; the first rank gives parameters that are not cut."""
        if name not in self.dims:
            return part if self.index == 0 else replace(part, values=part.values.new_empty(0))
        dim, total = self.dims[name]
        start = (*part.start[:dim], part.start[dim] + self.bounds(total)[0], *part.start[dim + 1 :])
        return replace(part, start=start, shape=(*part.shape[:dim], total, *part.shape[dim + 1 :]))

    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """All parts put together. Collective where the parameter is cut."""
        if name not in self.dims:
            return piece
        dim, total = self.dims[name]
        rows = piece.detach().movedim(dim, 0)
        # all_gather wants equal shapes: the last piece is padded, and the rows are cut off again
        missing = -(-total // self.size) - len(rows)
        rows = pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)).contiguous()
        found = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(found, rows, group=self.group)
        return torch.cat(found)[:total].movedim(0, dim).contiguous()


def cut_matrices(packed: PackedModel, group: dist.ProcessGroup, key: str = "actor.backend") -> Pieces:
    """Leaves this rank its piece of every matrix, and makes the model compute with the others of ``group``.

    Works on a model without memory (device ``meta``) too. ``key``: where the layout was written, for errors.

    Raises:
        ConfigError: the heads cannot be divided by the size of the group.
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
        refuse_uneven_heads(packed.architecture.num_heads, packed.architecture.num_kv_heads, size, 1, key)
        self._bare = Pieces(group, dist.get_rank(group), size, {}, frozenset())

    @property
    def pieces(self) -> Pieces:
        return Pieces(self._group, self._bare.index, self._bare.size, dict(self._dims), frozenset(self._summed))

    def layer(self, layer: nn.Module) -> None:
        # Columns first, rows after (Megatron's order): the activation between the two stays on its rank, and a layer needs
        # one sum for attention and one for the MLP.
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
        """Embedding, and the head where there is one."""
        model, total = self._packed.model, self._packed.architecture.vocab_size
        embedding = model.get_input_embeddings()
        head = getattr(model, "lm_head", None)
        tied = head is not None and head.weight is embedding.weight
        self._cut(embedding, "weight", 0)
        start, end = self._bare.bounds(total)
        _look_up_together(embedding, start, end - start, self._group)
        if head is not None:
            if tied:
                # the cut made a new parameter; without this the two would train apart
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
        """Each rank computes a part from here on."""
        if "hidden_states" in named:
            return positional, named | {"hidden_states": share(named["hidden_states"], self._group)}
        return (share(positional[0], self._group), *positional[1:]), named


class RowParallel(nn.Module):
    """A linear layer cut by rows: each rank has some inputs, all get the whole output."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: dist.ProcessGroup):
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self._group = group

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        """``[…, own inputs]`` → ``[…, outputs]``."""
        out = sum_parts(linear(part, self.weight), self._group)
        # after the sum, or each rank would add the bias once
        return out if self.bias is None else out + self.bias


def _look_up_together(embedding: nn.Module, start: int, count: int, group: dist.ProcessGroup) -> None:
    """Makes an embedding with the rows of ``count`` tokens from ``start`` on give those of all tokens."""
    look_up = embedding.forward
    padding = embedding.padding_idx
    here = padding is not None and start <= padding < start + count
    embedding.padding_idx = padding - start if here else None  # its row has no gradient

    def forward(ids: torch.Tensor) -> torch.Tensor:
        """``ids [1, T]`` → ``[1, T, H]``."""
        at = ids - start
        inside = (at >= 0) & (at < count)
        return sum_parts(look_up(at.where(inside, 0)).masked_fill(~inside[..., None], 0.0), group)

    embedding.forward = forward
