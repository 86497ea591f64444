"""Blocking calls in threads of their own: one that hangs holds nobody else up, nor the end of the interpreter."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def use_gpu(device: torch.device | str) -> None:
    """Makes a GPU the current one of this thread; no thread has that from the one that made it. Nothing on a CPU."""
    if str(device).startswith("cuda:"):
        torch.cuda.set_device(device)


def in_thread(name: str, function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Calls it in a daemon thread; the future has its result, or what it raised."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # who gives up waiting leaves the thread to itself

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # the worker boundary: whoever waits gets the cause
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Threads:
    """The calls of one owner, who waits for them at its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: set[Future[Any]] = set()

    def start(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Calls it in a thread."""
        future = in_thread(self._name, function, *arguments)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls it in a thread and waits on this event loop; a cancelled caller leaves the thread to itself."""
        return await asyncio.wrap_future(self.start(function, *arguments))

    def join(self, timeout_s: float) -> None:
        """Waits until all have ended, or the time is over."""
        wait(list(self._calls), timeout_s)
