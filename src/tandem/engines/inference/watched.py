"""Wishes of a few requests beside their tokens: a grammar, the most probable tokens, the probabilities of their prompt.

The rows of such requests are watched: the host does more for them. A batch without one passes by.
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
"""Tokens of a prompt whose log-probabilities are computed together: a row of the vocabulary for each."""


class Extras:
    """All that one request asks for beside its tokens, and what was found of it so far."""

    def __init__(self, request: LLMRequest, grammars: Grammars):
        """Raises `DataFailure` for a grammar that cannot be enforced."""
        self._request = request
        self.most = min(request.top_logprobs, grammars.vocab_size)
        """So many of the most probable tokens are named at each place."""

        self.matcher = grammars.matcher(request.grammar) if request.grammar else None
        """The rules of its tokens; None: it may draw any."""

        self.top: list[TopTokens] = []
        self._scores: list[tuple[float, TopTokens]] = []
        """For each prompt token that was computed, but the first."""

    @classmethod
    def of(cls, request: LLMRequest, grammars: Grammars) -> "Extras | None":
        """Those of a request; None where it asks for its tokens alone. Raises `DataFailure` as the class does."""
        asks = request.grammar or request.top_logprobs or request.scores_prompt
        return cls(request, grammars) if asks else None

    def score(self, states: torch.Tensor, done: int, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Writes down the log-probabilities of the prompt's tokens behind those whose ``states [n, hidden]`` these are;
        ``done`` of the prompt are computed now. ``logits``: of states, ``[n, V]``."""
        start = done - len(states)
        del self._scores[start:]  # the weights changed on the way, and it began again
        following = torch.tensor(self._request.input_ids[start + 1 : done + 1], device=states.device)
        for some, tokens in zip(states[: len(following)].split(_SCORED), following.split(_SCORED), strict=True):
            logprobs = torch.log_softmax(logits(some).float() / self._request.gconfig.temperature, dim=-1)  # [n, V]
            chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1).tolist()
            self._scores += zip(chosen, _pairs(*logprobs.topk(self.most)), strict=True)

    def drew(self, token: int, top: TopTokens) -> None:
        """Takes a token that was drawn, and the most probable ones in its place, as many as it asks for or more."""
        if self.matcher is not None:
            self.matcher.take(token)
        if self.most:
            self.top.append(top[: self.most])

    def result(self, response: LLMResponse) -> LLMResponse | DataFailure:
        """The response with what was found, or why its grammar could not be followed to the end."""
        if self.matcher is not None and self.matcher.failure is not None:
            return self.matcher.failure
        logprobs, top = zip(*self._scores, strict=True) if self._scores else ((), ())
        return replace(response, top=tuple(self.top), prompt_logprobs=logprobs, prompt_top=top if self.most else ())


class Watched:
    """The rows of a batch whose draws have extras."""

    def __init__(self, rows: dict[int, Extras], device: torch.device):
        self.rows = rows
        self.needs_tokens = any(extras.matcher is not None for extras in rows.values())
        """All tokens must have been read before the next are drawn: what a grammar allows depends on them."""

        self._places, self._device = upload(torch.tensor(list(rows)), device), device
        self._most = max(extras.most for extras in rows.values())

    @classmethod
    def among(cls, extras: Iterable[Extras | None], device: torch.device) -> "Watched | None":
        """``extras``: of each row of the batch. None where no row's draws have any."""
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
        """Draws by the grammars, see `sampler.sample`; log-probabilities stay those of the whole distribution."""
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
    """``[W, K]`` both."""

    def record(self, drawn: torch.Tensor) -> None:
        """Tells the requests what their rows drew: ``drawn [B]``, on the host."""
        pairs = _pairs(self.logprobs.wait(), self.tokens.wait())
        for (row, extras), top in zip(self.rows.items(), pairs, strict=True):
            extras.drew(int(drawn[row]), top)


def _pairs(logprobs: torch.Tensor, tokens: torch.Tensor) -> list[TopTokens]:
    """Pairs of each row of ``[n, K]``."""
    return [tuple(zip(*both, strict=True)) for both in zip(tokens.tolist(), logprobs.tolist(), strict=True)]
