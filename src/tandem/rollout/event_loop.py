"""An asyncio event loop in a background thread, started on first use."""

import asyncio
import contextlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, TypeVar

from tandem.api.failures import LIBRARIES, UserCodeFailed
from tandem.api.plugins import Interrupted, interrupt, run_loop

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
"""Maximum time in seconds for cancelled coroutines to end."""

ENDING = "end of the loop"
"""Name of the task that waits until all other tasks have ended."""

STOP_TIMEOUT_S = 1.0
"""Additional time in seconds for the thread to end, if nothing blocks the loop."""

BLOCKED_AFTER_S = 60.0
"""A coroutine that blocks the loop for this many seconds is interrupted. If it blocks for a quarter longer, the run ends."""

LOOK_S = 1.0
"""Interval in seconds at which the loop is checked."""

REMEDY = "all episodes share it: use await asyncio.sleep, an asynchronous client, or await asyncio.to_thread(function)"

logger = logging.getLogger("tandem.rollout")


class BlockedLoop(Interrupted):
    """Raised inside a coroutine that blocks the event loop."""

    def __str__(self) -> str:
        return f"it blocked the event loop, and {REMEDY}"


class BackgroundLoop:
    """Runs coroutines for callers in other threads. A coroutine that blocks the loop is interrupted, see
    `BLOCKED_AFTER_S`."""

    def __init__(
        self,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        *,
        blocked_after_s: float = BLOCKED_AFTER_S,
        on_blocked: Callable[[Exception], None] | None = None,
    ) -> None:
        """``on_blocked``: called from another thread, with the error, if a blocking coroutine cannot be interrupted. `run`
        raises this error."""
        self._close_timeout_s, self._blocked_after_s, self._on_blocked = close_timeout_s, blocked_after_s, on_blocked
        self._blocked: Future[None] = Future()
        """Fails when a coroutine blocks the loop and cannot be interrupted."""

        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def _get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=run_loop, args=(self._loop,), name="rollout", daemon=True)
                self._thread.start()
                self._closed = threading.Event()
                watched = (self._loop, self._thread, self._closed)
                self._watcher = threading.Thread(target=self._watch, args=watched, name="rollout-watch", daemon=True)
                self._watcher.start()
            return self._loop

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Schedules a call of the function on the loop."""
        self._get().call_soon_threadsafe(function, *arguments)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop. Cancelling the returned future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._get())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and returns its result. Blocks, so it must not be called on the loop itself."""
        future = self.start(coroutine)
        either: list[Future[Any]] = [future, self._blocked]
        try:
            wait(either, return_when=FIRST_COMPLETED)
            if not future.done():
                self._blocked.result()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, closed: threading.Event) -> None:
        """Checks the loop from a thread until the loop is closed. Time is measured by the number of checks, because the
        clock also runs while the whole process is stopped."""
        look_s = min(LOOK_S, self._blocked_after_s / 4)
        looks = round(self._blocked_after_s / look_s)
        turned = threading.Event()
        turned.set()
        num_silent, interrupted = 0, False
        while thread.is_alive() and not closed.wait(look_s):
            if turned.is_set():
                num_silent, interrupted = 0, False
                turned.clear()
                with contextlib.suppress(RuntimeError):  # the loop may just have been closed
                    loop.call_soon_threadsafe(turned.set)
                continue
            num_silent += 1
            if num_silent >= looks and not interrupted and asyncio.current_task(loop) is not None:
                interrupted = True
                interrupt(thread, BlockedLoop)
            if num_silent == looks + -(-looks // 4):
                self._give_up(thread, num_silent * look_s)
                interrupt(thread, BlockedLoop)  # ends the coroutine as soon as possible, because the run ends

    def _give_up(self, thread: threading.Thread, seconds: float) -> None:
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
            frame = frame.f_back
        code = None if frame is None else frame.f_code
        name = f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})" if code and frame else "a callback"
        error = UserCodeFailed(
            f"{name} has blocked the event loop for {seconds:.3g} s, cannot be interrupted, and {REMEDY}; mend it there and "
            "start again. Saved checkpoints are kept"
        )
        logger.error("%s", error)
        try:
            if self._on_blocked is not None:
                self._on_blocked(error)
        finally:
            if not self._blocked.done():
                self._blocked.set_exception(error)

    def close(self) -> None:
        """Cancels all tasks and ends the thread. Idempotent.

        A task that does not end in time, because its coroutine swallows the cancellation or blocks the loop, is abandoned,
        and a warning names the task. The results of the run are complete by then.
        """
        with self._lock:
            loop, thread, watcher = self._loop, self._thread, self._watcher
            self._loop = self._thread = self._watcher = None
            self._closed.set()
        if loop is None or thread is None or watcher is None:
            return
        if watcher is not threading.current_thread():
            watcher.join(STOP_TIMEOUT_S)  # the watcher refers to this object, which would keep the run's memory
        ending: Future[list[asyncio.Task[Any]]] = Future()
        loop.call_soon_threadsafe(_cancel_all, loop, self._close_timeout_s, ending)
        try:
            unfinished = ending.result(self._close_timeout_s + STOP_TIMEOUT_S)
        except TimeoutError:  # the loop is blocked
            ending.cancel()
            running = asyncio.current_task(loop)
            waiting = [task for task in asyncio.all_tasks(loop) if task.get_name() != ENDING]
            unfinished = waiting if running is None else [running]
        if unfinished:
            loop.set_exception_handler(lambda *_: None)  # asyncio need not report them too when they are collected
            _warn(unfinished, self._close_timeout_s)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STOP_TIMEOUT_S)


def _cancel_all(loop: asyncio.AbstractEventLoop, timeout_s: float, ending: Future[list[asyncio.Task[Any]]]) -> None:
    """Cancels all tasks; called on the loop. ``ending`` gets the tasks that have not ended within ``timeout_s`` seconds.

    A new task is cancelled only after its first step. Otherwise its coroutine would never run, and never release its
    resources, such as the socket of a new connection. A task that was cancelled earlier gets half of the time to clean up,
    because a second cancellation would interrupt its cleanup.
    """
    deadline = loop.time() + timeout_s
    tasks = asyncio.all_tasks(loop)
    new = {task for task in tasks if _is_new(task)}
    cleaning = {task for task in tasks if task.cancelling()}
    for task in tasks - new - cleaning:
        task.cancel()

    async def wait() -> None:
        for task in new:  # their first step precedes this coroutine in the loop's queue
            task.cancel()
        if cleaning:
            await asyncio.wait(cleaning, timeout=timeout_s / 2)
        for task in cleaning:
            task.cancel()
        done, unfinished = await asyncio.wait(tasks, timeout=max(0.0, deadline - loop.time())) if tasks else (set(), set())
        for task in done:
            with contextlib.suppress(asyncio.CancelledError):
                task.exception()  # retrieved, so that asyncio does not report it
        ending.set_result(list(unfinished))

    if ending.set_running_or_notify_cancel():  # otherwise the caller has stopped waiting
        loop.create_task(wait(), name=ENDING)


def _is_new(task: asyncio.Task[Any]) -> bool:
    coroutine = task.get_coro()
    return inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED


def _warn(tasks: Iterable[asyncio.Task[Any]], timeout_s: float) -> None:
    names = list(dict.fromkeys(_chain(task) for task in tasks))
    logger.warning(
        "these coroutines did not end within %g s of their cancellation: %s. They are left behind. A coroutine must let "
        "asyncio.CancelledError pass, and never block",
        timeout_s,
        "; ".join(names),
    )


def _chain(task: asyncio.Task[Any]) -> str:
    """Returns the names and line numbers of the coroutines in which a task is suspended, from the outermost to the
    innermost."""
    names: list[str] = []
    inner: Any = task.get_coro()
    while inner is not None and (frame := getattr(inner, "cr_frame", None)) is not None:
        names.append(f"{inner.__qualname__} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        inner = inner.cr_await
    return " → ".join(names) or task.get_name()
