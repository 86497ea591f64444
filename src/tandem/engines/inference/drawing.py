"""Draws from distributions by inverting their cumulative sums, one uniform number a row.

The sums are taken over blocks of the vocabulary, which is one pass over ``[B, V]``; `torch.multinomial` costs as much as the
model. On a GPU torch's own cumulative sums have no fixed order, and refuse to work with `deterministic=true`: see
`running_sums`.
"""

import numpy as np
import torch

_BLOCK, _WIDTH = 256, 1024


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
    drawn. Both are within ``n·2^-53`` of the whole, in float64, of the exact sums. So a draw from 152,000 tokens is another
    one on a GPU only if its uniform number lies within 4e-11 of a bound between two tokens.
    """
    if values.is_cpu:
        return values.cumsum(dim=-1)
    size, width = values.shape[-1], 1
    sums = torch.nn.functional.pad(values, (0, (1 << (size - 1).bit_length()) - size))  # copied
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
    probabilities: torch.Tensor,
    uniforms: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    widest: int | None = None,
    width: int = _WIDTH,
) -> torch.Tensor:
    """Draws from the ``top_k`` most probable tokens, or the smallest set whose probability reaches ``top_p``; ``[R]``.

    Tokens lie in the order of their probabilities, equal ones in that of their numbers; a uniform number is a place in their
    cumulative sum. All sums are of whole multiples of 2^-60, so they are exact, and every way finds the same token: the
    ``width`` highest probabilities are sorted. If the set may be wider, a CPU sorts everything; a GPU, where asking would
    make the host wait, finds the token by the digits of its probability (`_find`).
    ``widest``: the largest of ``top_k``, if it is known.
    """
    size = probabilities.shape[-1]
    widest = min(size if widest is None else widest, size)
    if width < widest and not probabilities.is_cpu:
        return _draw_by_digits(probabilities, uniforms, top_p, top_k)
    ordered = _largest(probabilities, min(width, size))
    weights = _whole(ordered).masked_fill(torch.arange(ordered.shape[-1], device=ordered.device) >= top_k[:, None], 0)
    # as everywhere, top-p applies to what top-k has left, normalised
    totals = weights.sum(-1)
    if widest >= size:
        totals = torch.where(top_k < size, totals, _whole(probabilities).sum(-1))
    sums = weights.cumsum(-1)
    kept = sums - weights < _limit(top_p, totals)[:, None]
    sums = (weights * kept).cumsum(-1)
    place = torch.searchsorted(sums, _target(uniforms, sums[:, -1])[:, None], right=True)
    value = ordered.gather(-1, place.clamp(max=sums.shape[-1] - 1))
    picked = _nth_of(probabilities == value, place.squeeze(-1) - (ordered > value).sum(-1))
    if width < widest:
        wide = (top_k > width) & (kept[:, -1] | (top_k < size))
        rest = wide.nonzero().flatten()
        if len(rest):
            picked[rest] = draw_most_probable(probabilities[rest], uniforms[rest], top_p[rest], top_k[rest], width=size)
    return picked


def _largest(probabilities: torch.Tensor, width: int) -> torch.Tensor:
    """The ``width`` highest of each row, in falling order. NumPy sorts ten times as fast as torch on a CPU."""
    if not probabilities.is_cpu:
        return probabilities.topk(width, dim=-1).values
    numbers = probabilities.numpy()
    if width < numbers.shape[-1]:
        numbers = np.partition(numbers, -width, axis=-1)[:, -width:]
    return torch.from_numpy(np.sort(numbers, axis=-1)).flip(-1)


def _draw_by_digits(
    probabilities: torch.Tensor, uniforms: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    """`draw_most_probable` without an order of the tokens."""
    keys, weights = (probabilities.view(torch.int32) & 0x7FFFFFFF).long(), _whole(probabilities)  # numbers in one order
    least, above = _find(keys, torch.ones_like(weights), top_k - 1)  # of what top-k leaves
    totals = (weights * (keys > least[:, None])).sum(-1) + (top_k - above) * _weight_of(least)
    limit = _limit(top_p, totals)
    least, above = _find(keys, weights, torch.minimum(limit, totals) - 1)
    each = _weight_of(least).clamp(min=1)
    target = _target(uniforms, above + -((above - torch.minimum(limit, totals)) // each) * each)
    value, above = _find(keys, weights, target)
    return _nth_of(keys == value[:, None], (target - above) // _weight_of(value).clamp(min=1))


def _whole(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities as multiples of 2^-60, int64."""
    return (probabilities * 2.0**60).long()


def _weight_of(key: torch.Tensor) -> torch.Tensor:
    return _whole(key.int().view(torch.float32))


def _limit(top_p: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """The sum that tokens must reach together."""
    return (top_p.double() * totals.double()).ceil().long().clamp(min=1)


def _target(uniforms: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.minimum((uniforms * total.double()).long(), total - 1).clamp(min=0)


def _find(keys: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The key ``[R]`` at which the sum of weights ``[R, V]``, from the highest key down, passes ``target [R]``, and the sum
    above this key."""
    high, above = _find_digit(keys >> 16, weights, target)
    low, more = _find_digit(keys & 0xFFFF, weights * (keys >> 16 == high[:, None]), target - above)
    return (high << 16) + low, above + more


def _find_digit(digits: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sums = weights.new_zeros(len(weights), 1 << 16).scatter_add_(1, 0xFFFF - digits, weights).cumsum(-1)
    place = torch.searchsorted(sums, target[:, None], right=True).clamp(max=0xFFFF)
    above = sums.gather(1, (place - 1).clamp(min=0)).masked_fill(place == 0, 0)
    return 0xFFFF - place.squeeze(1), above.squeeze(1)


def _nth_of(mask: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """The token ``[R]`` that is the ``rank``-th, from 0, of those in ``mask [R, V]``."""
    found = torch.searchsorted(mask.cumsum(-1, dtype=torch.int32), rank.int()[:, None], right=True)
    return found.squeeze(1).clamp(max=mask.shape[-1] - 1)  # where nothing is a number, there is none
