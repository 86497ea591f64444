"""The loop of the one thread that drives the core: run the waiting commands, then one step, and again.

Commands come from other threads through a queue. The results of a step are delivered in one batch. The thread waits for a
command only when there is nothing to compute. New weights are checked and laid out in the thread that brings them.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson
import torch
from safetensors import SafetensorError

from tandem.api.activity import ProcessProfile
from tandem.api.engines import InferencePart
from tandem.api.failures import EngineDied, EpisodeFailure, WaitTimeout, WeightUpdateFailed, WrongWorkflow
from tandem.api.requests import LLMRequest, LLMResponse, NewTokens, StopReason
from tandem.api.weights import Adapter, FolderSource, WeightUpdate, WeightVersion, tensor_digest, version_digest
from tandem.config.errors import kind_and_text
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.decoder import NewWeights
from tandem.engines.inference.engine_calls import Result
from tandem.models.allocator import keep_freed_memory
from tandem.models.lora import A, B, merged

T = TypeVar("T")

CONTROL_TIMEOUT_S = 60.0
"""Maximum seconds for pause, sleep, wake and statistics, including the wait for the current step."""

COMMIT_TIMEOUT_S = 600.0
"""Seconds for a switch of weights, which recomputes the keys and values of all running requests."""


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
        self._num_delivered: dict[int, int] = {}
        """Number of a streamed request → number of its tokens that were delivered."""

        self._staged: tuple[WeightVersion, NewWeights] | None = None
        self._profiled: ProcessProfile | None = None

    # ------------------------------------------------------------------ the loop

    @torch.inference_mode()
    def run(self) -> None:
        """Drives the core until `stop`, or until it raises. Then pending calls fail, and the exception is raised here."""
        keep_freed_memory()
        torch.set_num_threads(self._threads)  # torch keeps this setting per calling thread
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
        """Runs all waiting commands. Waits for a command if there is nothing to compute."""
        busy = not self._paused and (self._pending or self.core.has_work)
        with contextlib.suppress(queue.Empty):
            command = self._commands.get(not busy, self._seconds_to_deadline())
            while True:
                if command is not None:
                    command()
                command = self._commands.get_nowait()
        self._expire()

    def _seconds_to_deadline(self) -> float | None:
        """Seconds until the first deadline of a request that is not admitted yet; None without one."""
        return max(0.0, min(self._expiry.values()) - time.monotonic()) if self._expiry else None

    def _expire(self) -> None:
        """Ends requests whose deadline passed before they were admitted; the core does the same for admitted requests."""
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
        if self._num_delivered:
            self._deliver_tokens()
        if results:
            self._hand_over(results)

    def _deliver_tokens(self) -> None:
        """Delivers the newest tokens of running requests that are streamed."""
        drawn = []
        for number, sent in self._num_delivered.items():
            new = self.core.drawn(number, sent)
            if new.output_ids:
                self._num_delivered[number] = sent + len(new.output_ids)
                drawn.append((number, new))
        if drawn:
            self._progress(drawn)

    def _hand_over(self, results: list[Result]) -> None:
        for number, _ in results:
            self._num_delivered.pop(number, None)
        self._deliver(results)

    def _admit(self) -> list[Result]:
        """Passes new requests to the core. Returns the results of the requests that the core refused.

        In deterministic mode, requests go in order of their noise keys instead of their arrival.
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

    def _call(self, action: str, function: Callable[[], T], timeout_s: float = CONTROL_TIMEOUT_S, fatal: bool = False) -> T:
        """Runs a function in the driving thread, between two steps. ``fatal``: its exception also ends the engine.

        Raises:
            WaitTimeout: the function was not done within ``timeout_s``.
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
            if answer.done():  # raised by the function itself
                raise
            raise WaitTimeout(f"the inference engine did not complete {action} within {timeout_s:g} s") from None

    def submit(self, number: int, request: LLMRequest, stream: bool = False) -> None:
        """Queues a request. Its result is delivered under ``number``; with ``stream``, also its tokens as they are drawn."""
        expires = None if request.deadline_s is None else time.monotonic() + request.deadline_s

        def add() -> None:
            self._pending[number] = request
            if expires is not None:
                self._expiry[number] = expires
            if stream:
                self._num_delivered[number] = 0

        self._put(add)

    def cancel(self, number: int) -> None:
        """Ends a request and frees its memory; nothing is delivered for it. An unknown number is ignored."""

        def drop() -> None:
            self._num_delivered.pop(number, None)
            if number in self._pending:
                self._take(number)
            else:
                self.core.cancel(number)

        with contextlib.suppress(EngineDied):
            self._put(drop)

    def stop(self) -> None:
        """Ends the loop after the current step."""
        self._stopping = True
        self._commands.put(None)

    # ------------------------------------------------------------------ control

    def call(self, method: str, *arguments: Any) -> dict[str, float]:
        """Runs a method of `InferenceEngine`. Updates are prepared in the calling thread; all other work is done in the
        driving thread, between two steps.

        While paused, arriving requests are queued and counted as waiting. A deadline that passes during the pause ends a
        queued request at once, and a running one at the next step.
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
        """Begins a profile of this process; with ``file``, ends it and writes the trace there."""
        if file is None:
            self._profiled = ProcessProfile()
        elif self._profiled is not None:
            file.write_bytes(orjson.dumps(self._profiled.stop("inference engine")))
            self._profiled = None

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def prepare_weights(self, update: WeightUpdate) -> None:
        """Stages the update, in the calling thread."""
        self.discard_weights()
        staged = stage_update(self.core, update)
        with self._lock:
            self._staged = (update.version, staged)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        """Switches to the prepared weights, see `InferenceEngine.commit_weights`.

        Raises:
            WeightUpdateFailed: this version was not prepared.
        """
        with self._lock:
            if self._staged is None or self._staged[0] != version:
                prepared = "nothing" if self._staged is None else f"version {self._staged[0].number}"
                raise WeightUpdateFailed(f"version {version.number} cannot be committed: {prepared} is prepared")
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
    """Returns the response to a request that ends before it has begun."""
    return LLMResponse(request.input_ids, (), (), (), StopReason.CANCELLED, request.gconfig.temperature)


HASH_THREADS = 2
"""Number of threads that compute digests while tensors are copied; an update uses at most this many cores for digests."""


def stage_update(core: EngineCore, update: WeightUpdate) -> NewWeights:
    """Stages the update beside the weights that the core serves; generation goes on meanwhile.

    Raises:
        WeightUpdateFailed: a tensor is missing, unknown, of the wrong shape, or differs from the bytes that were sent; the
            message names it.
    """
    if version_digest(update.digests) != update.version.digest:
        raise WeightUpdateFailed(
            f"version {update.version.number}: the digests of its tensors do not give the version's digest "
            f"{update.version.digest[:12]}…; the update was mixed up in transit"
        )
    update = replace(update, source=update.source.received_on(core.device))
    try:
        with (
            ThreadPoolExecutor(HASH_THREADS, "weight-digest") as pool,
            contextlib.closing(verified(update, pool)) as tensors,  # closed at once if not read to its end
        ):
            if update.adapter is not None:
                return core.stage(with_adapter(core, tensors, update.adapter))
            return core.stage(tensors)
    except (ValueError, KeyError, RuntimeError, OSError, MemoryError, SafetensorError) as error:
        if isinstance(error, WeightUpdateFailed):
            raise
        raise WeightUpdateFailed(f"version {update.version.number} cannot be staged: {error}") from error


def with_adapter(
    core: EngineCore, tensors: Iterable[tuple[str, torch.Tensor]], adapter: Adapter
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights of the core's model folder with the adapter merged in, equal to the trainer's merged weights to the
    bit. The files are memory-mapped and read again for each update, so no copy of them is kept.

    Raises:
        WeightUpdateFailed: a tensor of the adapter belongs to no matrix of the model; the message names it.
    """
    factors = {name: tensor.to(core.device, copy=True) for name, tensor in tensors}
    for name, tensor in FolderSource(core.folder).tensors():
        weight, module = tensor.to(core.device, adapter.dtype), core.own_name(name).removesuffix(".weight")
        a, b = (factors.pop(f"{module}.{which}.weight", None) for which in (A, B))
        yield name, weight if a is None or b is None else merged(weight, a, b, adapter.scaling)
    if factors:
        raise WeightUpdateFailed(f"adapter: {min(factors)!r} belongs to no matrix of {core.folder}")


def verified(update: WeightUpdate, pool: ThreadPoolExecutor) -> Generator[tuple[str, torch.Tensor]]:
    """Yields a private copy of each tensor; its digest is computed while the consumer reads it.

    The sender's memory is read once, so a change of it either shows in the digest or does not reach the consumer. A tensor
    is valid only until the next one is requested, so its digest is awaited before that.
    """
    missing = set(update.digests)
    copies = _Copies()
    for name, tensor in update.source.tensors():
        if name not in missing:
            raise WeightUpdateFailed(f"version {update.version.number}: tensor {name!r} came twice or was not announced")
        missing.remove(name)
        private = tensor if update.source.is_private else copies.of(tensor)
        digest: Future[str] = pool.submit(tensor_digest, private, update.key)
        yield name, private
        # The consumer may have laid out wrong bytes by now; they are never served, because the whole update fails here.
        if digest.result() != update.digests[name]:
            raise WeightUpdateFailed(
                f"version {update.version.number}: tensor {name!r} arrived with digest {digest.result()[:12]}…, "
                f"sent was {update.digests[name][:12]}…; the bytes changed in transit"
            )
    if missing:
        raise WeightUpdateFailed(
            f"version {update.version.number}: {len(missing)} tensors did not arrive, first {min(missing)!r}"
        )


class _Copies:
    """Makes one copy at a time, always in the same memory, so the extra memory is that of the largest tensor."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy on the same device, valid until the next call."""
        if self._memory.numel() < tensor.nbytes or self._memory.device != tensor.device:
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old buffer before the new one is allocated
            self._memory = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        return self._memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
