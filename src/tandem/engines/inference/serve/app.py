"""The server itself: listens, asks who calls, hands bodies to the routes, and ends in good order."""

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from tandem.api.failures import EpisodeFailure, WaitTimeout
from tandem.config.errors import ConfigError
from tandem.engines.inference.remote.tandem_server import INSTANCE_HEADER
from tandem.engines.inference.serve.access import Access
from tandem.engines.inference.serve.control import Control
from tandem.engines.inference.serve.limits import Limits
from tandem.engines.inference.serve.metrics import Metrics
from tandem.engines.inference.serve.refusal import Refusal
from tandem.engines.inference.serve.routes import Route, table
from tandem.engines.inference.serve.schema import Invalid, Schema, check_text, checked
from tandem.engines.inference.serve.service import Service

_LARGE_BYTES = 1 << 16
"""A body above this is parsed in a thread, so that other requests need not wait."""


async def read_body(request: web.Request, schema: Schema, limits: Limits, max_bytes: int) -> dict[str, Any]:
    """The body, checked.

    Raises:
        Refusal: 400 no JSON, nested too deep, or against the schema; 408 too slow; 413 too long; 415 not called JSON.
    """
    if request.content_type != "application/json":
        raise Refusal(415, f"Content-Type must be application/json, got {request.content_type!r}")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refusal(415, f"a body is sent as it is, got Content-Encoding {request.headers['Content-Encoding']!r}")
    raw = await _read(request, limits, max_bytes)
    if len(raw) < _LARGE_BYTES:
        return parse(raw, schema, limits.max_depth)
    return await asyncio.to_thread(parse, raw, schema, limits.max_depth)


async def _read(request: web.Request, limits: Limits, max_bytes: int) -> bytes:
    too_long = Refusal(413, f"the body must have at most {max_bytes} bytes", headers={"Connection": "close"})
    if (request.content_length or 0) > max_bytes:
        raise too_long
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > max_bytes:
                    raise too_long
                chunks.append(chunk)
    except TimeoutError:
        message = f"the body must arrive within {limits.body_timeout_s:g} s"
        raise Refusal(408, message, headers={"Connection": "close"}) from None
    return b"".join(chunks)


def parse(raw: bytes, schema: Schema, max_depth: int) -> dict[str, Any]:
    """The value of a JSON text, if the schema allows it; raises `Refusal`."""
    try:
        value = json.loads(raw.decode(), parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None
    check_depth(value, max_depth)
    try:
        return checked(value, schema)
    except Invalid as failure:
        raise Refusal(400, str(failure), param=failure.where or None) from None


def check_depth(value: Any, max_depth: int) -> None:
    """Raises `Refusal` where objects and arrays are nested deeper, or a string anywhere holds half a character."""
    level = [value]
    for _ in range(max_depth + 1):
        inner: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                inner += entry.values()
                inner += entry.keys()
            elif isinstance(entry, list):
                inner += entry
            elif isinstance(entry, str):
                _check_string(entry)
        if not inner:
            return
        level = inner
    raise _too_deep(max_depth)


def _check_string(entry: str) -> None:
    if not entry.isascii():
        try:
            check_text(entry, "a string")
        except Invalid as failure:
            raise Refusal(400, str(failure)) from None


def _too_deep(max_depth: int) -> Refusal:
    return Refusal(400, f"the body must be nested at most {max_depth} deep")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


LOG = logging.getLogger("tandem.serve")
HTTP_LOG = logging.getLogger("tandem.serve.http")
HTTP_LOG.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
"""What is no HTTP is refused, and no reason to write a page into the log for each of it."""

_STRICT = functools.partial(json.dumps, allow_nan=False)

_LINGER_S = 1.0
"""How long the rest of a refused body is read, so that its sender sees the answer."""

_CANCEL_S = 2.0
"""How long handlers have to end once they are cancelled."""


class Server:
    """One server on one event loop.

    Example: ``async with Server(service, access).listening("127.0.0.1", 0) as port: …``
    """

    def __init__(self, service: Service, access: Access):
        self._service, self._access, self._metrics = service, access, Metrics()
        self._control = Control(service)
        self.routes = table(service, self._control, self._metrics)
        self._app = web.Application(middlewares=[self._middleware])
        self._app.on_response_prepare.append(self._sign)
        for route in self.routes:
            self._app.router.add_route(route.method, route.path, self._handler(route))

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Listens inside the block; gives the port. After it, requests that run have `Limits.shutdown_s` to end.

        Raises:
            ConfigError: the address is taken or not of this machine.
        """
        limits = self._service.limits
        runner = web.AppRunner(
            self._app,
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
        watch = asyncio.create_task(self._service.watch())
        try:
            listener = await self._listen(runner, host, port)
            try:
                yield listener.sockets[0].getsockname()[1]
                self._service.draining = True
                await self._drain()
            finally:
                self._service.draining = True
                listener.close()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await self._control.close()
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
        if len(server.connections) >= self._service.limits.max_connections:
            return _Refused()
        return server()

    async def _drain(self) -> None:
        """Waits for completions that run; new ones are refused."""
        until = time.monotonic() + self._service.limits.shutdown_s
        while self._service.under_way and self._service.died is None and time.monotonic() < until:
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
                raise
            finally:
                self._metrics.count(route.path, status, time.perf_counter() - began)

        return handle

    async def _serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        self._access.check_token(request, route.audience)
        if request.query_string:
            raise Refusal(400, f"this route takes no query, got {request.query_string[:100]!r}")
        body = {}
        if route.body is not None:
            body = await read_body(request, route.body, self._service.limits, route.max_body_bytes)
        elif request.can_read_body:
            raise Refusal(400, "this route takes no body")
        answer = await route.handler(self._service, body, request)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer, dumps=_STRICT)

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Whatever ends a request without an answer becomes one."""
        try:
            self._access.check_place(request)
            unmatched = request.match_info.http_exception
            if unmatched is not None:
                self._access.check_token(request, "data")
                allowed = {"Allow": unmatched.headers["Allow"]} if "Allow" in unmatched.headers else {}
                raise Refusal(unmatched.status, f"{request.method} {request.path[:100]!r} is no route here", headers=allowed)
            return await handler(request)
        except Refusal as refusal:
            return web.json_response(refusal.body(), status=refusal.status, headers=refusal.headers)
        except web.HTTPException as error:  # what the library refuses by itself
            return web.json_response(Refusal(error.status, error.reason).body(), status=error.status)
        except (EpisodeFailure, WaitTimeout) as error:
            return web.json_response(Refusal(503, str(error)).body(), status=503)
        except (asyncio.CancelledError, ConnectionError):
            raise  # the client left
        except Exception:  # the request boundary: one request must not end the server, nor show its inside
            LOG.exception("%s %s failed", request.method, request.path)
            return web.json_response(Refusal(500, "the server failed; its log says why").body(), status=500)

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """On every answer, also a refusal: a client must notice that another process is behind the address."""
        response.headers["Server"] = "tandem"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers[INSTANCE_HEADER] = self._service.instance


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
