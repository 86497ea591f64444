"""Log-probabilities and entropy of given tokens from hidden states, without holding ``[T, V]`` logits.

Only a chunk of rows of logits exists at a time; the backward pass computes them again. The softmax is computed in float32.
The reference is torch's operators on float32 copies. For bfloat16 on a CPU, compiled kernels need no copies
(`logit_kernels.cpp`, built by `models/native.py`).
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from tandem.models.context_parallel import reduce
from tandem.models.native import add_to, function, load

FACTS = 4
"""Number of values that the kernels store for each row: the maximum m of the scaled logits z, log Σ exp(z - m), the
log-probability of the target, and the entropy."""


class LogitKernels:
    """The functions of the compiled library. Logits ``[C, V]`` are contiguous bfloat16 on the CPU, all values per row
    float32; ``targets [C]`` are tokens of the vocabulary, ``temperature [C]`` is None if all are 1."""

    def __init__(self, path: Path, dtype: torch.dtype):
        library = ctypes.CDLL(str(path))
        pointer, number, real, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        sizes = [number, number, threads]
        self._read = function(library, "read_logits", [pointer] * 3 + [real, threads, pointer, *sizes])
        self._differentiate = function(library, "differentiate_logits", [pointer] * 3 + [real] + [pointer] * 3 + sizes)

    def read(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor | None,
        softcap: float | None,
        entropy: bool,
        facts: torch.Tensor,
    ) -> None:
        """Fills ``facts [C, FACTS]``; without ``entropy`` the entropies are 0."""
        inputs = logits.data_ptr(), targets.data_ptr(), _pointer(temperature), softcap or 0.0, int(entropy)
        self._read(*inputs, facts.data_ptr(), *logits.shape, torch.get_num_threads())

    def differentiate(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor | None,
        softcap: float | None,
        facts: torch.Tensor,
        grad_logprobs: torch.Tensor,
        grad_entropy: torch.Tensor | None,
    ) -> None:
        """Overwrites ``logits`` with their gradient, given the gradients of log-probabilities ``[C]`` and entropies
        ``[C]``."""
        inputs = logits.data_ptr(), targets.data_ptr(), _pointer(temperature), softcap or 0.0
        pulls = grad_logprobs.data_ptr(), _pointer(grad_entropy)
        self._differentiate(*inputs, facts.data_ptr(), *pulls, *logits.shape, torch.get_num_threads())


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _kernels() -> LogitKernels | None:
    return load(Path(__file__).with_name("logit_kernels.cpp"), torch.bfloat16, LogitKernels)


def logit_kernels(hidden: torch.Tensor, weight: torch.Tensor) -> LogitKernels | None:
    """Returns the kernels for the head of ``hidden`` and ``weight``; None if these are not bfloat16 on a CPU, or if the
    kernels cannot be built (see `load`)."""
    supported = all(x.device.type == "cpu" and x.dtype == torch.bfloat16 for x in (hidden, weight))
    return _kernels() if supported else None


ROWS_FOR_ONE = 4
"""This many rows of bfloat16 logits use as much memory as one row with torch's operators, which hold logits and softmax in
float32."""


class HeadOutputs(NamedTuple):
    """Log-probabilities and, if requested, entropies of M tokens, ``[M]`` float32 each."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None


class Vocabulary(NamedTuple):
    """This rank's part of a vocabulary that is divided among ranks: it begins at token ``start`` and has a token for each of
    the rank's rows of the head."""

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
    """Computes log-probabilities of ``targets`` under softmax(z / temperature), z = ``hidden @ weight.T``, with ``softcap``
    applied to z if it is set.

    ``hidden [M, H]``, ``weight [V, H]``, ``targets [M]`` int64, ``temperature [M]`` float32 and positive; None: all are 1.
    The entropy is that of the same distribution, in nats, and has a gradient. ``chunk_tokens`` rows of logits exist at a
    time, or four times as many with compiled kernels, which need a quarter of the memory; the result does not depend on it.

    ``vocabulary``: ``weight [V / ranks, H]`` is this rank's rows of the head, and all other arguments are equal on all
    ranks. Forward and backward are then collective; the gradient of ``hidden`` is that of the whole vocabulary. Ranks
    exchange three numbers per token and no logits. ``compiled``: `torch.compile` fuses the operations on logits, forward and
    backward.
    """
    # the kernels need all columns of the logits, which no rank has if the vocabulary is divided
    kernels = logit_kernels(hidden, weight) if vocabulary is None else None
    if kernels is None:
        settings = _Settings(softcap, entropy, chunk_tokens, vocabulary, compiled)
        logprobs, entropies = _Head.apply(hidden, weight, targets, temperature, settings)
    else:
        inputs = hidden, weight, targets, temperature, softcap, entropy
        logprobs, entropies = _CompiledHead.apply(*inputs, ROWS_FOR_ONE * chunk_tokens, kernels)
    return HeadOutputs(logprobs, entropies if entropy else None)


def _part_of(numbers: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Returns ``numbers[rows]``; None for None."""
    return None if numbers is None else numbers[rows]


class _Settings(NamedTuple):
    softcap: float | None
    entropy: bool
    chunk_tokens: int
    vocabulary: Vocabulary | None
    compiled: bool

    def places(self, targets: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns for each target whether it is among this rank's ``count`` tokens, ``[M]`` bool, and its index among these
        tokens, ``[M]``; 0 for all other targets."""
        at = targets - (0 if self.vocabulary is None else self.vocabulary.start)
        here = (at >= 0) & (at < count)
        return here, targets if self.vocabulary is None else at.where(here, 0)


def _scaled(
    logits: torch.Tensor, temperature: torch.Tensor | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns logits / temperature ``[C, V]`` float32, and the soft-cap's tanh for the derivative. May overwrite
    ``logits``."""
    logits, saturation = logits.float(), None
    if softcap is not None:
        saturation = logits.div_(softcap).tanh_()
        # not in place, because the backward pass needs the tanh
        logits = saturation * softcap
    if temperature is not None:
        logits.div_(temperature[:, None])
    return logits, saturation


def _read(
    logits: torch.Tensor, at: torch.Tensor, temperature: torch.Tensor | None, softcap: float | None, entropy: bool
) -> torch.Tensor:
    """Reads a rank's logits ``[C, V]`` once. Returns ``[3, C]``: the log-sum-exp, the log-probability of the token
    ``at [C]``, and the negative entropy. May overwrite ``logits``."""
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
    """Returns the gradient of logits ``[C, …]``, given the gradients of log-probabilities (``grad``) and entropies ``[C]``.
    ``hit [C]``: if ``logits`` are those of the targets, the gradient of the targets' log-probabilities, 0 for targets of
    other ranks; None for all other logits. May overwrite ``logits``."""
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
    """Returns the gradient (`_slope`) of logits ``[C, V]``; ``at [C]``: index of each target in its row."""
    target_slope = _slope(logits.gather(1, at[:, None]), *facts, hit=hit)
    return _slope(logits, *facts).scatter_(1, at[:, None], target_slope)


@functools.cache
def _programs(compiled: bool) -> tuple[Callable[..., torch.Tensor], ...]:
    """Returns `_read` and `_differentiate`, compiled by torch if ``compiled``."""
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
        facts, (read, _) = hidden.new_zeros(3, len(hidden), dtype=torch.float32), _programs(compiled)
        for rows in _chunks(len(hidden), chunk_tokens):
            facts[:, rows] = read(linear(hidden[rows], weight), at[rows], _part_of(temperature, rows), softcap, entropy)
        parts = facts[None]
        if vocabulary is not None and len(hidden):
            # only one rank has the target; the others' −inf is ignored by the maximum below
            facts[1].masked_fill_(~here, -torch.inf)
            parts = _gathered(facts, vocabulary.group)
        # Sums of exponentials are combined in log space, so that large logits cannot overflow.
        totals = parts[:, 0].logsumexp(0)  # [M]
        shares = parts[:, 0] - totals  # logarithm of each part's probability
        # H = −Σ_r s_r (Σ_j p_j log p_j + log s_r), with s_r the probability of rank r's part and p_j within the part
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
        # float32 if the gradient is summed over ranks
        grad_hidden = torch.empty_like(hidden, dtype=hidden.dtype if vocabulary is None else torch.float32)
        # float32, because many chunks are added, and bfloat16 would lose small contributions
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
    """Gathers ``parts [3, M]`` of all ranks into ``[ranks, 3, M]``."""
    gathered = [torch.empty_like(parts) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, parts, group=group)
    return torch.stack(gathered)


class _CompiledHead(torch.autograd.Function):
    """`_Head` in bfloat16 on a CPU, with compiled kernels. The logits of the last chunk (in most batches the only one) are
    kept for the backward pass, which begins with them and overwrites them with their gradient."""

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
            del logits  # frees the memory before the next chunk
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
        logits, ctx.logits = ctx.logits, None  # a second backward pass computes them again
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
    """Divides rows into the fewest chunks of at most ``most`` rows; all but the last have the same size.

    Example: 7 rows, 3 a chunk → 0:3, 3:6, 6:7; 8 rows, 7 a chunk → 0:4, 4:8
    """
    size = -(-count // max(1, -(-count // most)))
    return [slice(start, min(start + size, count)) for start in range(0, count, size or 1)]
