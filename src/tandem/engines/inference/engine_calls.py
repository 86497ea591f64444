"""Calls of inference engines, whatever is behind them: a thread, a process, a server, or many servers.

Requests: those that no engine can serve are refused; `Callers` are asyncio futures by request number, resolved from another
thread; `StopText` decodes tokens to text for requests with stop strings, and only the new part of the text.

Control calls: `Controlled` engines forward them. Each blocking call runs in a thread of its own, so a call that hangs delays
neither other calls nor the interpreter's exit.
"""

import asyncio
import contextlib
import itertools
import threading
from abc import abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.api.engines import InferenceEngine, InferencePart
from tandem.api.failures import DataFailure, EngineDied, WrongWorkflow
from tandem.api.requests import LLMRequest, LLMResponse, NewTokens

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def refuse_unsupported(request: LLMRequest, takes_media: bool = False, embedded: bool = False) -> None:
    """Passes if the engine supports all that the request asks for. ``takes_media``: the model reads images or sounds.

    Raises:
        WrongWorkflow: the request has ``media`` for a text model, names a ``model``, or asks an engine that is not
            ``embedded`` for something that only the embedded engine does.
    """
    for name in () if embedded else ("grammar", "top_logprobs", "scores_prompt"):
        if getattr(request, name):
            raise WrongWorkflow(
                f"LLMRequest.{name} is set, and only the embedded engine (rollout.backend=embedded) supports it"
            )
    if request.media and not takes_media:
        raise WrongWorkflow("LLMRequest.media is set, and this engine, or its model, reads text alone: send tokens alone")
    if request.model:
        raise WrongWorkflow(
            "LLMRequest.model is set, and no inference engine here serves several models: leave it out, or ask another "
            "engine for the other model"
        )


def check_request(
    request: LLMRequest, vocab_size: int | None, max_model_len: int, takes_media: bool = False, embedded: bool = False
) -> None:
    """Passes if the request can be sampled. ``vocab_size`` is None if it is unknown.

    Raises:
        DataFailure: ``prompt_too_long`` if the context has no room for a token after the prompt, ``bad_request`` if a token
            is outside the vocabulary or a sampling setting is out of range.
        WrongWorkflow: see `refuse_unsupported`.
    """
    refuse_unsupported(request, takes_media, embedded)
    ids, gconfig = request.input_ids, request.gconfig
    fewest = 0 if request.scores_prompt else 1
    if len(ids) + fewest > max_model_len:
        raise DataFailure("prompt_too_long", f"{len(ids)} tokens leave no room in the context of {max_model_len}")
    if not ids or min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        below = "" if vocab_size is None else f", each in [0, {vocab_size}): the largest is {max(ids, default=None)}"
        raise DataFailure("bad_request", f"a prompt has at least one token{below}")
    first = gconfig.first_token_temperature
    not_positive = gconfig.temperature <= 0 or (first is not None and first <= 0)
    if not_positive or gconfig.max_new_tokens < fewest or gconfig.top_p <= 0 or gconfig.top_k < 0:
        raise DataFailure(
            "bad_request", f"temperatures, top_p and max_new_tokens must be above 0, top_k at least 0, got {gconfig}"
        )
    if request.scores_prompt and request.media:
        raise DataFailure("bad_request", "the tokens of a prompt with images or sounds have no log-probabilities")
    if request.grammar and gconfig.min_new_tokens:
        raise DataFailure("bad_request", "min_new_tokens must be 0 with a grammar, which may end the answer earlier")


Result = tuple[int, LLMResponse | Exception]
"""Number of a request, and its response or the error that it failed with."""

_Settled = list[tuple[asyncio.Future[LLMResponse], LLMResponse | Exception]]


class Callers:
    """The waiting callers of one engine, on any number of event loops. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[LLMResponse]]] = {}
        self._streams: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Queue[NewTokens | None]]] = {}
        self._end: tuple[str, BaseException | None] | None = None

    async def wait(
        self, request: LLMRequest, submit: Callable[[int, LLMRequest], None], cancel: Callable[[int], None]
    ) -> LLMResponse:
        """Submits the request under a new number and waits for its result; a cancelled caller cancels the request.

        Raises:
            EngineDied: the engine has ended, or ends before the result.
        """
        number, future = self._open()
        try:
            submit(number, request)
            return await future
        finally:
            with self._lock:
                unanswered = self._waiting.pop(number, None) is not None
            if unanswered:
                cancel(number)

    async def stream(
        self, request: LLMRequest, submit: Callable[[int, LLMRequest], None], cancel: Callable[[int], None]
    ) -> AsyncGenerator[NewTokens | LLMResponse, None]:
        """Like `wait`, but yields tokens as they are drawn, and the whole response last. Close the generator to cancel.

        Raises:
            EngineDied: the engine has ended, or ends before the response.
        """
        number, future = self._open()
        pieces: asyncio.Queue[NewTokens | None] = asyncio.Queue()
        future.add_done_callback(lambda _: pieces.put_nowait(None))
        with self._lock:
            self._streams[number] = (asyncio.get_running_loop(), pieces)
        try:
            submit(number, request)
            while (piece := await pieces.get()) is not None:
                yield piece
            yield future.result()
        finally:
            with self._lock:
                del self._streams[number]
                unanswered = self._waiting.pop(number, None) is not None
            if unanswered:
                cancel(number)
            elif future.done() and not future.cancelled():
                future.exception()  # marks it as retrieved, even if the caller left early

    def _open(self) -> tuple[int, asyncio.Future[LLMResponse]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[LLMResponse] = loop.create_future()
        with self._lock:
            if self._end is not None:
                raise self._error()
            number = next(self._numbers)
            self._waiting[number] = (loop, future)
        return number, future

    def resolve(self, results: Sequence[Result]) -> None:
        """Hands results to their callers and wakes each event loop once. Results without a caller are dropped."""
        by_loop: dict[asyncio.AbstractEventLoop, _Settled] = defaultdict(list)
        with self._lock:
            for number, result in results:
                if number in self._waiting:
                    loop, future = self._waiting.pop(number)
                    by_loop[loop].append((future, result))
        for loop, settled in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody can be waiting on it
                loop.call_soon_threadsafe(_settle, settled)

    def progress(self, drawn: Sequence[tuple[int, NewTokens]]) -> None:
        """Hands new tokens to the callers that stream. Tokens without a caller are dropped."""
        with self._lock:
            deliveries = [(*self._streams[number], piece) for number, piece in drawn if number in self._streams]
        for loop, pieces, piece in deliveries:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody can be waiting on it
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

    def end(self, message: str, cause: BaseException | None = None) -> None:
        """Fails all present and later callers with `EngineDied`. The reason of the first call counts."""
        with self._lock:
            self._end = self._end or (message, cause)
            results: list[Result] = [(number, self._error()) for number in self._waiting]
        self.resolve(results)

    def check(self) -> None:
        """Raises `EngineDied` if the engine has ended."""
        if self._end is not None:
            raise self._error()

    def _error(self) -> EngineDied:
        # One exception object for each caller: a shared one would collect the tracebacks of all of them.
        message, cause = self._end or ("", None)
        error = EngineDied(message)
        error.__cause__ = cause
        return error


def _settle(settled: _Settled) -> None:
    for future, result in settled:
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


UNFINISHED = "�"
"""The character to which a tokenizer decodes an incomplete character (its first bytes alone)."""


class StopText:
    """Watches the text of one completion for strings that end it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop: tuple[str, ...]):
        self._tokenizer = tokenizer
        self._stop = stop
        self._overlap = max(len(string) for string in stop) - 1
        self._tokens: list[int] = []
        self._read = 0
        """Number of tokens whose text was checked and ended in a whole character."""

        self._context = 0
        """Index of the first token to decode. It is before the new tokens, because a tokenizer may write the first token of
        a text differently."""

        self._tail = ""

    def add(self, token: int) -> bool:
        """Adds one token. Returns True if a stop string has appeared."""
        self._tokens.append(token)
        known = self._decode(self._context, self._read)
        text = self._decode(self._context, len(self._tokens))
        new = self._tail + text[len(known) :]
        if any(string in new for string in self._stop):
            return True
        if not text.endswith(UNFINISHED):
            self._tail = new[-self._overlap :] if self._overlap else ""
            self._context, self._read = self._read, len(self._tokens)
        return False

    def _decode(self, start: int, stop: int) -> str:
        return str(self._tokenizer.decode(self._tokens[start:stop], skip_special_tokens=False))


class Controlled(InferenceEngine):
    """An engine that passes all its control calls to `control`, under their names in `InferenceEngine`."""

    @abstractmethod
    def control(self, name: str, *arguments: Any) -> dict[str, float]:
        """Forwards a control call. Returns the metrics of the call; empty if there are none."""

    def discard_weights(self) -> None:
        self.control("discard_weights")

    def pause(self) -> None:
        self.control("pause")

    def resume(self) -> None:
        self.control("resume")

    def flush(self) -> None:
        self.control("flush")

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        self.control("sleep", parts)

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        self.control("wake", parts)

    def statistics(self) -> dict[str, float]:
        return self.control("statistics")


T = TypeVar("T")


def use_gpu(device: "torch.device | str") -> None:
    """Makes a GPU current in this thread, since a new thread does not inherit it. Does nothing for a CPU."""
    if str(device).startswith("cuda:"):
        import torch  # noqa: PLC0415 — a rank that only takes servers over needs none of it

        torch.cuda.set_device(device)


def in_thread(name: str, function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Calls ``function`` in a daemon thread. The future gets the result or the exception."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that a caller that stops waiting cannot cancel it

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # the worker boundary: the waiting caller gets the cause
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Threads:
    """The threads that one object starts, and waits for when it closes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: set[Future[Any]] = set()

    def start(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Calls ``function`` in a thread."""
        future = in_thread(self._name, function, *arguments)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls ``function`` in a thread and waits on this event loop. Cancelling the caller does not stop the thread."""
        return await asyncio.wrap_future(self.start(function, *arguments))

    def join(self, timeout_s: float) -> None:
        """Waits until all calls have ended, but at most ``timeout_s`` seconds."""
        wait(list(self._calls), timeout_s)
