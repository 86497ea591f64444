"""HTTP server: listens, checks who calls, reads bodies with limits on bytes and seconds, checks them against the route's
schema, calls the route's handler, and shuts down in an orderly way. Long bodies are parsed in a thread or a process.

An `Application` defines what is served: the engine of `tandem serve`, or the reward models of `tandem serve-reward`.

`/openapi.json` describes the routes.
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

from tandem import __version__
from tandem.api.failures import EpisodeFailure, WaitTimeout
from tandem.config.errors import ConfigError
from tandem.protocol.access import Access, Audience, ServerLimits
from tandem.protocol.bodies import ERROR, Refusal, Schema, parse

_LARGE_BYTES = 1 << 16
"""A body above this size is parsed in a thread, so that other requests need not wait."""

_HUGE_BYTES = 1 << 20
"""A body above this size is parsed in a process: a thread would hold the interpreter's lock, and keep the memory."""

_PARSE_S = 60.0
"""Time limit of the parsing process in seconds; parsing normally takes well below a second."""

_BESIDE = ThreadPoolExecutor(2, "bodies")
"""The threads that parse bodies. Only two, because each computing thread delays the event loop."""

_PARSER = "import sys; sys.path[:] = sys.argv[1:]; from tandem.protocol.bodies import main; main()"


async def read_body(request: web.Request, schema: Schema, limits: ServerLimits, max_bytes: int) -> dict[str, Any]:
    """Reads and parses the body of a request and checks it against the schema.

    Raises:
        Refusal: 400, not JSON, too many values, nested too deep, or against the schema; 408, too slow; 413, too long; 415,
            the Content-Type is not JSON, or the body is encoded.
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
    """Returns the body in pieces of about `_LARGE_BYTES`, because growing one buffer to megabytes would copy it
    repeatedly."""
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
    """Parses a body in this thread. A huge body is parsed in a separate process, which returns its memory when it ends."""
    if sum(map(len, pieces)) <= _HUGE_BYTES:
        return parse(b"".join(pieces), schema, max_depth)
    command = [sys.executable, "-S", "-c", _PARSER, *sys.path]
    try:
        # the pieces are joined raw, because marshalling them would hold the interpreter's lock
        message = b"".join((marshal.dumps((dict(schema), max_depth)), *pieces))
        done = subprocess.run(command, input=message, stdout=subprocess.PIPE, timeout=_PARSE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:  # the process cannot be started, or it was killed
        words = f"the body could not be parsed ({type(error).__name__} of its process); send it again"
        raise Refusal(503, words, headers={"Retry-After": "1"}) from error
    value, status, message, param = marshal.loads(done.stdout)
    if status:
        raise Refusal(status, message, param=param)
    return dict(value)


LOG = logging.getLogger("tandem.serve")
HTTP_LOG = logging.getLogger("tandem.serve.http")
HTTP_LOG.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
"""A request that is not HTTP is refused. Its traceback is not logged, because many such requests would fill the log."""

_STRICT = functools.partial(json.dumps, allow_nan=False)

_LINGER_S = 1.0
"""Seconds for which the remaining bytes of a refused body are read, so that its sender receives the answer."""

_CANCEL_S = 2.0
"""Maximum time in seconds for cancelled handlers to end."""


Handler = Callable[[dict[str, Any], web.Request], Awaitable[Any]]
"""(checked body, request) → the answer as JSON, or a complete response."""


@dataclass(frozen=True)
class Route:
    """One route: method and path, its audience, and the schemas of its body and its answer."""

    method: str
    path: str
    audience: Audience
    summary: str
    handler: Handler
    body: Schema | None = None
    answer: Schema | None = None
    """The schema of the answer; None if the answer is not JSON."""

    max_body_bytes: int = 0
    refused: Callable[[Refusal], dict[str, Any]] = Refusal.body
    """Formats a refusal as a response body."""


class Application(ABC):
    """The routes of a server and the objects that serve them. Runs on one event loop."""

    limits: ServerLimits
    routes: Sequence[Route]

    def headers(self) -> Mapping[str, str]:
        """Returns headers that are added to every response, refusals included."""
        return {}

    @abstractmethod
    def busy(self) -> bool:
        """Returns True while requests run that a shutdown should wait for."""

    @abstractmethod
    def drain(self) -> None:
        """Refuses new work from now on, because the server is about to shut down. May be called twice."""

    def count(self, route: Route, status: int, seconds: float) -> None:
        """Counts one answered request."""

    async def watch(self) -> None:
        """Runs in the background while the server listens; cancelled at its end."""

    async def close(self) -> None:
        """Waits for background work that requests have started."""


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
        """Listens inside the block and yields the port. When the block ends, running requests have `ServerLimits.shutdown_s`
        seconds to finish.

        Raises:
            ConfigError: the address is in use, or does not belong to this machine.
        """
        limits = self._application.limits
        runner = web.AppRunner(
            self.app,
            handle_signals=False,
            handler_cancellation=True,  # a request is cancelled when its client disconnects
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
        """Waits until the running requests have ended or the time limit has passed."""
        deadline = time.monotonic() + self._application.limits.shutdown_s
        while self._application.busy() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _handler(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            began = time.perf_counter()
            status = 499  # the client disconnected
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
        """Turns every error of a request into a refusal, in the format of the route whose path is a prefix of the request's.
        This covers a wrong method and a path that continues behind the route."""

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
        except web.HTTPException as error:  # refused by aiohttp itself
            return refused(Refusal(error.status, error.reason))
        except (EpisodeFailure, WaitTimeout) as error:
            return refused(Refusal(503, str(error)))
        except (asyncio.CancelledError, ConnectionError):
            raise  # the client disconnected
        except Exception:  # the request boundary: an error must neither end the server nor reach the client with its details
            LOG.exception("%s %s failed", request.method, request.path)
            return refused(Refusal(500, "the server failed; its log says why"))

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds the server's headers to a response, refusals included."""
        response.headers["Server"] = "tandem"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers.update(self._application.headers())


async def check_free(host: str, port: int) -> None:
    """Raises `ConfigError` if the address is in use or does not belong to this machine."""
    (await _bound(asyncio.Protocol, host, port, start_serving=False)).close()


async def _bound(protocol: Callable[[], asyncio.Protocol], host: str, port: int, **options: Any) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(protocol, host, port, backlog=1024, **options)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        raise ConfigError(f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}") from error


async def _close_listener(listener: asyncio.Server) -> None:
    """Closes the listening sockets after each accepted connection has its transport.

    asyncio accepts a connection in one iteration of the loop and creates its transport in a later one. If the listener
    closes in between, the connection is never closed (https://github.com/python/cpython/issues/109564).
    """
    try:
        for socket in listener.sockets:
            listener.get_loop().remove_reader(socket.fileno())  # accepts no more
        await asyncio.sleep(0)  # the accepted ones get their transports
    finally:
        listener.close()


class _Refused(asyncio.Protocol):
    """A connection above `max_connections`; it is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


REFUSALS = {
    "400": "the request is at fault",
    "401": "no token, or a wrong one",
    "403": "wrong Host or Origin, or a folder that is not allowed",
    "408": "the body came too slowly",
    "409": "the server belongs to another run, or its state forbids it",
    "413": "the body is too long",
    "415": "the body is not JSON by its Content-Type",
    "422": "weights that do not fit",
    "503": "the server cannot answer now",
    "504": "not done in time",
}


def document(title: str, routes: Sequence[Route]) -> dict[str, Any]:
    """Returns an OpenAPI 3.1 document of these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {
                "data": {"type": "http", "scheme": "bearer", "description": "The token, where the server has one."},
                "control": {"type": "http", "scheme": "bearer", "description": "The admin token."},
            },
            "schemas": {"Error": ERROR},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    if route.answer is None:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": route.answer}}
        if route.body is not None and "stream" in route.body.get("properties", {}):
            content["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe server-sent events
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.path.strip("/").replace("/", "_").replace(".", "_"),
        "security": [{route.audience: []}],
        "responses": {
            "200": {"description": "done", "content": content},
            **{status: {"description": why, "content": error} for status, why in REFUSALS.items()},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body}}}
    return operation
