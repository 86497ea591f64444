"""The embedded engine: its core runs in a thread of the trainer's process, or in a process of its own.

In one process (*colocate*) training and generation take turns on the same cores, so each has all threads. With a process of
its own (*decoupled*) generation has its own threads, and weights come through shared memory.

In deterministic mode, `pause` the engine, submit a whole wave of requests, and `resume` it once ``statistics()["waiting"]``
counts them all: they are admitted in order of their noise keys, so that batches, and with them every bit, do not depend on
arrival.
"""

import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandem.api.requests import LLMRequest, LLMResponse, NewTokens
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.config.errors import kind_and_text
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.callers import Callers
from tandem.engines.inference.controlled import Controlled
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.driver import Driver
from tandem.engines.inference.link import ChildStart, Link
from tandem.engines.inference.threads import use_gpu

CLOSE_TIMEOUT_S = 30.0

START_TIMEOUT_S = 300.0
"""Importing, and loading a model from a slow disk."""

CAPABILITIES = frozenset({"staged", "keep_kv", "sleep_weights", "sleep_kv_cache", "noise_key", "adapter"})


class Embedded(Controlled):
    """Both kinds: requests get numbers and go to a worker, which is the driver of a core or the link to one."""

    def __init__(
        self, worker: Driver | Link, callers: Callers, version: WeightVersion, end: Callable[..., None], *ended: Any
    ):
        """``version`` is that of the weights which the core was made with; ``end`` is called once, with ``ended``."""
        self.worker, self._callers, self._version = worker, callers, version
        # Also at the end of the interpreter: a thread that is still computing then would bring it down.
        self._finalize = weakref.finalize(self, end, *ended)

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        return await self._callers.wait(request, self.worker.submit, self.worker.cancel)

    def stream(self, request: LLMRequest) -> AsyncGenerator[NewTokens | LLMResponse, None]:
        """Like `agenerate`, but yields tokens as they are drawn, and last the whole response; close it to cancel."""
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
    """Generates with a core of this process, in a thread that drives it. Owns the core from now on."""

    def __init__(
        self, core: EngineCore, *, version: WeightVersion, threads: int, deterministic: bool = False, keep_kv: bool = False
    ):
        """``threads``: CPU threads of the core's computation."""
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
    """Generates in a child process; made by `start`."""

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
            EngineDied: it ended before that; with its traceback.
            WaitTimeout: it was not ready within ``timeout_s``.
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
        """Begins a profile of the process; with ``file``: ends it, and writes the trace (`tandem.api.profile`)."""
        self.control("profile", file)

    def set_threads(self, threads: int) -> None:
        """From the next step on it computes with so many CPU threads; returns once that is so."""
        self.control("set_threads", threads)


def drive(driver: Driver, callers: Callers) -> None:
    try:
        use_gpu(driver.core.device)
        driver.run()
    except Exception as error:  # the worker boundary: whoever waits gets the cause
        callers.end(f"its thread raised {kind_and_text(error)}", error)


def _end(driver: Driver, callers: Callers, thread: threading.Thread) -> None:
    callers.end("the engine was closed")
    driver.stop()
    if thread is not threading.current_thread():
        thread.join(CLOSE_TIMEOUT_S)
