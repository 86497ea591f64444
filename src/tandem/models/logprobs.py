"""Log-probabilities and entropy of given tokens from hidden states, without holding ``[T, V]`` logits.

A few rows of logits exist at a time; the backward pass computes them again. Softmax in float32: of float32 copies with
torch's operators, or without copies by compiled kernels for bfloat16 on a CPU.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from tandem.models.exchanges import reduce
from tandem.models.logit_kernels import FACTS, LogitKernels, logit_kernels
from tandem.models.sums import add_to

ROWS_FOR_ONE = 4
"""Rows of bfloat16 logits that take the memory of one row with torch's operators: logits and their softmax in float32."""


class HeadOutputs(NamedTuple):
    """``[M]`` float32 each."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None


class Vocabulary(NamedTuple):
    """The tokens of one rank, where the vocabulary is cut: those from ``start`` on, as many as it has rows of the head."""

    group: dist.ProcessGroup
    start: int


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | None,
    *,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_tokens: int = 1024,
    vocabulary: Vocabulary | None = None,
    compiled: bool = False,
) -> HeadOutputs:
    """Log-probability of ``targets`` under softmax(z / temperature), z = ``hidden @ weight.T``, soft-capped if asked.

    ``hidden [M, H]``, ``weight [V, H]``, ``targets [M]`` int64, ``temperature [M]`` float32 and positive, None where all
    are 1. Entropy in nats, of the same distribution, with its gradient. ``chunk_tokens`` rows of logits exist at a time, or
    four times as many where compiled kernels need a quarter of the memory; the result does not depend on it.

    ``vocabulary``: ``weight [V / ranks, H]`` is this rank's rows of the head, and all ranks have the same other arguments.
    Collective then, backward too; the gradient of ``hidden`` is that of the whole vocabulary. Per token three numbers cross
    and no logits. ``compiled``: `torch.compile` fuses what is done with logits, in each direction.
    """
    # the kernels read whole rows of the vocabulary, and a rank of a cut one has none
    kernels = logit_kernels(hidden, weight) if vocabulary is None else None
    if kernels is None:
        settings = _Settings(softcap, entropy, chunk_tokens, vocabulary, compiled)
        logprobs, entropies = _Head.apply(hidden, weight, targets, temperature, settings)
    else:
        given = hidden, weight, targets, temperature, softcap, entropy
        logprobs, entropies = _CompiledHead.apply(*given, ROWS_FOR_ONE * chunk_tokens, kernels)
    return HeadOutputs(logprobs, entropies if entropy else None)


def _part_of(numbers: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Those of some rows; None for None."""
    return None if numbers is None else numbers[rows]


class _Settings(NamedTuple):
    softcap: float | None
    entropy: bool
    chunk_tokens: int
    vocabulary: Vocabulary | None
    compiled: bool

    def places(self, targets: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The targets among this rank's ``count`` tokens, ``[M]`` bool, and their places there; 0 for the others."""
        at = targets - (0 if self.vocabulary is None else self.vocabulary.start)
        here = (at >= 0) & (at < count)
        return here, targets if self.vocabulary is None else at.where(here, 0)


def _scaled(
    logits: torch.Tensor, temperature: torch.Tensor | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits over temperature ``[C, V]`` float32, and the soft-cap's tanh for its derivative. May overwrite ``logits``."""
    logits, saturation = logits.float(), None
    if softcap is not None:
        saturation = logits.div_(softcap).tanh_()
        # not in place: the backward pass needs tanh itself
        logits = saturation * softcap
    if temperature is not None:
        logits.div_(temperature[:, None])
    return logits, saturation


def _read(
    logits: torch.Tensor, at: torch.Tensor, temperature: torch.Tensor | None, softcap: float | None, entropy: bool
) -> torch.Tensor:
    """Reads logits ``[C, V]`` of a rank once. Returns ``[3, C]``: the logarithm of the sum of exponentials, the
    log-probability of the token ``at [C]``, and the negative entropy. May overwrite ``logits``."""
    scaled, _ = _scaled(logits, temperature, softcap)
    logprobs = torch.log_softmax(scaled, -1)
    # both before `exp` overwrites ``scaled``
    chosen, logit = (x.gather(1, at[:, None])[:, 0] for x in (logprobs, scaled))
    mixed = torch.linalg.vecdot(torch.exp(logprobs, out=scaled), logprobs) if entropy else torch.zeros_like(chosen)
    return torch.stack((logit - chosen, chosen, mixed))


def _slope(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    softcap: float | None,
    totals: torch.Tensor,
    entropies: torch.Tensor | None,
    grad: torch.Tensor,
    grad_entropy: torch.Tensor,
    hit: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of some logits ``[C, …]``, from that of log-probabilities and entropies ``[C]``; ``hit [C]``: that of the
    log-probabilities, where these are the targets' own logits. May overwrite ``logits``."""
    scaled, saturation = _scaled(logits, temperature, softcap)
    logprobs = scaled.sub_(totals[:, None])
    if entropies is None:
        slope = logprobs.exp_().mul_(-grad[:, None])
    else:
        # dH/dz_j = -p_j (log p_j + H), d log p_y / dz_j = [j = y] - p_j
        probabilities = logprobs.exp()
        slope = logprobs.add_(entropies[:, None]).mul_(grad_entropy[:, None]).add_(grad[:, None])
        slope = slope.mul_(probabilities).neg_()
    if hit is not None:
        slope.add_(hit[:, None])
    if temperature is not None:
        slope.div_(temperature[:, None])
    if saturation is not None:
        slope.mul_(1 - saturation.square_())
    return slope.to(logits.dtype)


def _differentiate(logits: torch.Tensor, at: torch.Tensor, hit: torch.Tensor, *facts: Any) -> torch.Tensor:
    """`_slope` of logits ``[C, V]``, ``at [C]`` being the targets' places."""
    own = _slope(logits.gather(1, at[:, None]), *facts, hit=hit)
    return _slope(logits, *facts).scatter_(1, at[:, None], own)


@functools.cache
def _programs(compiled: bool) -> tuple[Callable[..., torch.Tensor], ...]:
    """`_read` and `_differentiate`."""
    return tuple(torch.compile(f, dynamic=True) if compiled else f for f in (_read, _differentiate))


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor | None,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        softcap, entropy, chunk_tokens, vocabulary, compiled = ctx.settings = settings
        here, at = settings.places(targets, len(weight))
        own, (read, _) = hidden.new_zeros(3, len(hidden), dtype=torch.float32), _programs(compiled)
        for rows in _chunks(len(hidden), chunk_tokens):
            own[:, rows] = read(linear(hidden[rows], weight), at[rows], _part_of(temperature, rows), softcap, entropy)
        parts = own[None]
        if vocabulary is not None and len(hidden):
            # only one rank has the target; −inf loses against it in the maximum below
            own[1].masked_fill_(~here, -torch.inf)
            parts = _gathered(own, vocabulary.group)
        # Sums of exponentials are joined in log space: no rank's largest logit can overflow another's.
        totals = parts[:, 0].logsumexp(0)  # [M]
        shares = parts[:, 0] - totals  # logarithm of each part's probability
        # H = −Σ_r s_r (Σ_j p_j log p_j + log s_r): a part's own entropy term, and its share
        entropies = -(shares.exp() * (parts[:, 2] + shares)).sum(0) if entropy else totals.new_zeros(0)
        ctx.save_for_backward(hidden, weight, targets, temperature, totals, entropies)
        return (parts[:, 1] + shares).amax(0), entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, temperature, totals, entropies = ctx.saved_tensors
        softcap, entropy, chunk_tokens, vocabulary, compiled = ctx.settings
        here, at = ctx.settings.places(targets, len(weight))
        _, differentiate = _programs(compiled)
        # float32: a sum over the ranks, and over the chunks
        grad_hidden = torch.empty_like(hidden, dtype=hidden.dtype if vocabulary is None else torch.float32)
        # many chunks add to it, and bfloat16 would lose the small ones
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad = grad_logprobs.float()
        for rows in _chunks(len(hidden), chunk_tokens):
            facts = _part_of(temperature, rows), softcap, totals[rows], entropies[rows] if entropy else None
            pulls = grad[rows], grad_entropy[rows]
            logits = differentiate(linear(hidden[rows], weight), at[rows], (grad * here)[rows], *facts, *pulls)
            grad_hidden[rows] = logits @ weight
            if grad_weight is not None and weight.dtype == torch.float32:
                grad_weight.addmm_(logits.T, hidden[rows])
            elif grad_weight is not None:
                add_to(grad_weight, logits.T @ hidden[rows])
        if vocabulary is not None and len(hidden):
            grad_hidden = reduce(grad_hidden, vocabulary.group)
        return grad_hidden.to(hidden.dtype), None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _gathered(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``parts [3, M]`` of all ranks, ``[ranks, 3, M]``."""
    found = [torch.empty_like(parts) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, parts, group=group)
    return torch.stack(found)


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
            kernels.read(logits, targets[rows], _part_of(temperature, rows), softcap, entropy, facts[rows])
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
            described = targets[rows], _part_of(temperature, rows), ctx.softcap, facts[rows]
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


def _chunks(count: int, most: int) -> list[slice]:
    """Rows in as few chunks as there can be, of one size but for the last.

    Example: 7 rows, 3 a chunk → 0:3, 3:6, 6:7; 8 rows, 7 a chunk → 0:4, 4:8
    """
    size = -(-count // max(1, -(-count // most)))
    return [slice(start, min(start + size, count)) for start in range(0, count, size or 1)]
