"""`/metrics`: counters of requests and of the engine, for Prometheus."""

import asyncio
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from tandem.api.failures import EngineDied, WaitTimeout
from tandem.engines.inference.serve.service import EngineService

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """A registry of its own, so that several servers of one process do not meet."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "tandem_requests", "Requests answered, by route and HTTP status", ["route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "tandem_request_seconds", "From a request's arrival to its answer", ["route"], registry=registry, buckets=SECONDS
        )
        self._engine = Gauge("tandem_engine", "Totals of the engine, and what it holds", ["name"], registry=registry)
        self._version = Gauge("tandem_weights_version", "Number of the weights that make the next token", registry=registry)
        self._under_way = Gauge("tandem_under_way", "Completions asked for and not ended", registry=registry)
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
