"""From logits to one token a row and its log-probability.

The only passes over ``[B, V]`` are the softmax and the sum of the draw; the log-probability is read from the same softmax.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tandem.engines.inference.drawing import draw_most_probable, draw_tokens
from tandem.engines.inference.kernels import Kernels


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
        logprobs[limited] = logits[limited, tokens[limited]] - whole
    return tokens, logprobs
