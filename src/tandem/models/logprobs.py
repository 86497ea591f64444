"""Log-probabilities and entropy of given tokens from hidden states, without holding ``[T, V]`` logits.

A few rows of logits exist at a time; the backward pass computes them again. Softmax in float32.
"""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear


class HeadOutputs(NamedTuple):
    """``[M]`` float32 each."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | None,
    *,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_tokens: int = 1024,
) -> HeadOutputs:
    """Log-probability of ``targets`` under softmax(z / temperature), z = ``hidden @ weight.T``, soft-capped if asked.

    ``hidden [M, H]``, ``weight [V, H]``, ``targets [M]`` int64, ``temperature [M]`` float32 and positive, None where all
    are 1. Entropy in nats, of the same distribution, with its gradient. ``chunk_tokens`` rows of logits exist at a time; the
    result does not depend on it.
    """
    logprobs, entropies = _Head.apply(hidden, weight, targets, temperature, softcap, entropy, chunk_tokens)
    return HeadOutputs(logprobs, entropies if entropy else None)


def part_of(temperature: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """The temperatures of some rows; None where all are 1."""
    return None if temperature is None else temperature[rows]


def scaled_logits(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits over temperature ``[C, V]`` float32, and the soft-cap's tanh for its derivative."""
    logits = linear(hidden, weight).float()
    saturation = None
    if softcap is not None:
        saturation = logits.div_(softcap).tanh_()
        logits = saturation * softcap
    if temperature is not None:
        logits.div_(temperature[:, None])
    return logits, saturation


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor | None,
        softcap: float | None,
        entropy: bool,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropies = hidden.new_zeros(len(hidden) if entropy else 0, dtype=torch.float32)
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits, _ = scaled_logits(hidden[rows], weight, part_of(temperature, rows), softcap)
            all_logprobs = torch.log_softmax(logits, -1)
            logprobs[rows] = all_logprobs.gather(1, targets[rows, None])[:, 0]
            if entropy:
                torch.exp(all_logprobs, out=logits)
                entropies[rows] = -torch.linalg.vecdot(logits, all_logprobs)
        ctx.save_for_backward(hidden, weight, targets, temperature, entropies)
        ctx.softcap, ctx.entropy, ctx.chunk_tokens = softcap, entropy, chunk_tokens
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, temperature, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # float32 sum over chunks, also where the weight is bfloat16
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            logits, saturation = scaled_logits(hidden[rows], weight, part_of(temperature, rows), ctx.softcap)
            grad = grad_logprobs[rows, None].float()
            if ctx.entropy:
                # dH/dz_j = -p_j (log p_j + H), d log p_y / dz_j = [j = y] - p_j
                all_logprobs = torch.log_softmax(logits, -1)
                probabilities = torch.exp(all_logprobs, out=logits)
                slope = all_logprobs.add_(entropies[rows, None]).mul_(grad_entropy[rows, None]).add_(grad)
                grad_logits = slope.mul_(probabilities).neg_()
            else:
                grad_logits = torch.softmax(logits, -1).mul_(-grad)
            grad_logits.scatter_add_(1, targets[rows, None], grad)
            if temperature is not None:
                grad_logits.div_(temperature[rows, None])
            if saturation is not None:
                grad_logits.mul_(1 - saturation.square_())
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.T, hidden[rows])
                else:
                    grad_weight.add_(grad_logits.T @ hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None
