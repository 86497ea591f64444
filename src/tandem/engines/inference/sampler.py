"""From logits to one token a row and its log-probability.

The only passes over ``[B, V]`` are the softmax and the sum of the draw; the log-probability is read from the same softmax.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tandem.config.generation import GenerationConfig
from tandem.engines.inference.drawing import draw_most_probable, draw_tokens
from tandem.engines.inference.kernels import Kernels
from tandem.models.upload import upload

_NO_TOKEN = -1


@dataclass(frozen=True)
class SamplingRows:
    """The sampler's knowledge about the rows of one step; ``[B]`` unless said otherwise."""

    temperatures: torch.Tensor
    """float32."""

    uniform_temperature: bool = False
    """True: all temperatures are 1."""

    first_temperatures: torch.Tensor | None = None
    """float32, those of a reply's first token; None: no row has another one for it."""

    greedy: torch.Tensor | None = None
    """bool; None: no row is greedy."""

    top_p: torch.Tensor | None = None
    """float32; None: no row truncates by top-p or top-k. With it ``top_k`` is set, too."""

    top_k: torch.Tensor | None = None
    """int64, the vocabulary's size where it is off."""

    widest: int | None = None
    """The largest ``top_k`` of the rows that truncate, if it is known."""

    truncated: torch.Tensor | None = None
    """int64 ``[R]``, the rows that truncate; None: all that do are looked for."""

    minimums: bool = False
    """True if some row has a least number of tokens."""


class Forbidden(NamedTuple):
    """Tokens that some rows may not draw."""

    rows: torch.Tensor
    """``[F]``, in ascending order."""

    tokens: torch.Tensor
    """``[F]``: one of those that the row may not draw."""

    limited: torch.Tensor
    """The rows, each once."""


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    rows: SamplingRows,
    forbidden: Forbidden | None = None,
    compiled: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token a row.

    Args:
        logits: ``[B, V]``, float32 (overwritten), or what ``compiled`` takes.
        uniforms: ``[B]`` float64 in (0, 1), the noise.
        rows: how each row samples.
        forbidden: what may not be drawn now.
        compiled: kernels that draw where no row truncates; None: torch does.

    Returns:
        tokens ``[B]`` int64, and log-probabilities ``[B]`` float32 of softmax(logits / temperature), before top-p, top-k and
        forbidden tokens.
    """
    # the kernels know no truncation, which needs the probabilities sorted
    if compiled is not None and compiled.dtype == logits.dtype and rows.top_p is None:
        banned = None if forbidden is None else (forbidden.rows, forbidden.tokens)
        return compiled.draw(logits, rows.temperatures, uniforms, rows.greedy, banned)
    logits = logits.float()
    if not rows.uniform_temperature:
        logits.div_(rows.temperatures[:, None])
    whole = torch.empty(0)
    if forbidden is not None:
        # Drawn from the rest, normalised anew; the probability that is recorded is that of the whole distribution.
        whole = torch.logsumexp(logits[forbidden.limited], dim=-1)
        logits[forbidden.rows, forbidden.tokens] = float("-inf")
    probabilities = torch.softmax(logits, dim=-1)
    # One uniform for a row, whatever truncates: a row's token then does not depend on the settings of its neighbours.
    tokens = draw_tokens(probabilities, uniforms)
    if rows.top_p is not None and rows.top_k is not None:
        truncated = rows.truncated
        if truncated is None:
            truncated = ((rows.top_p < 1.0) | (rows.top_k < logits.shape[-1])).nonzero().flatten()
        if len(truncated):
            args = probabilities[truncated], uniforms[truncated], rows.top_p[truncated], rows.top_k[truncated]
            tokens[truncated] = draw_most_probable(*args, rows.widest)
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy, logits.argmax(dim=-1), tokens)  # logits: equal probabilities may hide a difference
    logprobs = probabilities.gather(-1, tokens[:, None]).squeeze(-1).log()
    if forbidden is not None:
        limited = forbidden.limited
        # the logit less the sum over all tokens, because the softmax above is over the allowed ones
        logprobs[limited] = logits[limited, tokens[limited]] - whole
    return tokens, logprobs


class SamplingTable:
    """Settings of running sequences: a line for each of ``count`` slots, on the host; what is asked for goes to ``device``.

    ``eos``: the model's own stop tokens.
    """

    def __init__(self, count: int, vocab_size: int, eos: Iterable[int], device: torch.device):
        self._vocab_size, self._eos, self._device = vocab_size, tuple(eos), device
        self._temperatures, self._first_temperatures, self._top_p = torch.zeros(3, count)
        self._minimums, self._top_k = torch.zeros(2, count, dtype=torch.long)
        self._greedy = torch.zeros(count, dtype=torch.bool)
        self._stop = torch.zeros(count, max(1, len(self._eos)), dtype=torch.long)

    def set(self, slot: int, gconfig: GenerationConfig) -> None:
        """A sequence takes the slot."""
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
        """The sampling of the rows ``slots [B]``, without the facts that change from step to step."""
        temperatures, top_p, top_k = self._temperatures[slots], self._top_p[slots], self._top_k[slots]
        greedy, first = self._greedy[slots], self._first_temperatures[slots]
        differs = bool((first != temperatures).any())
        truncated = ((top_p < 1.0) | (top_k < self._vocab_size)).nonzero().flatten()
        truncates = len(truncated) > 0
        return SamplingRows(
            self._there(temperatures),
            uniform_temperature=not differs and bool((temperatures == 1.0).all()),
            first_temperatures=self._there(first) if differs else None,
            greedy=self._there(greedy) if bool(greedy.any()) else None,
            top_p=self._there(top_p) if truncates else None,
            top_k=self._there(top_k) if truncates else None,
            truncated=self._there(truncated) if truncates else None,
            widest=int(top_k[truncated].max()) if truncates else None,
            minimums=bool((self._minimums[slots] > 0).any()),
        )

    def forbidden(self, slots: torch.Tensor, counts: torch.Tensor) -> Forbidden | None:
        """The stop tokens of the rows ``slots [B]`` that may not end yet, having drawn ``counts [B]`` tokens."""
        stop = self._stop[slots]
        early = (counts < self._minimums[slots])[:, None] & (stop != _NO_TOKEN)
        rows, columns = early.nonzero(as_tuple=True)
        pairs = rows, stop[rows, columns], rows.unique()
        return Forbidden(*map(self._there, pairs)) if len(rows) else None

    def stopped(self, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """True where one of ``tokens [B]`` ends its sequence; bool ``[B]``."""
        return (tokens[:, None] == self._stop[slots]).any(dim=-1)

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return upload(tensor, self._device)


def widened(table: torch.Tensor, columns: int, fill: int) -> torch.Tensor:
    """The table with at least so many columns."""
    if columns <= table.shape[1]:
        return table
    # doubled, so that growing one column at a time stays linear
    wide = torch.full((len(table), max(columns, 2 * table.shape[1])), fill, dtype=table.dtype, device=table.device)
    wide[:, : table.shape[1]] = table
    return wide
