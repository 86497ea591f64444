"""Attention of short sequences in bfloat16 on a CPU, by batched products of whole score matrices.

Forward and backward together take half the time of torch's fused kernel, which works on small blocks of one head. The query
heads that share a key head are one matrix. Scores and their gradients are float32, as in the fused kernel; weights are
computed again in the backward pass, so nothing but inputs and output is kept.
"""

import torch

LONGEST = 256
"""Keys; with 512 the fused kernel, which leaves out what is hidden, is faster."""


def takes(query: torch.Tensor, num_keys: int) -> bool:
    """True if these are computed here."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and num_keys <= LONGEST


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """Output ``[B, heads, Q, D]`` of ``q [B, heads, Q, D]`` and ``k``, ``v [B, kv_heads, K, D]``.

    ``visible [Q, K]`` bool: the keys that each query sees, one at least."""
    return _short_attention(q, k, v, visible, scale)


def _flat(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[B, heads, S, D]`` → ``[B · kv_heads, heads / kv_heads · S, D]``."""
    count, heads, length, dim = x.shape
    return x.reshape(count * kv_heads, heads // kv_heads * length, dim)


def _weights(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """``[B · kv_heads, group · Q, K]`` float32 of flat queries and keys."""
    hidden = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    hidden = hidden.repeat(q.shape[1] // len(visible), 1)
    # `softmax` is one pass; `exp` of torch's tensors alone costs three times as much
    return torch.baddbmm(hidden, q.float(), k.float().transpose(1, 2), alpha=scale).softmax(-1)


# One operator for autograd and for checkpoints, which keep its results and not its scores.
@torch.library.custom_op("tandem::short_attention", mutates_args=())
def _short_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    kv_heads = k.shape[1]
    weights = _weights(_flat(q, kv_heads), _flat(k, kv_heads), visible, scale)
    return torch.bmm(weights.to(v.dtype), _flat(v, kv_heads)).view(q.shape)


@_short_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float):
    return q.new_empty(q.shape)


@torch.library.custom_op("tandem::short_attention_backward", mutates_args=())
def _gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flat_grad, flat_q, flat_k, flat_v, flat_out = (_flat(x, k.shape[1]) for x in (grad, q, k, v, out))
    weights = _weights(flat_q, flat_k, visible, scale)
    grad_v = torch.bmm(weights.to(v.dtype).transpose(1, 2), flat_grad)
    wide = flat_grad.float()
    # the gradient of a score is its weight times the distance of its value's share from the mean, a small difference
    slope = torch.bmm(wide, flat_v.float().transpose(1, 2)).sub_((wide * flat_out).sum(-1, keepdim=True))
    grad_scores = slope.mul_(weights).mul_(scale).to(q.dtype)
    grad_q, grad_k = torch.bmm(grad_scores, flat_k), torch.bmm(grad_scores.transpose(1, 2), flat_q)
    return grad_q.view(q.shape), grad_k.view(k.shape), grad_v.view(v.shape)


@_gradients.register_fake
def _(grad, q, k, v, visible, scale, out):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output) -> None:
    q, k, v, visible, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, visible, output)


def _backward(ctx, grad: torch.Tensor):
    q, k, v, visible, out = ctx.saved_tensors
    return *_gradients(grad, q, k, v, visible, ctx.scale, out), None, None


_short_attention.register_autograd(_backward, setup_context=_keep)
