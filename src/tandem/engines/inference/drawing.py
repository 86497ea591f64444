"""Draws from distributions by inverting their cumulative sums, one uniform number a row.

The sums are taken over blocks of the vocabulary, which is one pass over ``[B, V]``; `torch.multinomial` costs as much as the
model. On a GPU torch's own cumulative sums have no fixed order, and refuse to work with `deterministic=true`: see
`running_sums`.
"""

import torch

_BLOCK = 256


def draw_tokens(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative sum of ``[B, V]`` (not normalised) passes ``uniforms`` of the whole; ``[B]``."""
    size = probabilities.shape[-1]
    if size % _BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, _BLOCK - size % _BLOCK))
    blocks = probabilities.unflatten(-1, (-1, _BLOCK))  # [B, V / 256, 256]
    sums = running_sums(blocks.sum(dim=-1, dtype=torch.float32).double())  # [B, V / 256]
    targets = uniforms[:, None] * sums[:, -1:]
    block = _first_above(sums, targets)  # [B, 1]
    before = sums.gather(-1, (block - 1).clamp(min=0)).masked_fill(block == 0, 0.0)
    inside = running_sums(blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK)).squeeze(1).double())
    tokens = (block * _BLOCK + _first_above(inside, targets - before)).squeeze(-1)
    return tokens.clamp(max=size - 1)  # where nothing is a number, nothing is above anything


def running_sums(values: torch.Tensor) -> torch.Tensor:
    """Cumulative sums of ``[…, n]`` along its last dimension: one addition after another on a CPU, elsewhere by log2(n)
    additions of halves, each in a fixed order.

    Either way, sums of values that are not negative never fall, and stay where a value is 0, so no token of probability 0 is
    drawn. Both are within ``n · 2^-53`` of the whole, in float64, of the exact sums. So a draw from 152,000 tokens is
    another one on a GPU only if its uniform number lies within 4e-11 of a bound between two tokens.
    """
    if values.is_cpu:
        return values.cumsum(dim=-1)
    size, width = values.shape[-1], 1
    sums = torch.nn.functional.pad(values, (0, (1 << (size - 1).bit_length()) - size))  # always a copy
    while width < size:  # each second half has its own sums already, and lacks those of the half before it
        halves = sums.unflatten(-1, (-1, 2, width))
        halves[..., 1, :] += halves[..., 0, -1:]
        width *= 2
    return sums[..., :size].contiguous()


def _first_above(cumulative: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Index ``[B, 1]`` of the first entry above the target; rounding never leads to an entry without probability."""
    last = cumulative[:, -1:]
    targets = torch.minimum(targets.clamp(min=0.0), torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(cumulative, targets, right=True).clamp(max=cumulative.shape[-1] - 1)


def draw_most_probable(
    probabilities: torch.Tensor, uniforms: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, width: int = 1024
) -> torch.Tensor:
    """Draws from the ``top_k`` most probable tokens, or the smallest set whose probability reaches ``top_p``; ``[R]``.

    On a CPU only the ``width`` most probable tokens are sorted first; the rows whose set is wider are drawn again from a
    full sort. On a GPU, which sorts quickly, the host would have to ask it whether there are any.
    """
    size = probabilities.shape[-1]
    width = min(width, size) if probabilities.device.type == "cpu" else size
    ordered, tokens = probabilities.topk(width, dim=-1)
    ranks = torch.arange(width, device=ordered.device)
    ordered = ordered.double().masked_fill(ranks >= top_k[:, None], 0.0)
    # As everywhere, top-p applies to what top-k has left, normalised.
    totals = torch.where(top_k < size, ordered.sum(dim=-1), probabilities.double().sum(dim=-1))[:, None]
    cumulative = running_sums(ordered)
    kept = (cumulative - ordered) < top_p[:, None].double() * totals
    cumulative = running_sums(ordered * kept)
    picks = _first_above(cumulative, uniforms[:, None] * cumulative[:, -1:])
    picked = tokens.gather(-1, picks).squeeze(-1)
    wide = kept[:, -1] & (top_k > width)
    if width < size and bool(wide.any()):
        rest = wide.nonzero().flatten()
        picked[rest] = draw_most_probable(probabilities[rest], uniforms[rest], top_p[rest], top_k[rest], width=size)
    return picked
