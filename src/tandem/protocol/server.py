"""An HTTP server: listens, asks who calls, hands checked bodies to the routes, and ends in good order.

An `Application` says what it serves: the engine of `tandem serve`, the reward models of `tandem serve-reward`.
"""

import asyncio
import contextlib
import functools
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from tandem.api.failures import EpisodeFailure, WaitTimeout
from tandem.config.errors import ConfigError
from tandem.protocol.access import Access, Audience
from tandem.protocol.bodies import read_body
from tandem.protocol.limits import ServerLimits
from tandem.protocol.refusal import Refusal
from tandem.protocol.schema import Schema

LOG = logging.getLogger("tandem.serve")
HTTP_LOG = logging.getLogger("tandem.serve.http")
HTTP_LOG.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
"""Bytes that are no HTTP are refused, and are no reason to write a page into the log each time."""

_STRICT = functools.partial(json.dumps, allow_nan=False)

_LINGER_S = 1.0
"""Seconds for which the rest of a refused body is read, so that its sender sees the answer."""

_CANCEL_S = 2.0
"""Seconds that handlers have to end once they are cancelled."""


Handler = Callable[[dict[str, Any], web.Request], Awaitable[Any]]
"""Gets the checked body; returns the answer's JSON, or a whole response."""


@dataclass(frozen=True)
class Route:
    """One route: who may call it, what it takes and what it gives."""

    method: str
    path: str
    audience: Audience
    summary: str
    handler: Handler
    body: Schema | None = None
    answer: Schema | None = None
    """The schema of the answer; None if it is no JSON."""

    max_body_bytes: int = 0
    refused: Callable[[Refusal], dict[str, Any]] = Refusal.body
    """The body of a refusal."""


class Application(ABC):
    """The routes of a server, and what stands behind them. Lives on one event loop."""

    limits: ServerLimits
    routes: Sequence[Route]

    def headers(self) -> Mapping[str, str]:
        """Sent with every answer, also with a refusal."""
        return {}

    @abstractmethod
    def busy(self) -> bool:
        """True while requests run that the end of the server should wait for."""

    @abstractmethod
    def drain(self) -> None:
        """The server is about to end: new work is refused from now on. May be called twice."""

    def count(self, route: Route, status: int, seconds: float) -> None:
        """One request was answered."""

    async def watch(self) -> None:
        """Runs beside the requests; cancelled at the end."""

    async def close(self) -> None:
        """Waits for what requests left behind."""


class Server:
    """One server on one event loop.

    Example: ``async with Server(application, access).listening("127.0.0.1", 0) as port: …``
    """

    def __init__(self, application: Application, access: Access):
        self._application, self._access, self.routes = application, access, application.routes
        self.app = web.Application(middlewares=[self._middleware])
        self.app.on_response_prepare.append(self._sign)
        self._shapes: dict[object, Callable[[Refusal], dict[str, Any]]] = {}
        for route in self.routes:
            handler = self._handler(route)
            self._shapes[handler] = route.refused
            self.app.router.add_route(route.method, route.path, handler)

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Listens inside the block; gives the port. After it, requests that run have `ServerLimits.shutdown_s` to end.

        Raises:
            ConfigError: the address is taken or not of this machine.
        """
        limits = self._application.limits
        runner = web.AppRunner(
            self.app,
            handle_signals=False,
            handler_cancellation=True,  # a client that leaves frees its request
            access_log=None,
            logger=HTTP_LOG,
            keepalive_timeout=limits.idle_timeout_s,
            lingering_time=_LINGER_S,
            auto_decompress=False,
            shutdown_timeout=_CANCEL_S,
        )
        await runner.setup()
        watch = asyncio.create_task(self._application.watch())
        try:
            listener = await self._listen(runner, host, port)
            try:
                yield listener.sockets[0].getsockname()[1]
                self._application.drain()
                await self._drain()
            finally:
                self._application.drain()
                await _close_listener(listener)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await self._application.close()
            await runner.cleanup()

    async def _listen(self, runner: web.AppRunner, host: str, port: int) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_server(lambda: self._connection(runner), host, port, backlog=1024)
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error

    def _connection(self, runner: web.AppRunner) -> asyncio.Protocol:
        server = runner.server
        assert server is not None
        if len(server.connections) >= self._application.limits.max_connections:
            return _Refused()
        return server()

    async def _drain(self) -> None:
        """Waits for the requests that run; new ones are refused."""
        until = time.monotonic() + self._application.limits.shutdown_s
        while self._application.busy() and time.monotonic() < until:
            await asyncio.sleep(0.02)

    def _handler(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            began = time.perf_counter()
            status = 499  # the client left
            try:
                response = await self._serve(route, request)
                status = response.status
                return response
            except Refusal as refusal:
                status = refusal.status
                return web.json_response(route.refused(refusal), status=status, headers=refusal.headers)
            finally:
                self._application.count(route, status, time.perf_counter() - began)

        return handle

    async def _serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        self._access.check_token(request, route.audience)
        if request.query_string:
            raise Refusal(400, f"this route takes no query, got {request.query_string[:100]!r}")
        body = {}
        if route.body is not None:
            body = await read_body(request, route.body, self._application.limits, route.max_body_bytes)
        elif request.can_read_body:
            raise Refusal(400, "this route takes no body")
        answer = await route.handler(body, request)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer, dumps=_STRICT)

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Whatever ends a request without an answer becomes one, in the shape of its route's refusals."""

        def refused(refusal: Refusal) -> web.Response:
            body = self._shapes.get(request.match_info.handler, Refusal.body)(refusal)
            return web.json_response(body, status=refusal.status, headers=refusal.headers)

        try:
            self._access.check_place(request)
            unmatched = request.match_info.http_exception
            if unmatched is not None:
                self._access.check_token(request, "data")
                allowed = {"Allow": unmatched.headers["Allow"]} if "Allow" in unmatched.headers else {}
                raise Refusal(unmatched.status, f"{request.method} {request.path[:100]!r} is no route here", headers=allowed)
            return await handler(request)
        except Refusal as refusal:
            return refused(refusal)
        except web.HTTPException as error:  # what the library refuses by itself
            return refused(Refusal(error.status, error.reason))
        except (EpisodeFailure, WaitTimeout) as error:
            return refused(Refusal(503, str(error)))
        except (asyncio.CancelledError, ConnectionError):
            raise  # the client left
        except Exception:  # the request boundary: one request must not end the server, nor show its inside
            LOG.exception("%s %s failed", request.method, request.path)
            return refused(Refusal(500, "the server failed; its log says why"))

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds the headers of every answer, also of a refusal."""
        response.headers["Server"] = "tandem"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers.update(self._application.headers())


async def _close_listener(listener: asyncio.Server) -> None:
    """Closes the listening sockets once each accepted connection has its transport.

    asyncio accepts a connection in one turn of the loop and makes its transport in a later one. If the listener closes in
    between, the connection is never closed (https://github.com/python/cpython/issues/109564).
    """
    try:
        for socket in listener.sockets:
            listener.get_loop().remove_reader(socket.fileno())  # accepts no more
        await asyncio.sleep(0)  # the accepted ones get their transports
    finally:
        listener.close()


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
