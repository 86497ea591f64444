"""The pipe to an engine's process: what travels over it (both ends are ours, so it is pickled), and the parent's end, which
has the process started, talks to it and notices its end.

To the child goes its `ChildStart`, then lists of pickled calls ``(number, method of Driver, arguments)``, which are answered
under their number if they have one. From the child come ``(word, arguments)``: *ready* or *died* at first; then *resolve*
and *progress* for `Callers`, one message a step each, and *answer* to a call; *died* last, with its reason and traceback.
"""

import itertools
import pickle
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
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
from tandem.engines.inference.callers import Callers
from tandem.engines.inference.driver import COMMIT_TIMEOUT_S, CONTROL_TIMEOUT_S
from tandem.engines.inference.remote.launch import ServerProcess, own_environment


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

    def __init__(self, process: ServerProcess, connection: Connection, callers: Callers):
        self._process, self._connection, self._callers = process, connection, callers
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Mapping[str, float] | None]] = {}
        self._ended: str | None = None
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
        ours, theirs = socket.socketpair()
        with theirs:
            process = ServerProcess.start(
                # A fresh interpreter and not `multiprocessing`: that would import the user's script a second time.
                [sys.executable, "-P", "-m", "tandem.engines.inference.child"],
                stdin=theirs.fileno(),
                environment=own_environment(start.threads),
                grace_s=CLOSE_TIMEOUT_S,
            )
        link = cls(process, Connection(ours.detach()), callers)
        try:
            link._introduce(start, timeout_s)
        except BaseException:
            process.close()
            link._connection.close()
            raise
        for thread in link._threads:
            thread.start()
        return link

    def _introduce(self, start: ChildStart, timeout_s: float) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(start))
            in_time = self._connection.poll(timeout_s)
            word, arguments = pickle.loads(self._connection.recv_bytes()) if in_time else ("", ())
        except (EOFError, OSError) as error:
            raise EngineDied(f"at its start {self._how_it_ended()}; see its output above") from error
        if not in_time:
            raise WaitTimeout(f"the engine process {self.pid} had not loaded its model within {timeout_s:g} s")
        if word != "ready":
            raise EngineDied("at its start: {}\n{}".format(*arguments))

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
        self._outbox.put(pickle.dumps((number, method, arguments)))

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

    def close(self) -> None:
        """Ends the process, kindly at first, and kills it after `CLOSE_TIMEOUT_S`. Idempotent."""
        self._end("the engine was closed", None)
        self._process.close()
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT_S)
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
        self._end(reason, cause)

    def _listen(self) -> str:
        """Takes messages until the process ends; returns what ended it."""
        callers = self._callers
        take: dict[str, Callable[..., None]]
        take = {"resolve": callers.resolve, "progress": callers.progress, "answer": self._answer}
        while True:
            try:
                if self._connection.poll(WATCH_S):
                    word, arguments = pickle.loads(self._connection.recv_bytes())
                elif self._process.alive:
                    continue
                else:
                    return self._how_it_ended()
            except (EOFError, OSError):
                return self._how_it_ended()
            if word == "died":
                return "\n".join(arguments)
            take[word](*arguments)

    def _answer(self, number: int, value: Mapping[str, float] | None, error: Exception | None) -> None:
        with self._lock:
            answer = self._calls.pop(number, None)
        if answer is None:  # it came too late, nobody waits any more
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)

    def _how_it_ended(self) -> str:
        """In words; one that has only closed its pipe is ended."""
        self._process.close()
        return self._process.how_it_ended() or f"its process {self.pid} does not end"
