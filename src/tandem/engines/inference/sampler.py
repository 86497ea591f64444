"""From logits to one token a row and its log-probability.

Sampling inverts the cumulative distribution by sums over blocks of the vocabulary, so that the only passes over ``[B, V]``
are the softmax and one sum; the log-probability is read from the same softmax. `torch.multinomial` costs as much as the
model.
"""

import torch

from tandem.engines.inference.sampling_rows import Forbidden, SamplingRows

_BLOCK = 256


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    rows: SamplingRows,
    forbidden: Forbidden | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token a row.

    Args:
        logits: ``[B, V]`` float32; overwritten.
        uniforms: ``[B]`` float64 in (0, 1), the noise.
        rows: how each row samples.
        forbidden: what may not be drawn now.

    Returns:
        tokens ``[B]`` int64, and log-probabilities ``[B]`` float32 of softmax(logits / temperature), before top-p, top-k and
        forbidden tokens.
    """
    if not rows.uniform_temperature:
        logits.div_(rows.temperatures[:, None])
    whole = torch.empty(0)
    if forbidden is not None:
        # Drawn from the rest, normalised anew; the probability that is recorded is that of the whole distribution.
        whole = torch.logsumexp(logits[forbidden.limited], dim=-1)
        logits[forbidden.rows, forbidden.tokens] = float("-inf")
    probabilities = torch.softmax(logits, dim=-1)
    tokens = _inverse_cdf(probabilities, uniforms)
    if rows.top_p is not None and rows.top_k is not None:
        truncated = rows.truncated
        if truncated is None:
            truncated = ((rows.top_p < 1.0) | (rows.top_k < logits.shape[-1])).nonzero().flatten()
        if len(truncated):
            args = probabilities[truncated], uniforms[truncated], rows.top_p[truncated], rows.top_k[truncated]
            tokens[truncated] = _truncated(*args)
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy, logits.argmax(dim=-1), tokens)  # logits: equal probabilities may hide a difference
    logprobs = probabilities.gather(-1, tokens[:, None]).squeeze(-1).log()
    if forbidden is not None:
        limited = forbidden.limited
        logprobs[limited] = logits[limited, tokens[limited]] - whole
    return tokens, logprobs


def _inverse_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative sum of ``[B, V]`` (not normalised) passes ``uniforms`` of the whole; ``[B]``."""
    size = probabilities.shape[-1]
    if size % _BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, _BLOCK - size % _BLOCK))
    blocks = probabilities.unflatten(-1, (-1, _BLOCK))  # [B, V / 256, 256]
    sums = blocks.sum(dim=-1, dtype=torch.float32).double().cumsum(dim=-1)  # [B, V / 256]
    targets = uniforms[:, None] * sums[:, -1:]
    block = _first_above(sums, targets)  # [B, 1]
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK)).squeeze(1).double().cumsum(dim=-1)
    tokens = (block * _BLOCK + _first_above(inside, targets - before)).squeeze(-1)
    return tokens.clamp(max=size - 1)  # where nothing is a number, nothing is above anything


def _first_above(cumulative: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Index ``[B, 1]`` of the first entry above the target; rounding never leads to an entry without probability."""
    last = cumulative[:, -1:]
    targets = torch.minimum(targets.clamp(min=0.0), torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(cumulative, targets, right=True).clamp(max=cumulative.shape[-1] - 1)


def _truncated(
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
    cumulative = ordered.cumsum(dim=-1)
    kept = (cumulative - ordered) < top_p[:, None].double() * totals
    cumulative = (ordered * kept).cumsum(dim=-1)
    picks = _first_above(cumulative, uniforms[:, None] * cumulative[:, -1:])
    drawn = tokens.gather(-1, picks).squeeze(-1)
    wide = kept[:, -1] & (top_k > width)
    if width < size and bool(wide.any()):
        rest = wide.nonzero().flatten()
        drawn[rest] = _truncated(probabilities[rest], uniforms[rest], top_p[rest], top_k[rest], width=size)
    return drawn
