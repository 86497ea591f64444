"""Context parallelism: the tokens of one packed row are divided among ranks, which exchange data only for attention.

Each rank computes embedding, norms, MLPs and head for an equal piece of the row. For attention there are two ways:

- ``all_to_all``: ranks exchange all heads of some tokens for some heads of all tokens, compute attention as usual, and
  exchange back (arXiv:2309.14509). Packing, shared prompts, windows and soft-caps work unchanged.
- ``gather``: a rank receives the keys and values of all tokens, and computes attention for its own queries. It works with
  any number of heads, sends more data if there are as many key as query heads, and does not share prompts.

The functions below are collective operations with gradients. All ranks of the group compute the same loss from the combined
result, so each rank keeps the gradient of its own part.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from tandem.config.errors import ConfigError
from tandem.models.architecture import Architecture


def reduce(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the sum over ``group`` as a new tensor. On a CPU it is computed in float32, because sums in bfloat16 are
    neither fast nor exact there."""
    low = value.device.type == "cpu" and value.dtype in (torch.bfloat16, torch.float16)
    total = value.float() if low else value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.to(value.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return reduce(part, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return reduce(grad, ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(blocks, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grad, ctx.group), None


def _exchanged(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = blocks.contiguous()
    received = torch.empty_like(sent)
    # sent as bytes, because gloo does not support every dtype
    dist.all_to_all_single(received.flatten().view(torch.uint8), sent.flatten().view(torch.uint8), group=group)
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather([part.flatten().view(torch.uint8) for part in parts], own.flatten().view(torch.uint8), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grad, ctx.group).sum(0, dtype=torch.float32).to(grad.dtype), None


@torch.compiler.disable
def sum_parts(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the sum of the ranks' parts; the gradient of the sum is passed unchanged to each part."""
    return _Sum.apply(part, group)


@torch.compiler.disable
def share(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns ``value``, equal on all ranks, for a computation of which each rank does a part: gradients are summed over the
    ranks."""
    return _Share.apply(value, group)


def gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns ``own`` of every rank, stacked, for a computation of which each rank does a part: gradients are summed over
    the ranks."""
    return _Gather.apply(own, group)


def exchange(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchanges ``blocks [ranks, …]``: block i is sent to rank i and replaced by the block that rank i sent to this rank."""
    return _Exchange.apply(blocks, group)


@dataclass(frozen=True)
class Context:
    """The ranks that divide a row of tokens, and this rank's index among them."""

    group: dist.ProcessGroup
    index: int
    size: int
    way: Literal["all_to_all", "gather"] = "all_to_all"

    def padding(self, total: int) -> int:
        """Returns how many tokens must be added so that all ranks have equally many."""
        return -total % self.size

    def rows(self, padded: int) -> slice:
        """Returns the slice of this rank's tokens in a padded row."""
        each = padded // self.size
        return slice(self.index * each, (self.index + 1) * each)

    def tokens_for_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """``[1, heads, own tokens, D]`` → ``[1, own heads, all tokens, D]``."""
        blocks = heads[0].unflatten(0, (self.size, -1))  # [ranks, own heads, own tokens, D]
        return exchange(blocks, self.group).transpose(0, 1).flatten(1, 2)[None]

    def heads_for_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[1, all tokens, own heads, D]`` → ``[1, own tokens, heads, D]``."""
        blocks = tokens[0].unflatten(0, (self.size, -1))  # [ranks, own tokens, own heads, D]
        return exchange(blocks, self.group).transpose(0, 1).flatten(1, 2)[None]

    def gather_tokens(self, heads: torch.Tensor) -> torch.Tensor:
        """``[1, heads, own tokens, D]`` → ``[1, heads, all tokens, D]``."""
        return gather(heads[0], self.group).transpose(0, 1).flatten(1, 2)[None]

    def place(self, own: torch.Tensor) -> torch.Tensor:
        """Puts the ranks' values together: ``[own tokens]`` → ``[all tokens]``, equal on all ranks."""
        each = len(own)
        return sum_parts(pad(own, (self.index * each, (self.size - 1 - self.index) * each)), self.group)


def divides_heads(architecture: Architecture, ranks: int) -> bool:
    """Tells whether query heads and key-value heads can each be divided evenly among ``ranks``."""
    return architecture.num_heads % ranks == 0 and architecture.num_kv_heads % ranks == 0


def refuse_uneven_heads(heads: int, kv_heads: int, tensor: int, key: str = "actor.backend") -> None:
    """Checks that the heads can be divided evenly among the ``tensor`` ranks of tensor parallelism. ``key``: the
    configuration key of the layout, for the message.

    Raises:
        ConfigError: they cannot; the message says how many heads there are, and what works.
    """
    if heads % tensor or kv_heads % tensor:
        fits = [n for n in range(2, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0]
        works = f"into {', '.join(map(str, fits))} parts" if fits else "not at all"
        raise ConfigError(
            f"{key} with t{tensor} divides attention by heads over {tensor} ranks, but this model has {heads} heads on "
            f"{kv_heads} key-value heads, which can be divided {works}; use d instead of t"
        )
