"""Log-probabilities and entropy of given tokens from hidden states, without holding ``[T, V]`` logits.

A few rows of logits exist at a time; the backward pass computes them again. Softmax in float32: of float32 copies with
torch's operators, or without copies by compiled kernels for bfloat16 on a CPU.
"""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from tandem.models.logit_kernels import FACTS, LogitKernels, logit_kernels
from tandem.models.sums import add_to

ROWS_FOR_ONE = 4
"""Rows of bfloat16 logits that take the memory of one row with torch's operators: logits and their softmax in float32."""


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
    are 1. Entropy in nats, of the same distribution, with its gradient. ``chunk_tokens`` rows of logits exist at a time, or
    four times as many where compiled kernels need a quarter of the memory; the result does not depend on it.
    """
    given = hidden, weight, targets, temperature, softcap, entropy
    kernels = logit_kernels(hidden, weight)
    if kernels is None:
        logprobs, entropies = _Head.apply(*given, chunk_tokens)
    else:
        logprobs, entropies = _CompiledHead.apply(*given, ROWS_FOR_ONE * chunk_tokens, kernels)
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


class _CompiledHead(torch.autograd.Function):
    """`_Head` in bfloat16 on a CPU. The logits of the last chunk, the only one of most batches, wait for the backward pass,
    which begins with them and writes their gradient over them."""

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
        kernels: LogitKernels,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < len(weight):
            raise IndexError(f"a target is not in the vocabulary of {len(weight)} tokens")
        targets, logits = targets.contiguous(), None
        temperature = None if temperature is None else temperature.float().contiguous()
        facts = hidden.new_empty(len(hidden), FACTS, dtype=torch.float32)
        for rows in _chunks(len(hidden), chunk_tokens):
            del logits  # before the next ones are made
            logits = linear(hidden[rows], weight)
            kernels.read(logits, targets[rows], part_of(temperature, rows), softcap, entropy, facts[rows])
        ctx.save_for_backward(hidden, weight, targets, temperature, facts)
        ctx.softcap, ctx.entropy, ctx.chunk_tokens, ctx.kernels = softcap, entropy, chunk_tokens, kernels
        ctx.logits = logits
        return facts[:, 2].clone(), facts[:, 3].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, temperature, facts = ctx.saved_tensors
        grad_logprobs, grad_entropy = grad_logprobs.float().contiguous(), grad_entropy.float().contiguous()
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        logits, ctx.logits = ctx.logits, None  # of a second backward pass they are computed again
        for rows in reversed(_chunks(len(hidden), ctx.chunk_tokens)):
            if logits is None:
                logits = linear(hidden[rows], weight)
            pulls = grad_logprobs[rows], grad_entropy[rows] if ctx.entropy else None
            described = targets[rows], part_of(temperature, rows), ctx.softcap, facts[rows]
            ctx.kernels.differentiate(logits, *described, *pulls)
            torch.mm(logits, weight, out=grad_hidden[rows])
            if ctx.needs_input_grad[1]:
                part = logits.T @ hidden[rows]
                if grad_weight is None:
                    grad_weight = part
                else:  # float32 sum over chunks
                    grad_weight = grad_weight.float()
                    add_to(grad_weight, part)
            logits = None
        if grad_weight is None and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 6


def _chunks(count: int, chunk_tokens: int) -> list[slice]:
    """Rows in chunks, of which the first may be smaller than ``chunk_tokens``.

    Example: 7 rows, 3 a chunk → 0:1, 1:4, 4:7
    """
    bounds = [0, *range(count % chunk_tokens or chunk_tokens, count + 1, chunk_tokens)] if count else [0]
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
