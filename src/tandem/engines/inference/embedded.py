"""The embedded engine, whose core runs in a thread of the trainer's process or in a separate process.

In the trainer's process (*colocate*) training and generation take turns on the same cores, so each may use all threads. A
separate process (*decoupled*) has its own threads, and receives weights through shared memory.

In deterministic mode, `pause` the engine, submit all requests of a batch, and `resume` it once ``statistics()["waiting"]``
equals their number. They are admitted in order of their noise keys, so results do not depend on the order of arrival, bit
for bit.

`Link` is the parent's end of the pipe to an engine's process. Messages are pickled, because both ends are Tandem's own code.
The parent sends a `ChildStart`, then lists of pickled calls ``(number, method of Driver, arguments)``; a call with a number
gets an answer with that number. The child sends ``(word, arguments)``: first *ready* or *died*; then *resolve* and
*progress* for `Callers`, each at most once per step, and *answer* for a call. If it fails, its last message is *died*, with
the reason and a traceback.
"""

import itertools
import pickle
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tandem.api.failures import EngineDied, WaitTimeout, survives_pickling
from tandem.api.requests import LLMRequest, LLMResponse, NewTokens
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.config.errors import kind_and_text
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.driver import COMMIT_TIMEOUT_S, CONTROL_TIMEOUT_S, Driver
from tandem.engines.inference.engine_calls import Callers, Controlled, use_gpu
from tandem.engines.inference.remote.launch import own_environment
from tandem.workers.process import Child, inherited

START_TIMEOUT_S = 300.0
"""Seconds for the imports and for loading a model from a slow disk."""

CAPABILITIES = frozenset({"staged", "keep_kv", "sleep_weights", "sleep_kv_cache", "noise_key", "adapter"})

THREAD_CLOSE_TIMEOUT_S = 30.0

WATCH_S = 0.25
"""Seconds between two checks whether the process lives while the pipe is silent. The pipe may stay open after the end of the
process, if a fork of this process holds the other end."""

PROCESS_CLOSE_TIMEOUT_S = 5.0
"""Seconds after which an engine that has not ended by itself is killed."""

PREPARE_TIMEOUT_S = 300.0
"""Seconds for reading, checking and laying out all weights while generation goes on."""

TIMEOUTS_S = {"prepare_weights": PREPARE_TIMEOUT_S, "commit_weights": COMMIT_TIMEOUT_S}
"""Maps a method of the driver to its time limit in seconds. Other methods have `CONTROL_TIMEOUT_S`."""

FIRST_WORD_S = 5.0
"""Seconds that the parent waits beyond each deadline. The driver in the child has the same deadlines, and its message about
a missed deadline is more precise, so it should come first."""


@dataclass(frozen=True)
class ChildStart:
    """The first message to the child: the settings of its engine."""

    folder: Path
    config: EmbeddedEngineConfig
    dtype: torch.dtype
    device: str
    version: WeightVersion
    threads: int
    deterministic: bool


def portable(error: Exception) -> Exception:
    """Returns the error if it survives pickling, otherwise a `RuntimeError` with its text and traceback."""
    if survives_pickling(error):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))


class Link:
    """The connection to a running engine process. Results go to ``callers``; only `call` waits for an answer."""

    def __init__(self, process: Child, connection: Connection, callers: Callers):
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
            EngineDied: the process ended; the message has its traceback.
            WaitTimeout: the process was not ready within ``timeout_s``.
        """
        process, ours = Child.over_socket(
            # A fresh interpreter, because `multiprocessing` would import the user's script a second time.
            [sys.executable, "-P", "-m", "tandem.engines.inference.child"],
            environment=inherited() | own_environment(start.threads),
            grace_s=PROCESS_CLOSE_TIMEOUT_S,
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
        """Calls `Driver.submit` in the engine's process."""
        self._send("submit", number, request, stream)

    def cancel(self, number: int) -> None:
        """Calls `Driver.cancel` in the engine's process."""
        self._send("cancel", number)

    def _send(self, method: str, *arguments: Any, number: int | None = None) -> None:
        """Queues a call; all queued calls are sent as one message. Raises if an argument cannot be pickled."""
        self._outbox.put(pickle.dumps((number, method, arguments)))

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> dict[str, float]:
        """Runs a method of the driver in the engine's process and returns its result.

        Raises:
            EngineDied: the process has ended, or ends before it answers.
            WaitTimeout: no answer came within ``timeout_s``; by default the limit from `TIMEOUTS_S`.
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
            if answer.done():  # the method itself raised it
                raise
            raise WaitTimeout(f"the engine process {self.pid} did not answer {method} within {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def close(self) -> None:
        """Ends the process with SIGTERM, and kills it after `PROCESS_CLOSE_TIMEOUT_S`. Idempotent."""
        self._end("the engine was closed", None)
        self._process.close()
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(PROCESS_CLOSE_TIMEOUT_S)
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
                return  # the reader reports the reason
            if None in messages:
                return

    def _read(self) -> None:
        try:
            reason, cause = self._listen(), None
        except Exception as error:  # the worker boundary: waiting callers get the cause
            reason, cause = f"its pipe broke: {kind_and_text(error)}", error
        self._end(reason, cause)

    def _listen(self) -> str:
        """Processes messages until the process ends; returns the reason of its end."""
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
        if answer is None:  # the answer came too late, and nothing waits for it any more
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)

    def _how_it_ended(self) -> str:
        """Ends the process if it has only closed its pipe, and describes how it ended."""
        self._process.close()
        return self._process.how_it_ended() or f"its process {self.pid} does not end"


class Embedded(Controlled):
    """Base class of both engines. It numbers requests and passes them to ``worker``: a core's driver, or a link to the
    process that has one."""

    def __init__(
        self, worker: Driver | Link, callers: Callers, version: WeightVersion, end: Callable[..., None], *ended: Any
    ):
        """``version``: the version of the core's first weights. ``end`` is called once, with the arguments ``ended``, when
        the engine is closed."""
        self.worker, self._callers, self._version = worker, callers, version
        # Also when the interpreter exits: a thread that still computes then would crash it.
        self._finalize = weakref.finalize(self, end, *ended)

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        return await self._callers.wait(request, self.worker.submit, self.worker.cancel)

    def stream(self, request: LLMRequest) -> AsyncGenerator[NewTokens | LLMResponse, None]:
        """Like `agenerate`, but yields tokens as they are drawn, and the whole response last. Close the generator to
        cancel."""
        return self._callers.stream(request, partial(self.worker.submit, stream=True), self.worker.cancel)

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def capabilities(self) -> frozenset[str]:
        return CAPABILITIES

    def control(self, name: str, *arguments: Any) -> dict[str, float]:
        return self.worker.call(name, *arguments)

    def prepare_weights(self, update: WeightUpdate) -> None:
        self._callers.check()
        self.control("prepare_weights", update)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        report = self.control("commit_weights", version)
        self._version = version
        return report

    def close(self) -> None:
        self._finalize()


class EmbeddedEngine(Embedded):
    """Generates with a core in this process, driven by a thread. The engine owns the core, so nothing else may use it."""

    def __init__(
        self, core: EngineCore, *, version: WeightVersion, threads: int, deterministic: bool = False, keep_kv: bool = False
    ):
        """``threads``: number of CPU threads for the core's computation. Other arguments: see `Driver`."""
        callers = Callers()
        driver = Driver(
            core,
            threads=threads,
            deterministic=deterministic,
            keep_kv=keep_kv,
            deliver=callers.resolve,
            progress=callers.progress,
        )
        thread = threading.Thread(target=drive, args=(driver, callers), name="embedded-engine", daemon=True)
        super().__init__(driver, callers, version, _end, driver, callers, thread)
        thread.start()


class EmbeddedProcess(Embedded):
    """Generates in a child process. Created by `start`."""

    @classmethod
    def start(
        cls,
        folder: Path,
        config: EmbeddedEngineConfig,
        dtype: torch.dtype,
        device: str,
        *,
        version: WeightVersion,
        threads: int,
        deterministic: bool = False,
        timeout_s: float = START_TIMEOUT_S,
    ) -> "EmbeddedProcess":
        """Starts the process and waits until its model is loaded.

        Raises:
            EngineDied: the process ended before that; the message has its traceback.
            WaitTimeout: the process was not ready within ``timeout_s``.
        """
        callers = Callers()
        link = Link.start(ChildStart(folder, config, dtype, device, version, threads, deterministic), callers, timeout_s)
        return cls(link, callers, version, link.close)

    @property
    def pid(self) -> int:
        assert isinstance(self.worker, Link)
        return self.worker.pid

    @property
    def capabilities(self) -> frozenset[str]:
        return CAPABILITIES | {"shared_memory"}

    def profile(self, file: Path | None = None) -> None:
        """Starts a profile of the process. With ``file``: ends it and writes its trace (see `tandem.api.activity`)."""
        self.control("profile", file)

    def set_threads(self, threads: int) -> None:
        """Sets the number of CPU threads from the next step on. Returns once it has taken effect."""
        self.control("set_threads", threads)


def drive(driver: Driver, callers: Callers) -> None:
    try:
        use_gpu(driver.core.device)
        driver.run()
    except Exception as error:  # the worker boundary: waiting callers get the cause
        callers.end(f"its thread raised {kind_and_text(error)}", error)


def _end(driver: Driver, callers: Callers, thread: threading.Thread) -> None:
    callers.end("the engine was closed")
    driver.stop()
    if thread is not threading.current_thread():
        thread.join(THREAD_CLOSE_TIMEOUT_S)
