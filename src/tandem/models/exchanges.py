"""Communication of ranks that compute one forward pass together, with its gradient.

Every rank of the group computes the same loss from what it ends up with, so each keeps the gradient of its own part.
"""

from typing import Any

import torch
import torch.distributed as dist


def reduce(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ``group``, a new tensor; on a CPU in float32, where sums of bfloat16 are neither fast nor exact."""
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
    # as bytes: gloo does not know every dtype
    dist.all_to_all_single(received.flatten().view(torch.uint8), sent.flatten().view(torch.uint8), group=group)
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        own = own.contiguous()
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather([part.flatten().view(torch.uint8) for part in found], own.flatten().view(torch.uint8), group=group)
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grad, ctx.group).sum(0, dtype=torch.float32).to(grad.dtype), None


@torch.compiler.disable
def sum_parts(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of what each rank has; a rank's gradient is that of its part."""
    return _Sum.apply(part, group)


@torch.compiler.disable
def share(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``value``, which all ranks have, given to computations of which each rank does a part: the gradients are summed."""
    return _Share.apply(value, group)


def gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``own`` of every rank, stacked, for computations of which each rank does a part: the gradients are summed."""
    return _Gather.apply(own, group)


def exchange(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``blocks [ranks, …]``: block i goes to rank i, and comes back as the block that rank i had for this one."""
    return _Exchange.apply(blocks, group)
