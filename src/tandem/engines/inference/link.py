"""The pipe to an engine's process: what travels over it (both ends are ours, so it is pickled), and the parent's end, which
starts the process, talks to it, notices its end, and ends it."""

import itertools
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tandem.api.failures import EngineDied, WaitTimeout
from tandem.api.portable import survives_pickling
from tandem.api.requests import LLMRequest
from tandem.api.weights import WeightVersion
from tandem.config.errors import kind_and_text
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.callers import Callers, NewTokens, Result
from tandem.engines.inference.driver import COMMIT_TIMEOUT_S, CONTROL_TIMEOUT_S


@dataclass(frozen=True)
class ChildStart:
    """To the child, first: what to make."""

    folder: Path
    config: EmbeddedEngineConfig
    dtype: torch.dtype
    device: str
    version: WeightVersion
    threads: int
    deterministic: bool


@dataclass(frozen=True)
class MethodCall:
    """To the child: a method of `Driver`, answered under its number if it has one."""

    number: int | None
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Ready:
    """From the child, first: the model is loaded."""


@dataclass(frozen=True)
class RequestResults:
    """From the child: results of requests, in one message a step."""

    results: tuple[Result, ...]


@dataclass(frozen=True)
class StreamNews:
    """From the child: new tokens of requests that are streamed, in one message a step."""

    drawn: tuple[tuple[int, NewTokens], ...]


@dataclass(frozen=True)
class CallResult:
    """From the child: what a call gave, or raised."""

    number: int
    value: Mapping[str, float] | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Died:
    """From the child, last: what ended it, with its traceback."""

    reason: str
    trace: str


def portable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else a `RuntimeError` that carries its text and traceback."""
    if survives_pickling(error):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))


WATCH_S = 0.25
"""Seconds between looks at the process while the pipe is silent: its end can be hidden when someone forked us."""

CLOSE_TIMEOUT_S = 5.0
"""An engine that has not ended by itself after this is killed."""

PREPARE_TIMEOUT_S = 300.0
"""Reading, checking and laying out all weights while generation goes on."""

TIMEOUTS_S = {"prepare_weights": PREPARE_TIMEOUT_S, "commit_weights": COMMIT_TIMEOUT_S}
"""Method of the driver → how long it may take; the others `CONTROL_TIMEOUT_S`."""

FIRST_WORD_S = 5.0
"""The driver over there has the same deadlines and knows better what it waits for, so it may speak first."""


class Link:
    """A running engine process. Nothing but `call` waits for it; results go to ``callers``."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection, callers: Callers):
        self._process, self._connection, self._callers = process, connection, callers
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Mapping[str, float] | None]] = {}
        self._ended: str | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._write, name="engine-writer", daemon=True),
            threading.Thread(target=self._read, name="engine-reader", daemon=True),
        ]

    @classmethod
    def start(cls, start: ChildStart, callers: Callers, timeout_s: float) -> "Link":
        """Starts the process and waits until its model is loaded.

        Raises:
            EngineDied: it ended; with its traceback.
            WaitTimeout: it was not ready within ``timeout_s``.
        """
        process, connection = _launch(start.threads)
        try:
            connection.send_bytes(pickle.dumps(start))
            _wait_ready(process, connection, timeout_s)
        except BaseException as error:
            connection.close()
            process.kill()
            process.wait()
            if isinstance(error, (EOFError, OSError)):
                raise EngineDied(f"at its start {_how_it_ended(process)}; see its output above") from error
            raise
        link = cls(process, connection, callers)
        for thread in link._threads:
            thread.start()
        return link

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, number: int, request: LLMRequest, stream: bool = False) -> None:
        """`Driver.submit`."""
        self._send("submit", number, request, stream)

    def cancel(self, number: int) -> None:
        """`Driver.cancel`."""
        self._send("cancel", number)

    def _send(self, method: str, *arguments: Any, number: int | None = None) -> None:
        """Queues a call; all that wait are sent as one. What cannot be pickled raises here, at its sender."""
        self._outbox.put(pickle.dumps(MethodCall(number, method, arguments)))

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> dict[str, float]:
        """Runs a method of the driver in the engine's process; see `TIMEOUTS_S`.

        Raises:
            EngineDied: the process is gone, or goes.
            WaitTimeout: no answer within ``timeout_s``.
        """
        if timeout_s is None:
            timeout_s = TIMEOUTS_S.get(method, CONTROL_TIMEOUT_S) + FIRST_WORD_S
        answer: Future[Mapping[str, float] | None] = Future()
        with self._lock:
            if self._ended is not None:
                raise EngineDied(self._ended)
            number = next(self._numbers)
            self._calls[number] = answer
        self._send(method, *arguments, number=number)
        try:
            return dict(answer.result(timeout_s) or {})
        except TimeoutError:
            if answer.done():  # the method's own
                raise
            raise WaitTimeout(f"the engine process {self.pid} did not answer {method} within {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends the process, kindly at first; kills it after ``timeout_s``. Idempotent."""
        self._closing = True
        self._end("the engine was closed", None)
        self._send("stop")
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
        self._connection.close()

    def _end(self, reason: str, cause: Exception | None) -> None:
        with self._lock:
            self._ended = self._ended or reason
            calls = list(self._calls.values())
            self._calls.clear()
        for answer in calls:
            answer.set_exception(EngineDied(reason))
        self._callers.end(reason, cause)

    def _write(self) -> None:
        while True:
            messages = [self._outbox.get()]
            while not self._outbox.empty():
                messages.append(self._outbox.get())
            try:
                if any(message is not None for message in messages):
                    self._connection.send_bytes(pickle.dumps([message for message in messages if message is not None]))
            except OSError:
                return  # the reader says why
            if None in messages:
                return

    def _read(self) -> None:
        try:
            reason, cause = self._listen(), None
        except Exception as error:  # the worker boundary: whoever waits gets the cause
            reason, cause = f"its pipe broke: {kind_and_text(error)}", error
        if not self._closing:
            self._end(reason, cause)

    def _listen(self) -> str:
        """Takes messages until the process ends; returns what ended it."""
        while True:
            try:
                if self._connection.poll(WATCH_S):
                    message = pickle.loads(self._connection.recv_bytes())
                elif self._process.poll() is None:
                    continue
                else:
                    return _how_it_ended(self._process)
            except (EOFError, OSError):
                return _how_it_ended(self._process)
            if isinstance(message, Died):
                return f"{message.reason}\n{message.trace}"
            self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case RequestResults(results):
                self._callers.resolve(results)
            case StreamNews(drawn):
                self._callers.progress(drawn)
            case CallResult():
                with self._lock:
                    answer = self._calls.pop(message.number, None)
                if answer is None:  # it came too late, nobody waits any more
                    return
                if message.error is not None:
                    answer.set_exception(message.error)
                else:
                    answer.set_result(message.value)


def _launch(threads: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts the interpreter of the child, with a socket pair to it and its own number of threads.

    A fresh interpreter and not `multiprocessing`: that would import the user's script a second time.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tandem.engines.inference.child", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # the terminal's Ctrl-C does not reach it
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
            },
        )
    return process, Connection(ours.detach())


def _wait_ready(process: subprocess.Popen[bytes], connection: Connection, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not connection.poll(WATCH_S):
        if process.poll() is not None:
            raise EOFError
        if time.monotonic() > deadline:
            raise WaitTimeout(f"the engine process {process.pid} had not loaded its model within {timeout_s:g} s")
    message = pickle.loads(connection.recv_bytes())
    if isinstance(message, Died):
        raise EngineDied(f"at its start: {message.reason}\n{message.trace}")
    if not isinstance(message, Ready):
        raise EngineDied(f"at its start the engine process said {message!r}")


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """In words; the process has closed its pipe, so it is about to end if it has not."""
    try:
        status = process.wait(CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"its process {process.pid} closed its pipe but did not end"
    if status < 0:
        return f"its process {process.pid} was killed by {signal.Signals(-status).name}"
    return f"its process {process.pid} ended with exit status {status}"
