"""Who waits for which request: asyncio futures by number, resolved from another thread."""

import asyncio
import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence

from tandem.api.failures import EngineDied
from tandem.api.requests import LLMRequest, LLMResponse, NewTokens

Result = tuple[int, LLMResponse | Exception]
"""Number of a request, and what became of it."""

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
            EngineDied: the engine has ended, or ends on the way.
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
        """Like `wait`, but yields what is drawn as it is drawn, and last the whole response. Close it to cancel.

        Raises:
            EngineDied: the engine has ended, or ends on the way.
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
                future.exception()  # looked at, also by a caller who left before

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
        """Hands results to their callers, each loop woken once; results that nobody waits for are dropped."""
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
        """Hands new tokens to the callers that stream; those of nobody are dropped."""
        with self._lock:
            wanted = [(*self._streams[number], piece) for number, piece in drawn if number in self._streams]
        for loop, pieces, piece in wanted:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody can be waiting on it
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

    def end(self, message: str, cause: BaseException | None = None) -> None:
        """Fails everyone who waits, and all who come later, with `EngineDied`. The first reason counts."""
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
