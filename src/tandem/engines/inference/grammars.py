"""Grammars that a completion must fit: which tokens may come next is llguidance's to say."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.api.failures import DataFailure
from tandem.models.tokenizer import load_tokenizer

MAX_LENGTH = 1 << 18
"""Longest grammar; one of this length is compiled in half a second at most."""

WHITE_SPACE = r"( |\n {0,32})?"
"""Between two marks of JSON: a small model that may write any amount never comes to an end."""


def json_grammar(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of the JSON texts that a JSON schema allows. Raises as `check_grammar`."""
    _library()
    from llguidance import LLMatcher  # noqa: PLC0415 — a library that only grammars need

    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": WHITE_SPACE})
    check_grammar(grammar)
    return grammar


def check_grammar(grammar: str) -> None:
    """Passes a grammar that can be enforced.

    Raises:
        DataFailure: ``bad_grammar``: it cannot be, with the part that cannot; ``no_llguidance``: that package is missing.
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
    """The place of one completion in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, stops: Sequence[int]):
        self._matcher, self._vocab_size, self._stops = matcher, vocab_size, list(stops)
        self._new: list[int] = []
        self.failure: DataFailure | None = None
        """The grammar could not be followed to the end, which the response would hide."""

    def take(self, token: int) -> None:
        """The next token of the completion."""
        self._new.append(token)

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next: bool ``[V]``, at least one. After a `failure` those that end the completion."""
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
    """Makes the matchers of one model; its vocabulary is read when the first is asked for."""

    def __init__(self, folder: Path, vocab_size: int, stops: Sequence[int]):
        """``stops``: the tokens that end a completion."""
        self._folder, self.vocab_size, self._stops = folder, vocab_size, list(stops)
        self._vocabulary: Any = None

    def matcher(self, grammar: str) -> Matcher:
        """A completion's matcher before its first token. Raises as `check_grammar`."""
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
