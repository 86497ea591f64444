"""The common part of the routes: the engine, the requests under way, and the server's readiness.

`Metrics` answers `/metrics`: counters of requests and of the engine, for Prometheus.
"""

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

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from tandem.api.engines import InferencePart
from tandem.api.failures import DataFailure, EngineDied, WaitTimeout
from tandem.api.requests import LLMRequest, LLMResponse, NewTokens, NoiseKey, StopReason
from tandem.api.weights import WeightVersion
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.embedded import EmbeddedEngine, EmbeddedProcess
from tandem.engines.inference.remote.tandem_server import PROTOCOL
from tandem.engines.inference.serve.text import Tokenizers
from tandem.protocol.access import ServiceLimits
from tandem.protocol.bodies import Refusal
from tandem.protocol.media_intake import LACKING

LOG = logging.getLogger("tandem.serve")


@dataclass
class EngineService:
    """One served engine, used on one event loop."""

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
    """The training run that may change the weights; None: no owner, so the next run that attaches gets the server."""

    weights_roots: tuple[Path, ...] = ()
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    under_way: int = 0
    """Number of requested completions that have not ended."""

    draining: bool = False
    paused: bool = False
    asleep: frozenset[InferencePart] = frozenset()
    weights_missing: bool = False
    """True if the weights slept and were not delivered since."""

    died: str | None = None
    on_death: Callable[[], None] = lambda: None
    _heard: float = field(default_factory=time.monotonic)
    _last_token: float | None = None
    _probe: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ completions

    async def complete(self, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
        """Returns all completions, generated together. If the call is cancelled, or one completion fails, all are ended.

        Raises:
            Refusal: 400 if the engine does not take a request; 503 if it cannot answer now.
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
        """Yields (number of the request, its new tokens), and last for each request its whole response. Close the generator
        to cancel.

        Raises:
            Refusal: as `complete`, also after the first tokens.
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
        except Exception as error:  # the request boundary: the reader of the stream raises it
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
        """Returns a context in which the media store keeps the media of these requests."""
        return self.tokenizers.intake.using([number for request in requests for number in {*request.media} - {0}])

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except DataFailure as failure:
            if failure.reason == "media_unreadable":
                LOG.warning("%s", failure)
            if failure.reason in ("media_missing", "media_unreadable"):  # names a folder, which clients must not learn
                raise Refusal(400, f"media_missing: {LACKING}", code="media_missing") from failure
            raise Refusal(400, str(failure), code=failure.reason) from failure
        except EngineDied as error:
            raise self.dead(error) from error

    def dead(self, error: EngineDied) -> Refusal:
        """Records that the engine has died, which ends the server. Returns the refusal of the present request."""
        if self.died is None:
            self.died = str(error)
            self.on_death()
        return Refusal(503, f"the engine is gone: {self.died.splitlines()[0]}", code="engine_died")

    # ------------------------------------------------------------------ state

    def identity(self) -> dict[str, Any]:
        """Returns the facts about this server that a client needs."""
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
        """Returns the engine's capabilities over HTTP: no memory is shared, folders are read only if some are allowed, and
        an update by folder carries no settings of an adapter."""
        return (self.engine.capabilities - {"shared_memory", "adapter"}) | (
            frozenset({"disk"}) if self.weights_roots else frozenset()
        )

    async def unready(self) -> list[str]:
        """Returns the reasons why the server should get no requests now; empty if it has current weights and generated a
        token recently."""
        reasons = [
            reason
            for reason, holds in (
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
        """True if the owning run seems to be gone: it has no completions under way and was silent for `owner_silent_s`."""
        silent_s = time.monotonic() - self._heard
        return self.run is not None and not self.under_way and silent_s > self.limits.owner_silent_s

    def token_age_s(self) -> float | None:
        """Returns the seconds since the last generated token; None if there was none yet."""
        return None if self._last_token is None else time.monotonic() - self._last_token

    def _recent(self) -> bool:
        age = self.token_age_s()
        return age is not None and age <= self.limits.ready_window_s

    async def _try(self) -> list[str]:
        """Generates one token; callers that come meanwhile wait for the same token. Returns the reasons if this fails."""
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
        """Notices the death of the engine, even if no requests come."""
        while self.died is None:
            await asyncio.sleep(every_s)
            try:
                await asyncio.to_thread(self.engine.statistics)
            except WaitTimeout:
                continue  # a long step, which only `/ready` judges
            except EngineDied as error:
                self.dead(error)


def check_finished(responses: Sequence[LLMResponse]) -> None:
    """Raises `Refusal` (504) if a response hit its deadline, because OpenAI's protocol cannot express half an answer."""
    if any(response.stop_reason == StopReason.CANCELLED for response in responses):
        raise Refusal(504, "the answer took longer than the server allows", code="deadline")


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """Prometheus metrics of one server, in a registry of their own, so that several servers of a process do not clash."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "tandem_requests", "Requests answered, by route and HTTP status", ["route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "tandem_request_seconds", "From a request's arrival to its answer", ["route"], registry=registry, buckets=SECONDS
        )
        self._engine = Gauge("tandem_engine", "Counters of the engine, and its present state", ["name"], registry=registry)
        self._version = Gauge("tandem_weights_version", "Version of the weights that make the next token", registry=registry)
        self._under_way = Gauge("tandem_under_way", "Completions that were requested and have not ended", registry=registry)
        self._up = Gauge("tandem_engine_up", "1 while the engine answers", registry=registry)

    def count(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    async def page(self, service: EngineService, body: dict[str, Any], request: web.Request) -> web.Response:
        statistics: dict[str, float] = {}
        try:
            statistics = await asyncio.to_thread(service.engine.statistics)
            self._up.set(1)
        except (EngineDied, WaitTimeout):
            self._up.set(0)
        for name, value in statistics.items():
            self._engine.labels(name).set(value)
        self._version.set(service.engine.version.number)
        self._under_way.set(service.under_way)
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
