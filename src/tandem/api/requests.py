"""Requests to an inference engine and its responses: tokens, never text."""

import enum
import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from tandem.api.media import prompt_key
from tandem.config.generation import GenerationConfig


class StopReason(enum.IntEnum):
    """Why a completion ended. An integer, because it is a field of the batch."""

    STOP = 0
    """A stop token or stop string."""

    LENGTH = 1
    """`max_new_tokens`, or the model's context, was reached."""

    CANCELLED = 2
    """Nobody wants the rest: the episode was cancelled, or the request's deadline passed."""


class NoiseKey(NamedTuple):
    """Names the noise of one trajectory: with the token's position it determines every draw.

    So what is sampled does not depend on batching, arrival or retries of others. ``attempt`` grows when an
    episode is run again.
    """

    seed: int
    epoch: int = 0
    group: int = 0
    sample: int = 0
    trajectory: int = 0
    attempt: int = 0


TopTokens = tuple[tuple[int, float], ...]
"""The most probable tokens at one place with their log-probabilities, the most probable first."""


@dataclass(frozen=True)
class LLMRequest:
    """One completion to make.

    Example: ``LLMRequest([1, 4093, 198], GenerationConfig(max_new_tokens=16), noise_key=NoiseKey(seed=0, sample=3))``
    """

    input_ids: tuple[int, ...]
    """Prompt tokens, at least one; a list is taken too."""

    gconfig: GenerationConfig
    """Sampling; ``n_samples`` is not read here: one request is one completion."""

    noise_key: NoiseKey | None = None
    """The key of its sampling noise; if None, the episode that the request belongs to fills it in."""

    affinity: str | None = None
    """Requests with the same affinity (one group, one chat) share prefixes and go to the same server."""

    deadline_s: float | None = None
    """Seconds from submission after which the request ends as ``cancelled`` with what it has; None waits."""

    model: str | None = None
    """Another model than the engine's own; refused, for no engine serves several yet."""

    media: tuple[int, ...] = ()
    """The media number of each token, see `tandem.api.media`; empty where the prompt has none."""

    needs_logprobs: bool = True
    """False: nobody reads the log-probabilities (an evaluation), so they may be those of the distribution after top-p, top-k
    and suppressed stop tokens, where a server knows no others."""

    grammar: str = ""
    """Rules that the completion must fit: a grammar of llguidance. Tokens that break them cannot be drawn; log-probabilities
    stay those of the whole distribution. Empty: none. The embedded engine alone takes one."""

    top_logprobs: int = 0
    """So many of the most probable tokens are named at each place. The embedded engine alone does that."""

    scores_prompt: bool = False
    """The response has the log-probabilities of the prompt's tokens too; ``gconfig.max_new_tokens`` may be 0 then. The
    embedded engine alone does that."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", tuple(self.input_ids))  # engines look prompts up by their tokens
        object.__setattr__(self, "media", tuple(self.media) if any(self.media) else ())

    @cached_property
    def key(self) -> tuple[int, ...]:
        """The identity of its prompt: whatever compares prompts compares this, and never the tokens."""
        return prompt_key(self.input_ids, self.media)


class RequestTiming(NamedTuple):
    """Seconds of one request, each from the moment when the engine got it; NaN where the engine does not know."""

    queued_s: float
    """Until it left the queue."""

    first_token_s: float
    """Until its prompt was computed and its first token could be drawn."""

    total_s: float
    """Until it ended."""


class RequestClock:
    """Times a request inside an engine, from now on."""

    def __init__(self) -> None:
        self._marks = {"came": time.monotonic()}

    def mark(self, event: Literal["admitted", "began"]) -> None:
        """It left the queue, or its first token is about to be drawn. The first time counts."""
        self._marks.setdefault(event, time.monotonic())

    def timing(self) -> RequestTiming:
        """Its times, now that it has ended."""
        came = self._marks["came"]
        queued_s, first_token_s = (self._marks.get(event, math.nan) - came for event in ("admitted", "began"))
        return RequestTiming(queued_s, first_token_s, time.monotonic() - came)


@dataclass(frozen=True)
class LLMResponse:
    """The tokens made for one request, each with its log-probability and weight version.

    The four lists have one entry a generated token; log-probabilities are those of softmax(logits / temperature), of the
    first token with `first_token_temperature` where the request has one.
    """

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Number of the weights that produced the token, stated by the engine."""

    stop_reason: StopReason
    temperature: float = 1.0
    untrained_tokens: int = 0
    """So many tokens at the beginning were drawn at another temperature and are not to be trained on."""

    top: tuple[TopTokens, ...] = ()
    """For each generated token, the most probable ones in its place; empty where `LLMRequest.top_logprobs` is 0."""

    prompt_logprobs: tuple[float, ...] = ()
    """Log-probabilities of the prompt tokens but the first, each given those before it; empty without
    `LLMRequest.scores_prompt`."""

    prompt_top: tuple[TopTokens, ...] = ()
    """The most probable tokens in the places of `prompt_logprobs`; empty where `top` is."""

    timing: RequestTiming | None = field(default=None, compare=False)
    """When it was queued, began and ended; None where the engine does not say."""

    @property
    def truncated(self) -> bool:
        """True where the completion was cut by its length."""
        return self.stop_reason == StopReason.LENGTH


class NewTokens(NamedTuple):
    """Tokens that were drawn since the last piece, of a request that goes on."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[TopTokens, ...] = ()
    """The most probable tokens, see `LLMResponse.top`."""
