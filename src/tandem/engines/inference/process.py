"""The embedded engine in a process of its own: generation has its own threads (*decoupled*), weights in shared memory."""

import weakref
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch

from tandem.api.engines import InferenceEngine, InferencePart
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.callers import Callers, Piece
from tandem.engines.inference.driver import COMMIT_TIMEOUT_S, CONTROL_TIMEOUT_S
from tandem.engines.inference.embedded import CAPABILITIES
from tandem.engines.inference.link import Link
from tandem.engines.inference.messages import Add, Cancel, Start

START_TIMEOUT_S = 300.0
"""Importing, and loading a model from a slow disk."""

PREPARE_TIMEOUT_S = 300.0
"""Reading, checking and laying out all weights while generation goes on."""


class EmbeddedProcess(InferenceEngine):
    """Generates in a child process; made by `start`. What it does is what `EmbeddedEngine` does."""

    def __init__(self, link: Link, callers: Callers, version: WeightVersion):
        self._link, self._callers, self._version = link, callers, version
        self._finalize = weakref.finalize(self, link.close)

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
        link = Link.start(Start(folder, config, dtype, device, version, threads, deterministic), callers, timeout_s)
        return cls(link, callers, version)

    @property
    def pid(self) -> int:
        """Number of the engine's process."""
        return self._link.pid

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """See `InferenceEngine`."""
        return await self._callers.wait(
            request,
            lambda number, wanted: self._link.send(Add(number, wanted)),
            lambda number: self._link.send(Cancel(number)),
        )

    def stream(self, request: LLMRequest) -> AsyncGenerator[Piece | LLMResponse, None]:
        """Like `agenerate`, but yields tokens as they are drawn, and last the whole response; close it to cancel."""
        return self._callers.stream(
            request,
            lambda number, wanted: self._link.send(Add(number, wanted, stream=True)),
            lambda number: self._link.send(Cancel(number)),
        )

    @property
    def version(self) -> WeightVersion:
        """See `InferenceEngine`."""
        return self._version

    @property
    def capabilities(self) -> frozenset[str]:
        """See `InferenceEngine`."""
        return CAPABILITIES | {"shared_memory"}

    def prepare_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine`; the child reads the tensors and recomputes their digests."""
        self._call("prepare_weights", update, timeout_s=PREPARE_TIMEOUT_S)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        """See `InferenceEngine`."""
        report = self._call("commit_weights", version, timeout_s=COMMIT_TIMEOUT_S)
        self._version = version
        return report

    def discard_weights(self) -> None:
        """See `InferenceEngine`."""
        self._call("discard_weights")

    def pause(self) -> None:
        """See `InferenceEngine`; requests that come meanwhile are queued and counted as ``waiting``."""
        self._call("pause")

    def resume(self) -> None:
        """See `InferenceEngine`."""
        self._call("resume")

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        """See `InferenceEngine`. Raises `RuntimeError` while requests are under way."""
        self._call("sleep", parts)

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        """See `InferenceEngine`."""
        self._call("wake", parts)

    def flush(self) -> None:
        """Requests to come share nothing that was computed of prompts before."""
        self._call("flush")

    def statistics(self) -> dict[str, float]:
        """See `InferenceEngine`."""
        return self._call("statistics")

    def close(self) -> None:
        """See `InferenceEngine`."""
        self._finalize()

    def _call(self, method: str, *arguments: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, float]:
        # The driver over there has the same deadline and knows better what it waits for, so it may speak first.
        return dict(self._link.call(method, arguments, timeout_s + 5.0) or {})
