"""The common part of the routes: the engine, the requests under way, and the server's readiness."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tandem.api.engines import InferencePart
from tandem.api.failures import DataFailure, EngineDied, WaitTimeout
from tandem.api.requests import LLMRequest, LLMResponse, NewTokens, NoiseKey, StopReason
from tandem.api.weights import WeightVersion
from tandem.config.generation import GenerationConfig
from tandem.engines.inference.embedded import EmbeddedEngine, EmbeddedProcess
from tandem.engines.inference.remote.tandem_server import PROTOCOL
from tandem.engines.inference.serve.limits import ServiceLimits
from tandem.engines.inference.serve.text import Tokenizers
from tandem.protocol.media_intake import LACKING
from tandem.protocol.refusal import Refusal

LOG = logging.getLogger("tandem.serve")


@dataclass
class EngineService:
    """One served engine. Lives on one event loop."""

    engine: EmbeddedEngine | EmbeddedProcess
    tokenizers: Tokenizers
    name: str
    folder: Path
    vocab_size: int
    limits: ServiceLimits
    initial: WeightVersion
    """The version that the engine was made with."""

    dtype: str
    """The engine's precision, as torch writes it, without ``torch.``."""

    run: str | None = None
    """The training run that may change the weights; None: nobody's, the next that asks gets it."""

    weights_roots: tuple[Path, ...] = ()
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    under_way: int = 0
    """Completions that were asked for and have not ended."""

    draining: bool = False
    paused: bool = False
    asleep: frozenset[InferencePart] = frozenset()
    weights_missing: bool = False
    """The weights slept and none were delivered since."""

    died: str | None = None
    on_death: Callable[[], None] = lambda: None
    _heard: float = field(default_factory=time.monotonic)
    _last_token: float | None = None
    _probe: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ completions

    async def complete(self, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
        """All completions, generated together. Cancelling it frees them all; so does the failure of one.

        Raises:
            Refusal: 400 the engine does not take the request; 503 it cannot answer now.
        """
        with self._admitted(len(requests)), self._using(requests), self._failures():
            tasks = [asyncio.ensure_future(self.engine.agenerate(self._bounded(request))) for request in requests]
            try:
                responses = await asyncio.gather(*tasks)
            finally:
                await _cancel(tasks)
        if any(response.output_ids for response in responses):
            self._last_token = time.monotonic()
        return responses

    async def stream(self, requests: Sequence[LLMRequest]) -> AsyncGenerator[tuple[int, NewTokens | LLMResponse], None]:
        """(number of the request, what is new of it), and last of each its whole response. Close it to cancel.

        Raises:
            Refusal: as `complete`, also on the way.
        """
        news: asyncio.Queue[tuple[int, NewTokens | LLMResponse | Exception]] = asyncio.Queue()
        with self._admitted(len(requests)), self._using(requests), self._failures():
            tasks = [asyncio.create_task(self._follow(n, request, news)) for n, request in enumerate(requests)]
            try:
                running = len(tasks)
                while running:
                    number, new = await news.get()
                    if isinstance(new, Exception):
                        raise new
                    running -= isinstance(new, LLMResponse)
                    if new.output_ids:
                        self._last_token = time.monotonic()
                    yield number, new
            finally:
                await _cancel(tasks)

    async def _follow(self, number: int, request: LLMRequest, news: asyncio.Queue[Any]) -> None:
        try:
            async with aclosing(self.engine.stream(self._bounded(request))) as pieces:
                async for piece in pieces:
                    news.put_nowait((number, piece))
        except Exception as error:  # the request boundary: whoever reads the stream raises it
            news.put_nowait((number, error))

    def _bounded(self, request: LLMRequest) -> LLMRequest:
        limit = self.limits.request_timeout_s
        return replace(request, deadline_s=limit if request.deadline_s is None else min(limit, request.deadline_s))

    @contextlib.contextmanager
    def _admitted(self, count: int) -> Iterator[None]:
        if self.draining:
            raise Refusal(503, "the server is shutting down", code="draining", headers={"Connection": "close"})
        if self.weights_missing or "weights" in self.asleep:
            raise Refusal(503, "the weights sleep; deliver them again before the next token", code="asleep")
        if self.under_way + count > self.limits.max_requests:
            message = f"{self.under_way} completions are under way, of at most {self.limits.max_requests}; try again later"
            raise Refusal(503, message, code="full", headers={"Retry-After": "1"})
        self.under_way += count
        try:
            yield
        finally:
            self.under_way -= count

    def _using(self, requests: Sequence[LLMRequest]) -> contextlib.AbstractContextManager[None]:
        """A block in which the media store keeps what these show."""
        return self.tokenizers.intake.using([number for request in requests for number in {*request.media} - {0}])

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except DataFailure as failure:
            if failure.reason == "media_unreadable":
                LOG.warning("%s", failure)
            if failure.reason in ("media_missing", "media_unreadable"):  # names a folder, which is no client's to know
                raise Refusal(400, f"media_missing: {LACKING}", code="media_missing") from failure
            raise Refusal(400, str(failure), code=failure.reason) from failure
        except EngineDied as error:
            raise self.dead(error) from error

    def dead(self, error: EngineDied) -> Refusal:
        """Notes that the engine is gone, which ends the server."""
        if self.died is None:
            self.died = str(error)
            self.on_death()
        return Refusal(503, f"the engine is gone: {self.died.splitlines()[0]}", code="engine_died")

    # ------------------------------------------------------------------ state

    def identity(self) -> dict[str, Any]:
        """The facts about this server that a client needs."""
        version = self.engine.version
        return {
            "status": "ok" if self.died is None else "dead",
            "kind": "tandem",
            "protocol": PROTOCOL,
            "model": self.name,
            "dtype": self.dtype,
            "instance": self.instance,
            "run": self.run,
            "version": {"number": version.number, "digest": version.digest, "run": version.run, "model": version.model},
            "capabilities": sorted(self.capabilities()),
            "max_tokens": self.limits.max_tokens,
            "media": list(self.tokenizers.media),
            "under_way": self.under_way,
            "paused": self.paused,
            "draining": self.draining,
            "asleep": sorted(self.asleep),
        }

    def capabilities(self) -> frozenset[str]:
        """Those of the engine, as seen over HTTP: no memory is shared, a folder is read where one is allowed, and a folder's
        update says nothing of an adapter's terms."""
        return (self.engine.capabilities - {"shared_memory", "adapter"}) | (
            frozenset({"disk"}) if self.weights_roots else frozenset()
        )

    async def unready(self) -> list[str]:
        """Why the server should get no requests now; empty: it has current weights and generated a token recently."""
        reasons = [
            why
            for why, holds in (
                ("the engine is gone", self.died is not None),
                ("the server is shutting down", self.draining),
                ("generation is paused", self.paused),
                ("weights must be delivered", self.weights_missing or "weights" in self.asleep),
            )
            if holds
        ]
        if not reasons and not self._recent():
            reasons += await self._try()
        return reasons

    def heard(self) -> None:
        self._heard = time.monotonic()

    def abandoned(self) -> bool:
        """True if the run that has the server seems to be gone: it asks for nothing and says nothing."""
        silent_s = time.monotonic() - self._heard
        return self.run is not None and not self.under_way and silent_s > self.limits.owner_silent_s

    def token_age_s(self) -> float | None:
        """Seconds since a token was generated; None: none yet."""
        return None if self._last_token is None else time.monotonic() - self._last_token

    def _recent(self) -> bool:
        age = self.token_age_s()
        return age is not None and age <= self.limits.ready_window_s

    async def _try(self) -> list[str]:
        """Generates one token, for all who ask meanwhile."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._generate_one())
        await asyncio.wait([self._probe])
        return [] if self._recent() else ["no token could be generated"]

    async def _generate_one(self) -> None:
        gconfig = GenerationConfig(n_samples=1, max_new_tokens=1, greedy=True)
        request = LLMRequest((0,), gconfig, NoiseKey(0), deadline_s=self.limits.ready_timeout_s)
        with contextlib.suppress(Refusal, TimeoutError):
            async with asyncio.timeout(self.limits.ready_timeout_s + 1.0):
                await self.complete([request])

    async def watch(self, every_s: float = 1.0) -> None:
        """Notices the end of the engine, also while nobody asks."""
        while self.died is None:
            await asyncio.sleep(every_s)
            try:
                await asyncio.to_thread(self.engine.statistics)
            except WaitTimeout:
                continue  # a long step; `/ready` is what judges that
            except EngineDied as error:
                self.dead(error)


def check_finished(responses: Sequence[LLMResponse]) -> None:
    """Raises `Refusal` (504) if the time of one was up: OpenAI's protocol has no word for half an answer."""
    if any(response.stop_reason == StopReason.CANCELLED for response in responses):
        raise Refusal(504, "the answer took longer than the server allows", code="deadline")


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
