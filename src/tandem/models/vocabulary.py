"""Log-probabilities and entropy where each rank has a part of the vocabulary: no logits are gathered.

Per token three numbers cross: of a rank's part the logarithm of its sum of exponentials, the logit of the target where it
lies there, and the negative entropy within the part.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tandem.models.exchanges import reduce
from tandem.models.logprobs import HeadOutputs, part_of, scaled_logits
from tandem.models.sums import add_to


class Vocabulary(NamedTuple):
    """The tokens of one rank: those from ``start`` on, as many as it has rows of the head."""

    group: dist.ProcessGroup
    start: int


def vocabulary_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | None,
    vocabulary: Vocabulary,
    *,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_tokens: int = 1024,
) -> HeadOutputs:
    """`chunked_logprobs`, ``weight [V / ranks, H]`` being this rank's rows of the head. Collective, backward too.

    All ranks have the same ``hidden [M, H]``, ``targets [M]`` and ``temperature [M]``, and get the same ``[M]``; the
    gradient of ``hidden`` is that of the whole vocabulary.
    """
    settings = (vocabulary, softcap, entropy, chunk_tokens)
    logprobs, entropies = _ShardedHead.apply(hidden, weight, targets, temperature, settings)
    return HeadOutputs(logprobs, entropies if entropy else None)


def _gathered(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``parts [3, M]`` of all ranks, ``[ranks, 3, M]``."""
    found = [torch.empty_like(parts) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, parts, group=group)
    return torch.stack(found)


def _here(targets: torch.Tensor, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets in this rank's part, ``[M]`` bool, and their places there; 0 for the others."""
    at = targets - start
    here = (at >= 0) & (at < count)
    return here, at.where(here, 0)


class _ShardedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor | None,
        settings: tuple[Vocabulary, float | None, bool, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vocabulary, softcap, entropy, chunk_tokens = ctx.settings = settings
        here, at = _here(targets, vocabulary.start, len(weight))
        own = hidden.new_zeros(3, len(hidden), dtype=torch.float32)
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits, _ = scaled_logits(hidden[rows], weight, part_of(temperature, rows), softcap)
            own[0, rows] = total = logits.logsumexp(-1)
            own[1, rows] = logits.gather(1, at[rows, None])[:, 0].where(here[rows], 0)
            if entropy:
                logprobs = logits.sub_(total[:, None])
                own[2, rows] = torch.linalg.vecdot(logprobs.exp(), logprobs)
        parts = _gathered(own, vocabulary.group) if len(hidden) else own[None]
        totals = parts[:, 0].logsumexp(0)  # [M]
        shares = parts[:, 0] - totals  # logarithm of each part's probability
        entropies = -(shares.exp() * (parts[:, 2] + shares)).sum(0) if entropy else totals.new_zeros(0)
        ctx.save_for_backward(hidden, weight, targets, temperature, totals, entropies)
        return parts[:, 1].sum(0) - totals, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, temperature, totals, entropies = ctx.saved_tensors
        vocabulary, softcap, entropy, chunk_tokens = ctx.settings
        here, at = _here(targets, vocabulary.start, len(weight))
        # float32: a sum over the ranks, and over the chunks
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits, saturation = scaled_logits(hidden[rows], weight, part_of(temperature, rows), softcap)
            grad = grad_logprobs[rows, None].float()
            logprobs = logits.sub_(totals[rows, None])
            probabilities = logprobs.exp()
            if entropy:
                # dH/dz_j = -p_j (log p_j + H), d log p_y / dz_j = [j = y] - p_j
                slope = logprobs.add_(entropies[rows, None]).mul_(grad_entropy[rows, None]).add_(grad)
                grad_logits = slope.mul_(probabilities).neg_()
            else:
                grad_logits = probabilities.mul_(-grad)
            grad_logits.scatter_add_(1, at[rows, None], grad * here[rows, None])
            if temperature is not None:
                grad_logits.div_(temperature[rows, None])
            if saturation is not None:
                grad_logits.mul_(1 - saturation.square_())
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            add_to(grad_weight, grad_logits.T @ hidden[rows])
        if len(hidden):
            grad_hidden = reduce(grad_hidden, vocabulary.group)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None
