"""The embedded engine in the trainer's process: a thread of its own drives the core.

Training and generation take turns on the same cores (*colocate*), so each has all threads. In deterministic mode,
`pause` the engine, submit a whole wave of requests, and `resume` it once ``statistics()["waiting"]`` counts them all:
they are admitted in order of their noise keys, so that batches, and with them every bit, do not depend on arrival.
"""

import threading
import weakref
from collections.abc import AsyncGenerator
from functools import partial

from tandem.api.engines import InferenceEngine, InferencePart
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.engines.inference.callers import Callers, Piece
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.driver import Driver

CLOSE_TIMEOUT_S = 30.0

CAPABILITIES = frozenset({"staged", "keep_kv", "sleep_weights", "sleep_kv_cache", "noise_key", "adapter"})


class EmbeddedEngine(InferenceEngine):
    """Generates with a core of this process. Owns the core from now on.

    ``version`` is that of the weights which the core was made with; ``threads`` are CPU threads of its computation.
    """

    def __init__(
        self, core: EngineCore, *, version: WeightVersion, threads: int, deterministic: bool = False, keep_kv: bool = False
    ):
        self._version = version
        self._callers = Callers()
        self._driver = Driver(
            core,
            threads=threads,
            deterministic=deterministic,
            keep_kv=keep_kv,
            deliver=self._callers.resolve,
            progress=self._callers.progress,
        )
        self._thread = threading.Thread(
            target=_drive, args=(self._driver, self._callers), name="embedded-engine", daemon=True
        )
        # Also at the end of the interpreter: a thread that is still computing then would bring it down.
        self._finalize = weakref.finalize(self, _end, self._driver, self._callers, self._thread)
        self._thread.start()

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """See `InferenceEngine`."""
        return await self._callers.wait(request, self._driver.submit, self._driver.cancel)

    def stream(self, request: LLMRequest) -> AsyncGenerator[Piece | LLMResponse, None]:
        """Like `agenerate`, but yields tokens as they are drawn, and last the whole response; close it to cancel."""
        return self._callers.stream(request, partial(self._driver.submit, stream=True), self._driver.cancel)

    @property
    def version(self) -> WeightVersion:
        """See `InferenceEngine`."""
        return self._version

    @property
    def capabilities(self) -> frozenset[str]:
        """See `InferenceEngine`."""
        return CAPABILITIES

    def prepare_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine`; the copying is done in the thread that calls."""
        self._callers.check()
        self._driver.prepare_weights(update)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        """See `InferenceEngine`."""
        report = self._driver.commit_weights(version)
        self._version = version
        return report

    def discard_weights(self) -> None:
        """See `InferenceEngine`."""
        self._driver.discard_weights()

    def pause(self) -> None:
        """See `InferenceEngine`; requests that come meanwhile are queued and counted as ``waiting``."""
        self._driver.pause()

    def resume(self) -> None:
        """See `InferenceEngine`."""
        self._driver.resume()

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        """See `InferenceEngine`. Raises `RuntimeError` while requests are under way."""
        self._driver.sleep(parts)

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        """See `InferenceEngine`."""
        self._driver.wake(parts)

    def flush(self) -> None:
        """Requests to come share nothing that was computed of prompts before."""
        self._driver.flush()

    def statistics(self) -> dict[str, float]:
        """See `InferenceEngine`."""
        return self._driver.statistics()

    def close(self) -> None:
        """See `InferenceEngine`."""
        self._finalize()


def _drive(driver: Driver, callers: Callers) -> None:
    try:
        driver.run()
    except Exception as error:  # the worker boundary: whoever waits gets the cause
        callers.end(f"its thread raised {type(error).__name__}: {error}", error)


def _end(driver: Driver, callers: Callers, thread: threading.Thread) -> None:
    callers.end("the engine was closed")
    driver.stop()
    if thread is not threading.current_thread():
        thread.join(CLOSE_TIMEOUT_S)
