"""Samples one token per row from logits, and returns it with its log-probability.

The only passes over ``[B, V]`` are the softmax and the sum of the draw; the log-probability is read from the same softmax.

A token is drawn by inverting the cumulative sum of the probabilities, with one uniform number per row. The sums are over
blocks of the vocabulary, in one pass over ``[B, V]``; `torch.multinomial` would cost as much as the model. On a GPU torch's
own cumulative sums have no fixed order, and raise with `deterministic=true`: see `running_sums`.

The noise is a pure function of the noise key and the absolute position, nothing else. The generator is SplitMix64 (Steele,
Lea, Flood 2014) used as a hash: the key's fields are folded into one 64-bit stream, and the position picks a number in it.
So a draw does not depend on batching, on the order of arrival, or on other draws.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tandem.api.requests import NoiseKey
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.kernels import Kernels
from tandem.models.hardware import upload

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """Returns the signed 64-bit integer that has the same bits as ``value``."""
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MULTIPLY_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLY_2) & _MASK
    return value ^ (value >> 31)


def stream_of(key: NoiseKey) -> int:
    """Returns the 64-bit stream of a noise key, as a signed int64."""
    state = 0
    for field in key:
        state = _mix((state + _GOLDEN + (field & _MASK)) & _MASK)
    return _signed(state)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts to the right logically; torch's own shift keeps the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def uniform(streams: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draws ``[B]`` float64 in (0, 1) from streams ``[B]`` at absolute positions ``[B]`` (both int64)."""
    # int64 arithmetic wraps around as SplitMix64's uint64 does; only shifts and the last step see the sign
    values = streams + (positions + 1) * _signed(_GOLDEN)
    values = (values ^ _shifted(values, 30)) * _signed(_MULTIPLY_1)
    values = (values ^ _shifted(values, 27)) * _signed(_MULTIPLY_2)
    values = values ^ _shifted(values, 31)
    # the upper 53 bits, all that float64 holds; half a step keeps both 0 and 1 out, whose logarithms are infinite
    return (_shifted(values, 11).double() + 0.5) * 2.0**-53


_BLOCK, _WIDTH = 256, 1024


def draw_tokens(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns the tokens ``[B]`` at which the cumulative sums of ``probabilities [B, V]`` (not normalised) pass the shares
    ``uniforms [B]`` of their totals."""
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
    return tokens.clamp(max=size - 1)  # with NaN, no entry is above the target


def running_sums(values: torch.Tensor) -> torch.Tensor:
    """Returns cumulative sums of ``[…, n]`` along its last dimension: by successive additions on a CPU, elsewhere by log2(n)
    additions of halves; both have a fixed order.

    Both ways, sums of non-negative values never fall, and do not change where a value is 0, so no token of probability 0 is
    drawn. In float64, both differ from the exact sums by at most ``n·2^-53`` of the total. So a draw from 152,000 tokens on
    a GPU differs from one on a CPU only if its uniform number is within 4e-11 of a bound between two tokens.
    """
    if values.is_cpu:
        return values.cumsum(dim=-1)
    size, width = values.shape[-1], 1
    sums = torch.nn.functional.pad(values, (0, (1 << (size - 1).bit_length()) - size))  # a copy
    while width < size:  # each second half holds sums of its own and gets the total of the half before it
        halves = sums.unflatten(-1, (-1, 2, width))
        halves[..., 1, :] += halves[..., 0, -1:]
        width *= 2
    return sums[..., :size].contiguous()


def _first_above(cumulative: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the index ``[B, 1]`` of the first entry above the target. Rounding never selects an entry of probability 0."""
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
    """Draws tokens ``[R]`` from the ``top_k`` most probable ones, or the smallest set whose probability reaches ``top_p``.

    Tokens are ordered by probability, equal ones by number; the uniform number is a place in their cumulative sum. Sums are
    of integer multiples of 2^-60, thus exact, so all methods find the same token. Usually the ``width`` highest
    probabilities are sorted. If the set may be larger, a CPU sorts all probabilities; a GPU, where a check would make the
    host wait, finds the token by the digits of its probability (`_find`).
    ``widest``: the largest ``top_k``, if known.
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
        rows = wide.nonzero().flatten()
        if len(rows):
            picked[rows] = draw_most_probable(probabilities[rows], uniforms[rows], top_p[rows], top_k[rows], width=size)
    return picked


def _largest(probabilities: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the ``width`` highest probabilities of each row, in falling order. NumPy sorts ten times as fast as torch on a
    CPU."""
    if not probabilities.is_cpu:
        return probabilities.topk(width, dim=-1).values
    numbers = probabilities.numpy()
    if width < numbers.shape[-1]:
        numbers = np.partition(numbers, -width, axis=-1)[:, -width:]
    return torch.from_numpy(np.sort(numbers, axis=-1)).flip(-1)


def _draw_by_digits(
    probabilities: torch.Tensor, uniforms: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    """Does the same as `draw_most_probable`, without sorting."""
    keys, weights = (probabilities.view(torch.int32) & 0x7FFFFFFF).long(), _whole(probabilities)  # as integers, same order
    least, above = _find(keys, torch.ones_like(weights), top_k - 1)  # smallest key that top-k keeps
    totals = (weights * (keys > least[:, None])).sum(-1) + (top_k - above) * _weight_of(least)
    limit = _limit(top_p, totals)
    least, above = _find(keys, weights, torch.minimum(limit, totals) - 1)
    each = _weight_of(least).clamp(min=1)
    target = _target(uniforms, above + -((above - torch.minimum(limit, totals)) // each) * each)
    value, above = _find(keys, weights, target)
    return _nth_of(keys == value[:, None], (target - above) // _weight_of(value).clamp(min=1))


def _whole(probabilities: torch.Tensor) -> torch.Tensor:
    """Converts probabilities to multiples of 2^-60, int64."""
    return (probabilities * 2.0**60).long()


def _weight_of(key: torch.Tensor) -> torch.Tensor:
    return _whole(key.int().view(torch.float32))


def _limit(top_p: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Returns the sum of weights that the kept tokens must reach: ``top_p`` of the total, rounded up."""
    return (top_p.double() * totals.double()).ceil().long().clamp(min=1)


def _target(uniforms: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.minimum((uniforms * total.double()).long(), total - 1).clamp(min=0)


def _find(keys: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the key ``[R]`` at which the sum of weights ``[R, V]``, from the highest key down, passes ``target [R]``, and
    the sum of weights above this key."""
    high, above = _find_digit(keys >> 16, weights, target)
    low, above_low = _find_digit(keys & 0xFFFF, weights * (keys >> 16 == high[:, None]), target - above)
    return (high << 16) + low, above + above_low


def _find_digit(digits: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sums = weights.new_zeros(len(weights), 1 << 16).scatter_add_(1, 0xFFFF - digits, weights).cumsum(-1)
    place = torch.searchsorted(sums, target[:, None], right=True).clamp(max=0xFFFF)
    above = sums.gather(1, (place - 1).clamp(min=0)).masked_fill(place == 0, 0)
    return 0xFFFF - place.squeeze(1), above.squeeze(1)


def _nth_of(mask: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Returns the token ``[R]`` with this rank, from 0, among those that ``mask [R, V]`` selects."""
    tokens = torch.searchsorted(mask.cumsum(-1, dtype=torch.int32), rank.int()[:, None], right=True)
    return tokens.squeeze(1).clamp(max=mask.shape[-1] - 1)  # with NaN, the mask may select too few


_NO_TOKEN = -1


@dataclass(frozen=True)
class SamplingRows:
    """Sampling settings of the rows of one step; tensors ``[B]`` unless stated otherwise."""

    temperatures: torch.Tensor
    """float32."""

    uniform_temperature: bool = False
    """True: all temperatures are 1."""

    first_temperatures: torch.Tensor | None = None
    """float32, temperatures of a reply's first token; None: every row uses ``temperatures`` for the first token too."""

    greedy: torch.Tensor | None = None
    """bool; None: no row is greedy."""

    top_p: torch.Tensor | None = None
    """float32; None: no row truncates by top-p or top-k. Set together with ``top_k``."""

    top_k: torch.Tensor | None = None
    """int64; the size of the vocabulary where top-k is off."""

    widest: int | None = None
    """The largest ``top_k`` of the rows that truncate; None if unknown."""

    truncated: torch.Tensor | None = None
    """int64 ``[R]``, the rows that truncate; None: `sample` derives them from ``top_p`` and ``top_k``."""

    minimums: bool = False
    """True if some row has a minimum number of tokens."""


class Forbidden(NamedTuple):
    """Tokens that some rows may not draw."""

    rows: torch.Tensor
    """``[F]``, in ascending order."""

    tokens: torch.Tensor
    """``[F]``: a token that the row may not draw."""

    limited: torch.Tensor
    """The different rows among ``rows``, each once."""


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    rows: SamplingRows,
    forbidden: Forbidden | None = None,
    compiled: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row.

    Args:
        logits: ``[B, V]``, float32 (overwritten) or the dtype of ``compiled``.
        uniforms: ``[B]`` float64 in (0, 1), the noise.
        rows: the sampling settings of each row.
        forbidden: tokens that may not be drawn in this step.
        compiled: kernels that draw if no row truncates; None: torch draws.

    Returns:
        tokens ``[B]`` int64, and log-probabilities ``[B]`` float32 of softmax(logits / temperature), before top-p, top-k and
        forbidden tokens.
    """
    # the kernels do not truncate, which needs sorted probabilities
    if compiled is not None and compiled.dtype == logits.dtype and rows.top_p is None:
        banned = None if forbidden is None else (forbidden.rows, forbidden.tokens)
        return compiled.draw(logits, rows.temperatures, uniforms, rows.greedy, banned)
    logits = logits.float()
    if not rows.uniform_temperature:
        logits.div_(rows.temperatures[:, None])
    whole = torch.empty(0)
    if forbidden is not None:
        # The token is drawn from the others, renormalised; the recorded probability is that of the whole distribution.
        whole = torch.logsumexp(logits[forbidden.limited], dim=-1)
        logits[forbidden.rows, forbidden.tokens] = float("-inf")
    probabilities = torch.softmax(logits, dim=-1)
    # Rows that truncate are drawn here too, and overwritten below: no row's token depends on the settings of other rows.
    tokens = draw_tokens(probabilities, uniforms)
    if rows.top_p is not None and rows.top_k is not None:
        truncated = rows.truncated
        if truncated is None:
            truncated = ((rows.top_p < 1.0) | (rows.top_k < logits.shape[-1])).nonzero().flatten()
        if len(truncated):
            args = probabilities[truncated], uniforms[truncated], rows.top_p[truncated], rows.top_k[truncated]
            tokens[truncated] = draw_most_probable(*args, rows.widest)
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy, logits.argmax(dim=-1), tokens)  # probabilities may be equal by rounding
    logprobs = probabilities.gather(-1, tokens[:, None]).squeeze(-1).log()
    if forbidden is not None:
        limited = forbidden.limited
        # the logit minus the log-sum-exp over all tokens, because the softmax above is over the allowed ones
        logprobs[limited] = logits[limited, tokens[limited]] - whole
    return tokens, logprobs


class SamplingTable:
    """Sampling settings of running sequences: one line per slot, on the host. Methods return tensors on ``device``.

    ``eos``: the model's own stop tokens.
    """

    def __init__(self, count: int, vocab_size: int, eos: Iterable[int], device: torch.device):
        self._vocab_size, self._eos, self._device = vocab_size, tuple(eos), device
        self._temperatures, self._first_temperatures, self._top_p = torch.zeros(3, count)
        self._minimums, self._top_k = torch.zeros(2, count, dtype=torch.long)
        self._greedy = torch.zeros(count, dtype=torch.bool)
        self._stop = torch.zeros(count, max(1, len(self._eos)), dtype=torch.long)

    def set(self, slot: int, gconfig: GenerationConfig) -> None:
        """Stores the settings of the sequence that takes the slot."""
        first = gconfig.first_token_temperature
        self._temperatures[slot], self._top_p[slot] = gconfig.temperature, gconfig.top_p
        self._first_temperatures[slot] = gconfig.temperature if first is None else first
        self._top_k[slot] = min(gconfig.top_k, self._vocab_size) if gconfig.top_k else self._vocab_size
        self._greedy[slot], self._minimums[slot] = gconfig.greedy, gconfig.min_new_tokens
        stop = sorted({*self._eos, *gconfig.stop_token_ids})
        self._stop = widened(self._stop, len(stop), _NO_TOKEN)
        self._stop[slot] = _NO_TOKEN
        self._stop[slot, : len(stop)] = torch.tensor(stop, dtype=torch.long)

    def rows(self, slots: torch.Tensor) -> SamplingRows:
        """Returns the settings of the rows ``slots [B]``, as far as they do not change from step to step."""
        temperatures, top_p, top_k = self._temperatures[slots], self._top_p[slots], self._top_k[slots]
        greedy, first = self._greedy[slots], self._first_temperatures[slots]
        differs = bool((first != temperatures).any())
        truncated = ((top_p < 1.0) | (top_k < self._vocab_size)).nonzero().flatten()
        truncates = len(truncated) > 0
        return SamplingRows(
            self._to_device(temperatures),
            uniform_temperature=not differs and bool((temperatures == 1.0).all()),
            first_temperatures=self._to_device(first) if differs else None,
            greedy=self._to_device(greedy) if bool(greedy.any()) else None,
            top_p=self._to_device(top_p) if truncates else None,
            top_k=self._to_device(top_k) if truncates else None,
            truncated=self._to_device(truncated) if truncates else None,
            widest=int(top_k[truncated].max()) if truncates else None,
            minimums=bool((self._minimums[slots] > 0).any()),
        )

    def forbidden(self, slots: torch.Tensor, counts: torch.Tensor) -> Forbidden | None:
        """Returns the stop tokens of those rows that have drawn too few tokens to end; None if there are none. ``slots
        [B]``: the slot of each row; ``counts [B]``: its number of drawn tokens."""
        stop = self._stop[slots]
        early = (counts < self._minimums[slots])[:, None] & (stop != _NO_TOKEN)
        rows, columns = early.nonzero(as_tuple=True)
        pairs = rows, stop[rows, columns], rows.unique()
        return Forbidden(*map(self._to_device, pairs)) if len(rows) else None

    def stopped(self, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns bool ``[B]``, True where a token of ``tokens [B]`` ends its sequence; on the host."""
        return (tokens[:, None] == self._stop[slots]).any(dim=-1)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return upload(tensor, self._device)


def widened(table: torch.Tensor, columns: int, fill: int) -> torch.Tensor:
    """Returns the table with at least ``columns`` columns, new ones filled with ``fill``."""
    if columns <= table.shape[1]:
        return table
    # doubled, so that growing one column at a time stays linear
    wide = torch.full((len(table), max(columns, 2 * table.shape[1])), fill, dtype=table.dtype, device=table.device)
    wide[:, : table.shape[1]] = table
    return wide
