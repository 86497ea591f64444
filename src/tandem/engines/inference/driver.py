"""One thread that drives the core: commands between two steps, then a step.

Consumes commands of other threads, from a queue. Produces results of requests, in one batch a step. Waits only when
there is nothing to compute; a command unblocks it.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson
import torch

from tandem.api.engines import InferencePart
from tandem.api.failures import EngineDied, EpisodeFailure, WaitTimeout, WeightUpdateFailed, WrongWorkflow
from tandem.api.profile import ProcessProfile
from tandem.api.requests import LLMRequest, LLMResponse, NewTokens, StopReason
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.config.errors import kind_and_text
from tandem.engines.inference.callers import Result
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.fused_weights import NewWeights
from tandem.engines.inference.staging import stage_update
from tandem.models.allocator import keep_freed_memory

T = TypeVar("T")

CONTROL_TIMEOUT_S = 60.0
"""Seconds that pause, sleep, wake and statistics may take: one step, and a little."""

COMMIT_TIMEOUT_S = 600.0
"""A switch of weights recomputes the keys and values of everything that runs, which may be long contexts."""


class Driver:
    """Owns a core. `run` is the loop of one thread; all other methods may be called from any other thread."""

    def __init__(
        self,
        core: EngineCore,
        *,
        threads: int,
        deterministic: bool,
        keep_kv: bool,
        deliver: Callable[[Sequence[Result]], None],
        progress: Callable[[Sequence[tuple[int, NewTokens]]], None],
    ):
        self.core, self._threads, self._deterministic, self._keep_kv = core, threads, deterministic, keep_kv
        self._deliver, self._progress = deliver, progress
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        self._ended: str | None = None
        self._stopping = self._paused = False
        self._pending: dict[int, LLMRequest] = {}
        self._expiry: dict[int, float] = {}
        self._told: dict[int, int] = {}
        """Tokens handed over so far, of requests that are streamed."""

        self._staged: tuple[WeightVersion, NewWeights] | None = None
        self._profiled: ProcessProfile | None = None

    # ------------------------------------------------------------------ the loop

    @torch.inference_mode()
    def run(self) -> None:
        """Drives the core until `stop`, or until it raises; what it raised is raised here once every call has failed."""
        keep_freed_memory()
        torch.set_num_threads(self._threads)  # counted for each thread that computes
        reason = "it was closed"
        try:
            while not self._stopping:
                self._take_commands()
                if not self._paused and not self._stopping:
                    self._step()
        except BaseException as error:
            reason = kind_and_text(error)
            raise
        finally:
            with self._lock:
                self._ended = reason
                calls, self._calls = self._calls, set()
            for answer in calls:
                answer.set_exception(EngineDied(reason))

    def _take_commands(self) -> None:
        """Runs all commands that wait; waits for one when there is nothing to compute."""
        busy = not self._paused and (self._pending or self.core.has_work)
        with contextlib.suppress(queue.Empty):
            command = self._commands.get(not busy, self._patience())
            while True:
                if command is not None:
                    command()
                command = self._commands.get_nowait()
        self._expire()

    def _patience(self) -> float | None:
        """Seconds until the first deadline of a request that was not admitted yet; None without one."""
        return max(0.0, min(self._expiry.values()) - time.monotonic()) if self._expiry else None

    def _expire(self) -> None:
        """Ends requests whose deadline passed before they were admitted; the core watches those it has."""
        now = time.monotonic()
        expired = [number for number, at in self._expiry.items() if at <= now]
        if expired:
            self._hand_over([(number, cancelled(self._take(number))) for number in expired])

    def _take(self, number: int) -> LLMRequest:
        self._expiry.pop(number, None)
        return self._pending.pop(number)

    def _step(self) -> None:
        results: list[Result] = self._admit()
        if self.core.has_work:
            results += self.core.step()
        if self._told:
            self._tell()
        if results:
            self._hand_over(results)

    def _tell(self) -> None:
        """Hands over the newest tokens of requests that are streamed and go on."""
        drawn = []
        for number, told in self._told.items():
            new = self.core.drawn(number, told)
            if new.output_ids:
                self._told[number] = told + len(new.output_ids)
                drawn.append((number, new))
        if drawn:
            self._progress(drawn)

    def _hand_over(self, results: list[Result]) -> None:
        for number, _ in results:
            self._told.pop(number, None)
        self._deliver(results)

    def _admit(self) -> list[Result]:
        """Gives the requests that arrived to the core; returns those that it refused.

        In deterministic mode they go in order of their noise keys, not of their arrival.
        """
        numbers = list(self._pending)
        if self._deterministic:
            numbers.sort(key=lambda number: self._pending[number].noise_key or ())
        refused: list[Result] = []
        for number in numbers:
            expires = self._expiry.get(number)
            request = self._take(number)
            if expires is not None:  # the core counts from now, the caller from its submission
                request = replace(request, deadline_s=max(0.0, expires - time.monotonic()))
            try:
                self.core.add(number, request)
            except (EpisodeFailure, WrongWorkflow) as failure:
                refused.append((number, failure))
        return refused

    # ------------------------------------------------------------------ commands

    def _put(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._ended is not None:
                raise EngineDied(self._ended)
            self._commands.put(command)

    def _call(self, what: str, function: Callable[[], T], timeout_s: float = CONTROL_TIMEOUT_S, fatal: bool = False) -> T:
        """Runs a function in the driving thread, between two steps. ``fatal``: what it raises ends the engine too.

        Raises:
            WaitTimeout: it was not done within ``timeout_s``.
            EngineDied: the engine has ended.
        """
        answer: Future[T] = Future()

        def run() -> None:
            with self._lock:
                self._calls.discard(answer)
            try:
                answer.set_result(function())
            except Exception as error:  # the worker boundary: the caller gets it
                answer.set_exception(error)
                if fatal and not isinstance(error, WeightUpdateFailed):
                    raise

        with self._lock:
            if self._ended is not None:
                raise EngineDied(self._ended)
            self._calls.add(answer)
            self._commands.put(run)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            if answer.done():  # the function's own
                raise
            raise WaitTimeout(f"the inference engine did not come to {what} within {timeout_s:g} s") from None

    def submit(self, number: int, request: LLMRequest, stream: bool = False) -> None:
        """Queues a request; its result is delivered under this number, and its tokens on the way with ``stream``."""
        expires = None if request.deadline_s is None else time.monotonic() + request.deadline_s

        def add() -> None:
            self._pending[number] = request
            if expires is not None:
                self._expiry[number] = expires
            if stream:
                self._told[number] = 0

        self._put(add)

    def cancel(self, number: int) -> None:
        """Frees what the request holds; nothing is delivered for it. An unknown number is fine."""

        def drop() -> None:
            self._told.pop(number, None)
            if number in self._pending:
                self._take(number)
            else:
                self.core.cancel(number)

        with contextlib.suppress(EngineDied):
            self._put(drop)

    def stop(self) -> None:
        """Ends the loop after the step that it is in."""
        self._stopping = True
        self._commands.put(None)

    # ------------------------------------------------------------------ control

    def call(self, method: str, *arguments: Any) -> dict[str, float]:
        """Does what this method of `InferenceEngine` asks for: an update is prepared in the thread that calls, all else is
        done in the driving thread, between two steps.

        While paused, requests that arrive are queued and counted as waiting. A deadline that passes meanwhile ends a queued
        request at once, and one that was running at the next step.
        """
        between_steps: dict[str, Callable[..., Any]] = {
            "pause": partial(self._set_paused, True),
            "resume": partial(self._set_paused, False),
            "flush": self.core.flush,
            "sleep": self._sleep,
            "wake": self.core.wake,
            "statistics": self._statistics,
            "set_threads": self._set_threads,
            "profile": self._profile,
        }
        if method in between_steps:
            return self._call(method, partial(between_steps[method], *arguments)) or {}
        return getattr(self, method)(*arguments) or {}

    def _set_threads(self, threads: int) -> dict[str, float]:
        torch.set_num_threads(threads)
        return {"threads": float(torch.get_num_threads())}

    def _profile(self, file: Path | None) -> None:
        """Begins a profile of this process; with ``file``: ends it, and writes the trace."""
        if file is None:
            self._profiled = ProcessProfile()
        elif self._profiled is not None:
            file.write_bytes(orjson.dumps(self._profiled.stop("inference engine")))
            self._profiled = None

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def prepare_weights(self, update: WeightUpdate) -> None:
        """The work is done in the thread that calls."""
        self.discard_weights()
        staged = stage_update(self.core, update)
        with self._lock:
            self._staged = (update.version, staged)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        """Commits, as `InferenceEngine.commit_weights` says.

        Raises:
            WeightUpdateFailed: this version was not prepared.
        """
        with self._lock:
            if self._staged is None or self._staged[0] != version:
                held = "nothing" if self._staged is None else f"version {self._staged[0].number}"
                raise WeightUpdateFailed(f"version {version.number} cannot be committed: {held} is prepared")
            staged, self._staged = self._staged[1], None
        return self._call("the switch of weights", lambda: self._switch(staged, version), COMMIT_TIMEOUT_S, fatal=True)

    def _switch(self, staged: NewWeights, version: WeightVersion) -> dict[str, float]:
        began = time.perf_counter()
        recompute_s = self.core.swap(staged, version, keep_kv=self._keep_kv).get("recompute_s", 0.0)
        return {"pause_s": time.perf_counter() - began - recompute_s, "recompute_s": recompute_s}

    def discard_weights(self) -> None:
        with self._lock:
            self._staged = None

    def _sleep(self, parts: tuple[InferencePart, ...]) -> None:
        if self._pending or self.core.has_work:
            raise RuntimeError(
                f"sleep is refused while requests are under way ({len(self._pending)} not admitted yet); "
                "wait for them or cancel them first"
            )
        self.core.sleep(parts)

    def _statistics(self) -> dict[str, float]:
        counters = self.core.statistics()
        return {**counters, "waiting": counters.get("waiting", 0.0) + len(self._pending)}


def cancelled(request: LLMRequest) -> LLMResponse:
    """The response to a request that was never begun."""
    return LLMResponse(request.input_ids, (), (), (), StopReason.CANCELLED, request.gconfig.temperature)
