"""An HTTP server: listens, asks who calls, reads bodies (bounded in bytes and seconds while they come; a
long one is parsed beside the others), hands them to the routes checked, and ends in good order.

An `Application` says what it serves: the engine of `tandem serve`, the reward models of `tandem serve-reward`.
"""

import asyncio
import contextlib
import functools
import json
import logging
import marshal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from tandem.api.failures import EpisodeFailure, WaitTimeout
from tandem.config.errors import ConfigError
from tandem.protocol.access import Access, Audience
from tandem.protocol.limits import ServerLimits
from tandem.protocol.parsing import parse
from tandem.protocol.refusal import Refusal
from tandem.protocol.schema import Schema

_LARGE_BYTES = 1 << 16
"""A body above this is parsed in a thread, so that other requests need not wait."""

_HUGE_BYTES = 1 << 20
"""A body above this is parsed in a process: a thread would hold the interpreter, and keep the memory."""

_PARSE_S = 60.0
"""The process is given so long; it takes well below a second."""

_BESIDE = ThreadPoolExecutor(2, "bodies")
"""Few, because each thread that computes makes the loop wait for its turn."""

_PARSER = "import sys; sys.path[:] = sys.argv[1:]; from tandem.protocol.parsing import main; main()"


async def read_body(request: web.Request, schema: Schema, limits: ServerLimits, max_bytes: int) -> dict[str, Any]:
    """The body, checked.

    Raises:
        Refusal: 400 no JSON, too many values or nested too deep, or against the schema; 408 too slow; 413 too long; 415 not
            called JSON.
    """
    if request.content_type != "application/json":
        raise Refusal(415, f"Content-Type must be application/json, got {request.content_type!r}")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refusal(415, f"a body must not be encoded, got Content-Encoding {request.headers['Content-Encoding']!r}")
    pieces = await _read(request, limits, max_bytes)
    if len(pieces[0]) < _LARGE_BYTES:
        return parse(pieces[0], schema, limits.max_depth)
    return await asyncio.get_running_loop().run_in_executor(_BESIDE, _parse_beside, pieces, schema, limits.max_depth)


async def _read(request: web.Request, limits: ServerLimits, max_bytes: int) -> list[bytearray]:
    """The body in pieces of `_LARGE_BYTES` or a little more: to let one of megabytes grow would copy it again and again."""
    too_long = Refusal(413, f"the body must have at most {max_bytes} bytes", headers={"Connection": "close"})
    if (request.content_length or 0) > max_bytes:
        raise too_long
    pieces, size = [bytearray()], 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > max_bytes:
                    raise too_long
                if len(pieces[-1]) >= _LARGE_BYTES:
                    pieces.append(bytearray())
                pieces[-1] += chunk
    except TimeoutError:
        message = f"the body must arrive within {limits.body_timeout_s:g} s"
        raise Refusal(408, message, headers={"Connection": "close"}) from None
    return pieces


def _parse_beside(pieces: list[bytearray], schema: Schema, max_depth: int) -> dict[str, Any]:
    """`parse`, of a huge body in a process of its own, which ends with it."""
    if sum(map(len, pieces)) <= _HUGE_BYTES:
        return parse(b"".join(pieces), schema, max_depth)
    command = [sys.executable, "-S", "-c", _PARSER, *sys.path]
    try:
        given = b"".join((marshal.dumps((dict(schema), max_depth)), *pieces))  # marshalling these would hold it
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, timeout=_PARSE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:  # no process can be started, or it was killed
        words = f"the body could not be parsed ({type(error).__name__} of its process); send it again"
        raise Refusal(503, words, headers={"Retry-After": "1"}) from error
    value, status, message, param = marshal.loads(done.stdout)
    if status:
        raise Refusal(status, message, param=param)
    return dict(value)


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
        for route in self.routes:
            self.app.router.add_route(route.method, route.path, self._handler(route))

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
            listener = await _bound(lambda: self._connection(runner), host, port)
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
        """Answers a request that ends in an error with a refusal, in the shape of the route that its path contains: also
        where the method is wrong, or the path goes on behind the route."""

        def refused(refusal: Refusal) -> web.Response:
            shape = next((route.refused for route in self.routes if f"{route.path}/" in f"{request.path}/"), Refusal.body)
            return web.json_response(shape(refusal), status=refusal.status, headers=refusal.headers)

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


async def check_free(host: str, port: int) -> None:
    """Raises `ConfigError` if the address is taken or not of this machine."""
    (await _bound(asyncio.Protocol, host, port, start_serving=False)).close()


async def _bound(protocol: Callable[[], asyncio.Protocol], host: str, port: int, **more: Any) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(protocol, host, port, backlog=1024, **more)
    except (OSError, UnicodeError) as error:  # the second: a name that none can be
        raise ConfigError(f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}") from error


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
