"""Extra wishes of a request: a grammar, the most probable tokens, the log-probabilities of its prompt.

The rows of such requests are *watched*: each draw costs the host extra work. A batch without such rows skips all of it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from tandem.api.failures import DataFailure
from tandem.api.requests import LLMRequest, LLMResponse, TopTokens
from tandem.engines.inference.grammars import Grammars
from tandem.engines.inference.kernels import Kernels
from tandem.engines.inference.sampler import Forbidden, SamplingRows, sample
from tandem.models.upload import Download, upload

_SCORED = 128
"""Number of prompt tokens whose log-probabilities are computed together; each needs a row of the vocabulary."""


class Extras:
    """The extra wishes of one request, and the results so far."""

    def __init__(self, request: LLMRequest, grammars: Grammars):
        """Raises `DataFailure` for a grammar that cannot be enforced."""
        self._request = request
        self.most = min(request.top_logprobs, grammars.vocab_size)
        """Number of most probable tokens that are reported for each position."""

        self.matcher = grammars.matcher(request.grammar) if request.grammar else None
        """State of the grammar; None: any token may be drawn."""

        self.top: list[TopTokens] = []
        self._scores: list[tuple[float, TopTokens]] = []
        """(log-probability, most probable tokens) of each computed prompt token but the first."""

    @classmethod
    def of(cls, request: LLMRequest, grammars: Grammars) -> "Extras | None":
        """The extras of a request; None if it wants only tokens. Raises `DataFailure` as the constructor does."""
        asks = request.grammar or request.top_logprobs or request.scores_prompt
        return cls(request, grammars) if asks else None

    def score(self, states: torch.Tensor, done: int, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Records the log-probabilities of the prompt tokens that follow those of ``states [n, hidden]``; ``done`` prompt
        tokens are computed now. ``logits`` maps states to ``[n, V]``."""
        start = done - len(states)
        del self._scores[start:]  # the weights changed on the way, and it began again
        following = torch.tensor(self._request.input_ids[start + 1 : done + 1], device=states.device)
        for some, tokens in zip(states[: len(following)].split(_SCORED), following.split(_SCORED), strict=True):
            logprobs = torch.log_softmax(logits(some).float() / self._request.gconfig.temperature, dim=-1)  # [n, V]
            chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1).tolist()
            self._scores += zip(chosen, _pairs(*logprobs.topk(self.most)), strict=True)

    def drew(self, token: int, top: TopTokens) -> None:
        """Records a drawn token, and at least as many most probable tokens at its position as the request wants."""
        if self.matcher is not None:
            self.matcher.take(token)
        if self.most:
            self.top.append(top[: self.most])

    def result(self, response: LLMResponse) -> LLMResponse | DataFailure:
        """The response with the results of its extras; or the reason why its grammar could not be completed."""
        if self.matcher is not None and self.matcher.failure is not None:
            return self.matcher.failure
        logprobs, top = zip(*self._scores, strict=True) if self._scores else ((), ())
        return replace(response, top=tuple(self.top), prompt_logprobs=logprobs, prompt_top=top if self.most else ())


class Watched:
    """The rows of a batch whose draws have extras."""

    def __init__(self, rows: dict[int, Extras], device: torch.device):
        self.rows = rows
        self.needs_tokens = any(extras.matcher is not None for extras in rows.values())
        """True if the host must read all tokens before the next draw, because a grammar's next choice depends on them."""

        self._places, self._device = upload(torch.tensor(list(rows)), device), device
        self._most = max(extras.most for extras in rows.values())

    @classmethod
    def among(cls, extras: Iterable[Extras | None], device: torch.device) -> "Watched | None":
        """The watched rows of a batch, from the extras of each row; None if no row is watched."""
        rows = {row: one for row, one in enumerate(extras) if one is not None and (one.most or one.matcher is not None)}
        return cls(rows, device) if rows else None

    def sample(
        self,
        logits: torch.Tensor,
        uniforms: torch.Tensor,
        rows: SamplingRows,
        forbidden: Forbidden | None,
        compiled: Kernels | None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], "TopRows"]:
        """Draws within the grammars (see `sampler.sample`). Log-probabilities stay those of the whole distribution."""
        heat = rows.temperatures[self._places, None]
        whole = torch.log_softmax(logits[self._places].float() / heat, dim=-1)  # [W, V]
        for row, extras in self.rows.items():
            if extras.matcher is not None:
                logits[row].masked_fill_(upload(~extras.matcher.allowed(), self._device), float("-inf"))
        tokens, logprobs = sample(logits, uniforms, rows, forbidden, compiled)
        logprobs[self._places] = whole.gather(-1, tokens[self._places, None]).squeeze(-1)
        return (tokens, logprobs), TopRows(self.rows, *map(Download, whole.topk(self._most)))


class TopRows(NamedTuple):
    """The most probable tokens of the watched rows of a draw, on their way to the host."""

    rows: dict[int, Extras]
    logprobs: Download
    tokens: Download
    """Token ids ``[W, K]``, beside ``logprobs [W, K]``."""

    def record(self, drawn: torch.Tensor) -> None:
        """Gives each watched request its drawn token from ``drawn [B]``, which is on the host."""
        pairs = _pairs(self.logprobs.wait(), self.tokens.wait())
        for (row, extras), top in zip(self.rows.items(), pairs, strict=True):
            extras.drew(int(drawn[row]), top)


def _pairs(logprobs: torch.Tensor, tokens: torch.Tensor) -> list[TopTokens]:
    """(token, log-probability) pairs of each row of ``[n, K]``."""
    return [tuple(zip(*both, strict=True)) for both in zip(tokens.tolist(), logprobs.tolist(), strict=True)]
