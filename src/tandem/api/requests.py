"""Requests to an inference engine and its responses: tokens, never text."""

import enum
import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from tandem.api.media import prompt_key
from tandem.config.rollout import GenerationConfig


class StopReason(enum.IntEnum):
    """Reason why a completion ended. An integer, because it is a field of the batch."""

    STOP = 0
    """A stop token or stop string."""

    LENGTH = 1
    """The completion reached `max_new_tokens` or the end of the model's context."""

    CANCELLED = 2
    """The episode was cancelled, or the request's deadline passed."""


class NoiseKey(NamedTuple):
    """Seed of one trajectory's sampling noise: the key and a token's position determine the random draw of that token.

    Samples therefore do not depend on batching, on the order of arrival or on retries of other requests. ``attempt`` grows
    by 1 when an episode is run again.
    """

    seed: int
    epoch: int = 0
    group: int = 0
    sample: int = 0
    trajectory: int = 0
    attempt: int = 0


TopTokens = tuple[tuple[int, float], ...]
"""(token, log-probability) of the most probable tokens at one position, the most probable first."""


@dataclass(frozen=True)
class LLMRequest:
    """A request for one completion.

    Example: ``LLMRequest([1, 4093, 198], GenerationConfig(max_new_tokens=16), noise_key=NoiseKey(seed=0, sample=3))``
    """

    input_ids: tuple[int, ...]
    """Prompt tokens, at least one; a list is converted."""

    gconfig: GenerationConfig
    """Sampling parameters; ``n_samples`` is ignored, because one request is one completion."""

    noise_key: NoiseKey | None = None
    """Seed of the sampling noise; None: the episode that makes the request sets it."""

    affinity: str | None = None
    """Requests with the same affinity (one group, one chat) share prefixes and go to the same server."""

    deadline_s: float | None = None
    """Seconds from submission after which the request ends as ``cancelled`` with the tokens it has; None: no limit."""

    model: str | None = None
    """Name of another model than the engine's own. A request with a name is refused, because no engine serves several models
    yet."""

    media: tuple[int, ...] = ()
    """The media number of each token, see `tandem.api.media`; empty if the prompt has no media."""

    needs_logprobs: bool = True
    """False: the log-probabilities are not used (an evaluation). A server that can compute log-probabilities only after
    top-p, top-k and the suppression of stop tokens may then return these."""

    grammar: str = ""
    """An llguidance grammar that the completion must match; empty: none. Tokens that break the grammar are not drawn, but
    log-probabilities are those of the whole distribution. Only the embedded engine supports this."""

    top_logprobs: int = 0
    """Number of the most probable tokens to return for each position. Only the embedded engine supports this."""

    scores_prompt: bool = False
    """True: the response also has the log-probabilities of the prompt's tokens, and ``gconfig.max_new_tokens`` may be 0.
    Only the embedded engine supports this."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", tuple(self.input_ids))  # hashable: engines look prompts up by their tokens
        object.__setattr__(self, "media", tuple(self.media) if any(self.media) else ())

    @cached_property
    def key(self) -> tuple[int, ...]:
        """The identity of the prompt. Compare prompts by this and not by tokens, which are equal for different images."""
        return prompt_key(self.input_ids, self.media)


class RequestTiming(NamedTuple):
    """Times of one request in seconds since the engine received it; NaN if the engine does not measure them."""

    queued_s: float
    """Seconds until the request left the queue."""

    first_token_s: float
    """Seconds until the prompt was computed and the first token could be drawn."""

    total_s: float
    """Seconds until the request ended."""


class RequestClock:
    """Measures the times of one request inside an engine, starting at its construction."""

    def __init__(self) -> None:
        self._marks = {"came": time.monotonic()}

    def mark(self, event: Literal["admitted", "began"]) -> None:
        """Records that the request left the queue (``admitted``), or that its first token is about to be drawn (``began``).
        Repeated calls have no effect."""
        self._marks.setdefault(event, time.monotonic())

    def timing(self) -> RequestTiming:
        """Returns the times of the request, which ends now."""
        came = self._marks["came"]
        queued_s, first_token_s = (self._marks.get(event, math.nan) - came for event in ("admitted", "began"))
        return RequestTiming(queued_s, first_token_s, time.monotonic() - came)


@dataclass(frozen=True)
class LLMResponse:
    """The tokens generated for one request, each with its log-probability and weight version.

    ``output_ids``, ``logprobs`` and ``versions`` have one entry per generated token. Log-probabilities are those of
    softmax(logits / temperature); those of the first token use `first_token_temperature` if the request sets it.
    """

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Version number of the weights that produced each token, as the engine reports it."""

    stop_reason: StopReason
    temperature: float = 1.0
    untrained_tokens: int = 0
    """Number of tokens at the beginning that were drawn at another temperature and must not be trained on."""

    top: tuple[TopTokens, ...] = ()
    """The most probable tokens at the position of each generated token; empty if `LLMRequest.top_logprobs` is 0."""

    prompt_logprobs: tuple[float, ...] = ()
    """Log-probability of each prompt token but the first, given the tokens before it; empty without
    `LLMRequest.scores_prompt`."""

    prompt_top: tuple[TopTokens, ...] = ()
    """The most probable tokens at the positions of `prompt_logprobs`; empty if `LLMRequest.top_logprobs` is 0."""

    timing: RequestTiming | None = field(default=None, compare=False)
    """Times of the request; None if the engine does not measure them."""

    @property
    def truncated(self) -> bool:
        """True if the completion was cut off by `max_new_tokens` or the context."""
        return self.stop_reason == StopReason.LENGTH


class NewTokens(NamedTuple):
    """The tokens that a streamed request has generated since its last piece."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[TopTokens, ...] = ()
    """The most probable tokens at each position, see `LLMResponse.top`."""
