"""Extras of a request: a grammar, the most probable tokens, the log-probabilities of its prompt.

The rows of such requests are *watched*: each draw costs the host extra work. A batch without such rows skips all of it.

A grammar restricts a completion; llguidance computes which tokens may come next.
"""

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.api.failures import DataFailure
from tandem.api.requests import LLMRequest, LLMResponse, TopTokens
from tandem.engines.inference.kernels import Kernels
from tandem.engines.inference.sampler import Forbidden, SamplingRows, sample
from tandem.models.hardware import Download, upload
from tandem.models.tokenizer import load_tokenizer

MAX_LENGTH = 1 << 18
"""Most characters of a grammar; one of this length compiles in at most half a second."""

WHITE_SPACE = r"( |\n {0,32})?"
"""White space allowed between two tokens of JSON. It is bounded, because small models may otherwise write it endlessly."""


def json_grammar(schema: Mapping[str, Any] | bool) -> str:
    """Returns the grammar of the JSON texts that a JSON schema allows. Raises like `check_grammar`."""
    _library()
    from llguidance import LLMatcher  # noqa: PLC0415 — a library that only grammars need

    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": WHITE_SPACE})
    check_grammar(grammar)
    return grammar


def check_grammar(grammar: str) -> None:
    """Passes if the grammar can be enforced.

    Raises:
        DataFailure: ``bad_grammar``: it cannot be enforced; the message names the part. ``no_llguidance``: that package is
            missing.
    """
    _library()
    from llguidance import LLMatcher  # noqa: PLC0415 — as above

    if len(grammar) > MAX_LENGTH:
        raise DataFailure("bad_grammar", f"it must have at most {MAX_LENGTH} characters, got {len(grammar)}")
    failed, why = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise DataFailure("bad_grammar", f"it cannot be enforced: {' '.join(why)}")


def _library() -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise DataFailure("no_llguidance", "a grammar needs the package llguidance: pip install llguidance")


class Matcher:
    """The state of one completion in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, stops: Sequence[int]):
        self._matcher, self._vocab_size, self._stops = matcher, vocab_size, list(stops)
        self._new: list[int] = []
        self.failure: DataFailure | None = None
        """Set if the completion could not follow the grammar to its end; the response alone would hide this."""

    def take(self, token: int) -> None:
        """Adds the next token of the completion."""
        self._new.append(token)

    def allowed(self) -> torch.Tensor:
        """Returns the tokens that may come next, bool ``[V]``, at least one of them True. After a `failure`, these are the
        tokens that end the completion."""
        new, self._new = self._new, []
        self._matcher.consume_tokens(new)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little")).bool()
        if self._matcher.is_error() or not bool(allowed.any()):
            why = self._matcher.get_error() or "the tokenizer has no token that may come next"
            self.failure = DataFailure("bad_grammar", f"it could not be followed to the end: {why}")
            allowed[self._stops] = True
        return allowed


class Grammars:
    """Makes matchers for one model. The first matcher reads the model's vocabulary."""

    def __init__(self, folder: Path, vocab_size: int, stops: Sequence[int]):
        """``stops``: the tokens that end a completion."""
        self._folder, self.vocab_size, self._stops = folder, vocab_size, list(stops)
        self._vocabulary: Any = None

    def matcher(self, grammar: str) -> Matcher:
        """Returns the matcher of a completion before its first token. Raises like `check_grammar`."""
        check_grammar(grammar)
        from llguidance import LLMatcher  # noqa: PLC0415 — as above
        from llguidance.hf import from_tokenizer  # noqa: PLC0415

        if not self._stops:
            raise DataFailure("bad_grammar", "this model has no token that ends a completion, which a grammar needs")
        if self._vocabulary is None:
            try:
                tokenizer: Any = load_tokenizer(self._folder)
                self._vocabulary = from_tokenizer(tokenizer, n_vocab=self.vocab_size, eos_token=self._stops)
            except ValueError as error:
                raise DataFailure("bad_grammar", f"grammars cannot be used with this model's tokenizer: {error}") from error
        return Matcher(LLMatcher(self._vocabulary, grammar), self.vocab_size, self._stops)


_SCORED = 128
"""Number of prompt tokens whose log-probabilities are computed together; each needs a row of the vocabulary."""


class Extras:
    """The extras of one request, and their results so far."""

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
        """Returns the extras of a request; None if it has none. Raises `DataFailure` as the constructor does."""
        asks = request.grammar or request.top_logprobs or request.scores_prompt
        return cls(request, grammars) if asks else None

    def score(self, states: torch.Tensor, done: int, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Records the log-probabilities of the prompt tokens that follow those of ``states [n, hidden]``. ``done``: number
        of prompt tokens computed so far, those of ``states`` included. ``logits`` maps states to ``[n, V]``."""
        start = done - len(states)
        del self._scores[start:]  # from before an update, after which the prompt is computed again
        following = torch.tensor(self._request.input_ids[start + 1 : done + 1], device=states.device)
        for chunk, tokens in zip(states[: len(following)].split(_SCORED), following.split(_SCORED), strict=True):
            logprobs = torch.log_softmax(logits(chunk).float() / self._request.gconfig.temperature, dim=-1)  # [n, V]
            chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1).tolist()
            self._scores += zip(chosen, _pairs(*logprobs.topk(self.most)), strict=True)

    def drew(self, token: int, top: TopTokens) -> None:
        """Records a drawn token and its most probable alternatives ``top``, at least as many as the request asks for."""
        if self.matcher is not None:
            self.matcher.take(token)
        if self.most:
            self.top.append(top[: self.most])

    def result(self, response: LLMResponse) -> LLMResponse | DataFailure:
        """Returns the response with the results of its extras, or the reason why its grammar could not be completed."""
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
        """Returns the watched rows of a batch, from the extras of each row; None if no row is watched."""
        by_row = enumerate(extras)
        rows = {row: extra for row, extra in by_row if extra is not None and (extra.most or extra.matcher is not None)}
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
        temperatures = rows.temperatures[self._places, None]
        whole = torch.log_softmax(logits[self._places].float() / temperatures, dim=-1)  # [W, V]
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
    """Returns the (token, log-probability) pairs of each row of ``[n, K]``."""
    return [tuple(zip(*both, strict=True)) for both in zip(tokens.tolist(), logprobs.tolist(), strict=True)]
