"""One completion from another maker's server, assembled from pieces: one request each.

Usually there is one piece. There are more if the first token has a temperature of its own, or if the server ended a request
that is not complete by our rules (`Judge`): it was aborted, or the server has an end token that we do not know.
"""

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure, ServerFailed
from tandem.api.requests import LLMRequest, LLMResponse, StopReason
from tandem.api.weights import WeightVersion
from tandem.config.errors import kind_and_text
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.engine_calls import StopText, check_request
from tandem.engines.inference.remote.foreign.protocol import (
    Draw,
    Facts,
    MediaFile,
    ServerPrompts,
    ServerProtocol,
    ServerReply,
    compare_prompts,
)
from tandem.engines.inference.sampler import stream_of
from tandem.models.foreign import read_hf_config
from tandem.models.tokenizer import load_tokenizer, stop_ids


class Labels:
    """Converts versions to labels and back. A label has run, model, number, digest, and a random word for this client."""

    def __init__(self, url: str):
        self._url = url
        self._nonce = uuid.uuid4().hex[:8]
        self._numbers: dict[str, int] = {}

    def of(self, version: WeightVersion) -> str:
        """Returns the label of a version, and remembers it."""
        label = f"{version.run or 'tandem'}/{version.model}/{version.number}/{version.digest[:12]}/{self._nonce}"
        self._numbers[label] = version.number
        return label

    def adopt(self, label: str, otherwise: int) -> int:
        """Accepts a label that another client gave to the server's weights. Returns the version number in the label, or
        ``otherwise`` if the label is not one of Tandem's."""
        number = label.rsplit("/", 3)[1] if label.count("/") >= 4 else ""
        self._numbers[label] = int(number) if number.isdecimal() else otherwise
        return self._numbers[label]

    def numbers(self, labels: Sequence[str]) -> tuple[int, ...]:
        """Returns the version number of each token. Raises `ServerFailed` for an unknown label."""
        unknown = set(labels) - self._numbers.keys()
        if unknown:
            raise ServerFailed(
                f"{self._url} reports weights {min(unknown)!r}, which this run did not deliver: it was restarted, "
                "or another run uses it",
                url=self._url,
            )
        return tuple(self._numbers[label] for label in labels)


class Counters:
    """Counters of one client; thread-safe. ``busy_s``: seconds in which at least one request was under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0
        self._values = dict.fromkeys(("generated_tokens", "prefill_tokens", "cancelled", "busy_s", "verified_tensors"), 0.0)

    @contextmanager
    def running(self, prompt_tokens: int) -> Iterator[None]:
        with self._lock:
            self._values["prefill_tokens"] += prompt_tokens
            if not self._running:
                self._since = time.perf_counter()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._values["busy_s"] += time.perf_counter() - self._since

    def add(self, name: str, count: float = 1.0) -> None:
        with self._lock:
            self._values[name] += count

    def set(self, name: str, value: float) -> None:
        with self._lock:
            self._values[name] = float(value)

    def all(self) -> dict[str, float]:
        """Returns all counters, with ``running`` and ``waiting``."""
        with self._lock:
            busy = time.perf_counter() - self._since if self._running else 0.0
            counted = self._values | {"busy_s": self._values["busy_s"] + busy}
            return counted | {"running": float(self._running), "waiting": 0.0}


class Judge:
    """Decides where one completion ends, from its tokens in pieces.

    A stop token ends the completion and stays in it; so does the token that completes a stop string. A server may stop
    earlier or later, for a token of its own or because it searches only new text, so its own decision is ignored.
    ``minimum``: number of tokens at the beginning that must not be stop tokens, and in which no stop string counts.
    """

    def __init__(self, stop_ids: frozenset[int], limit: int, stop_text: StopText | None = None, minimum: int = 0):
        self._stop_ids, self._limit, self._stop_text, self._minimum = stop_ids, limit, stop_text, minimum
        self._count = 0

    @property
    def room(self) -> int:
        """Number of tokens that may still come."""
        return self._limit - self._count

    def look(self, tokens: Sequence[int]) -> tuple[int, StopReason | None]:
        """Returns how many of these tokens belong to the completion, and why it ends with the last of them; None if it goes
        on.

        Raises:
            ValueError: a stop token came that the server had to suppress.
        """
        for place, token in enumerate(tokens, 1):
            self._count += 1
            if self._stop_text is not None and self._stop_text.add(token) and self._count >= self._minimum:
                return place, StopReason.STOP
            if token in self._stop_ids:
                if self._count <= self._minimum:
                    raise ValueError(
                        f"drew stop token {token} as token {self._count}, before the minimum of {self._minimum} tokens"
                    )
                return place, StopReason.STOP
            if self._count >= self._limit:
                return place, StopReason.LENGTH
        return len(tokens), None


ABORT_TIMEOUT_S = 5.0
"""Seconds for a server to abort a late request, and again to return its tokens; after that it ends without tokens."""

MAX_EMPTY_PIECES = 8
"""Number of answers in a row without a token after which the server counts as failed."""

_LOWEST_LOGPROB = -9000.0
"""Lower bound of valid log-probabilities; one of the servers writes -9999 for a number that is not finite."""


class Completions:
    """Makes completions with one server. ``cannot``: returns why the server does not support sampling settings, or None."""

    def __init__(
        self,
        protocol: ServerProtocol,
        facts: Facts,
        labels: Labels,
        counters: Counters,
        *,
        folder: Path,
        request_timeout_s: float,
        cannot: Callable[[GenerationConfig], str | None],
    ):
        self._protocol, self._facts, self._labels, self._counters = protocol, facts, labels, counters
        self._folder, self._request_timeout_s, self._cannot = folder, request_timeout_s, cannot
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._prompts: ServerPrompts | None = None
        self._eos = frozenset(stop_ids(folder, read_hf_config(folder)))
        self._url = protocol.http.base_url

    async def complete(self, request: LLMRequest) -> LLMResponse:
        """Returns a completion. Raises `DataFailure` or `ServerFailed`."""
        judge = self._admit(request)
        expires = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason, empty = None, 0
        with self._counters.running(len(request.input_ids)):
            while reason is None:
                piece = await self._next(request, tokens, judge.room, expires)
                numbers = self._labels.numbers(piece.labels)
                count, reason = self._look(judge, piece)
                tokens += piece.tokens[:count]
                logprobs += piece.logprobs[:count]
                versions += numbers[:count]
                self._counters.add("generated_tokens", count)
                empty = 0 if count else empty + 1
                if reason is None and expires is not None and time.monotonic() >= expires:
                    self._counters.add("cancelled")
                    reason = StopReason.CANCELLED
                elif reason is None and empty >= MAX_EMPTY_PIECES:
                    raise ServerFailed(f"{self._url} answered {empty} times without a token", url=self._url)
        return _response(request, tokens, logprobs, versions, reason)

    def _admit(self, request: LLMRequest) -> Judge:
        """Refuses requests that cannot be sampled, as the embedded engine does. Returns the judge of the completion."""
        gconfig, limit = request.gconfig, self._facts.max_model_len
        if request.media and self._prompts is None:
            self._prompts = ServerPrompts(self._folder)
        check_request(request, None, limit, takes_media=self._prompts is not None and self._prompts.takes_media)
        reason = self._cannot(gconfig) if request.needs_logprobs else None
        if reason is not None:
            raise DataFailure("refused_by_server", f"{self._facts.name} {reason}")
        if gconfig.stop and self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._folder)
        watch = StopText(self._tokenizer, gconfig.stop) if gconfig.stop and self._tokenizer is not None else None
        stop_ids = self._eos | frozenset(gconfig.stop_token_ids)
        return Judge(stop_ids, min(gconfig.max_new_tokens, limit - len(request.input_ids)), watch, gconfig.min_new_tokens)

    def _look(self, judge: Judge, piece: ServerReply) -> tuple[int, StopReason | None]:
        try:
            return judge.look(piece.tokens)
        except ValueError as error:
            raise ServerFailed(f"{self._url} {error}", url=self._url) from error

    async def _next(self, request: LLMRequest, so_far: Sequence[int], room: int, expires: float | None) -> ServerReply:
        """Sends one request to the server. The reply has no tokens if the deadline passed before the server made any."""
        nothing = ServerReply((), (), ())
        remaining = self._request_timeout_s if expires is None else expires - time.monotonic()
        if remaining <= 0:
            return nothing
        number, ids = uuid.uuid4().hex, [*request.input_ids, *so_far]
        sent, files = ids, list[MediaFile]()
        if request.media and self._prompts is not None:
            sent, files = await self._prompts.pack(ids, request.media)
        body = self._protocol.body(number, sent, self._draw(request, so_far, room), files)
        post = self._protocol.http.post(self._protocol.generate_path, body, deadline_s=remaining + 3 * ABORT_TIMEOUT_S)
        task = asyncio.ensure_future(post)
        try:
            await asyncio.wait({task}, timeout=remaining)
            if not task.done() and expires is None:
                raise ServerFailed(f"{self._url} did not end a request within {remaining:g} s", url=self._url)
            if not task.done():
                with suppress(ServerFailed, DataFailure, TimeoutError):
                    await asyncio.wait_for(self._protocol.abort(number), ABORT_TIMEOUT_S)
                await asyncio.wait({task}, timeout=ABORT_TIMEOUT_S)
            return self.read(task.result(), ids if files else None) if task.done() else nothing
        finally:
            task.cancel()

    def _draw(self, request: LLMRequest, so_far: Sequence[int], room: int) -> Draw:
        gconfig, key = request.gconfig, request.noise_key
        first_temperature = gconfig.first_token_temperature if not so_far and not gconfig.greedy else None
        position = len(request.input_ids) + len(so_far)
        most = room if first_temperature is None else 1
        return Draw(
            temperature=gconfig.temperature if first_temperature is None else first_temperature,
            greedy=gconfig.greedy,
            top_p=gconfig.top_p,
            top_k=gconfig.top_k,
            seed=None if key is None else self._protocol.seed(stream_of(key), position),
            max_tokens=most,
            min_tokens=min(most, max(0, gconfig.min_new_tokens - len(so_far))),
            stop_ids=tuple(sorted(self._eos | frozenset(gconfig.stop_token_ids))),
            stop=gconfig.stop,
        )

    def read(self, answer: Any, prompt: Sequence[int] | None = None) -> ServerReply:
        """Reads the piece in an answer.

        Raises:
            ServerFailed: the answer is not a completion.
            DataFailure: with its images and sounds, the server's prompt differs from ``prompt``.
        """
        try:
            piece = self._protocol.piece(answer)
            server_prompt = None if prompt is None else self._protocol.prompt_ids(answer)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ServerFailed(
                f"{self._url} gave an answer that is no completion: {kind_and_text(error)}", url=self._url
            ) from error
        if not all(_LOWEST_LOGPROB < value < 0.01 for value in piece.logprobs):
            raise ServerFailed(f"{self._url} gave invalid log-probabilities: {piece.logprobs}", url=self._url)
        if prompt is not None and server_prompt is not None:
            compare_prompts(prompt, server_prompt, self._facts.name)
        return piece


def _response(
    request: LLMRequest, tokens: list[int], logprobs: list[float], versions: list[int], reason: StopReason
) -> LLMResponse:
    """Makes the response. These servers give greedy log-probabilities at temperature 1, so the response states 1."""
    gconfig = request.gconfig
    skips_first = gconfig.first_token_temperature is not None
    return LLMResponse(
        request.input_ids,
        tuple(tokens),
        tuple(logprobs),
        tuple(versions),
        reason,
        1.0 if gconfig.greedy else gconfig.temperature,
        untrained_tokens=min(len(tokens), int(skips_first)),
    )
