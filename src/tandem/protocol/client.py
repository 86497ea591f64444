"""HTTP client to inference servers. Sends and receives JSON; every wait has a deadline and every body a size limit.

All clients of a process share one event loop in its own thread, so a connection survives the end of the caller's loop.
Failures are reported as one of three exceptions, so that callers need not know HTTP or the library:

- `DataFailure`: status 400, 413 or 422: the request itself is wrong and would fail on any server. Its reason is
  ``refused_by_server``, or ``prompt_too_long`` if the server says so;
- `ServerFailed`: everything else: connection refused or cut, deadline passed, other 4xx, 3xx or 5xx, a body that is not
  JSON or is incomplete, or an answer from another process than before (`HttpClient.expects`);
- `EngineDied`: this client was closed.
"""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson

from tandem.api.failures import DataFailure, EngineDied, ServerFailed
from tandem.config.errors import ConfigError, kind_and_text

T = TypeVar("T")

MAX_BODY_BYTES = 256 << 20
"""Maximum size of an answer in bytes. A completion takes a few hundred bytes for each token."""

REQUEST_AT_FAULT = frozenset({400, 413, 422})

KNOWN_REASONS = frozenset({"prompt_too_long", "media_mismatch", "media_missing"})
"""Error codes that become the reason of the failure. Tandem's own engines drop prompts for the same reasons."""

_CHUNK_BYTES = 1 << 16
_CLOSE_TIMEOUT_S = 10.0
_MESSAGE_CHARACTERS = 500
_CLOSED = "the client was closed"
_KEEP_ALIVE_S = 2.0
"""Idle connections are closed after this many seconds. Servers close them later (after 5 s), so no request is sent into a
closing connection."""


class _LoopThread:
    """An event loop in its own thread, shared by all clients; stopped when the last client is closed."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar["_LoopThread | None"] = None

    def __init__(self) -> None:
        self.users = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="http-client", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> "_LoopThread":
        with cls._lock:
            shared = cls._shared = cls._shared or cls()
            shared.users += 1
            return shared

    def release(self) -> None:
        with self._lock:
            self.users -= 1
            if self.users:
                return
            _LoopThread._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


class HttpClient:
    """HTTP client of one server. Its methods may be called from any thread, and its coroutines awaited on any event loop.

    ``token`` is sent with every request as ``Authorization: Bearer``; calls with ``admin=True`` send ``admin_token``
    instead, if set. Both are sent to ``base_url`` only: redirects are not followed and proxies not used. No connection or
    thread is started before the first request.

    Example: ``HttpClient("http://127.0.0.1:8000").call("/v1/models", deadline_s=5.0)``
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        admin_token: str | None = None,
        connect_timeout_s: float = 5.0,
        max_body_bytes: int = MAX_BODY_BYTES,
    ):
        parts = urlsplit(base_url)
        plain = parts.hostname and not ("@" in parts.netloc or parts.query or parts.fragment)
        if parts.scheme not in ("http", "https") or not plain:
            shown = base_url.rpartition("@")[2].partition("?")[0].partition("#")[0]  # the removed parts may hold a password
            raise ConfigError(f"a server's address is http://HOST:PORT or https://HOST:PORT and no more, got {shown!r}")
        self.base_url = base_url.rstrip("/")
        self._token, self._admin_token = token, admin_token
        self._connect_timeout_s, self._max_body_bytes = connect_timeout_s, max_body_bytes
        self.expects: tuple[str, str] | None = None
        """(name, value) of a header that every answer must have, or None. An answer without it comes from another process
        that has taken the address, and is rejected."""

        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def post(self, path: str, body: dict[str, Any], *, deadline_s: float, admin: bool = False) -> Any:
        """Sends ``body`` and returns the parsed answer; None if it is empty. Cancelling the call drops the connection.

        Raises:
            DataFailure, ServerFailed, EngineDied: see the module's docstring.
        """
        return await asyncio.wrap_future(self._start("POST", path, body, deadline_s, admin))

    def call(self, path: str, body: dict[str, Any] | None = None, *, deadline_s: float, admin: bool = False) -> Any:
        """Sends a request and blocks until its answer arrives. The method is POST if ``body`` is not None (``{}`` counts),
        else GET."""
        return self._wait(self._start("GET" if body is None else "POST", path, body, deadline_s, admin), deadline_s)

    def call_text(self, path: str, *, deadline_s: float) -> str:
        """Fetches a page that is not JSON, such as Prometheus metrics."""
        return str(self._wait(self._start("GET", path, None, deadline_s, False, text=True), deadline_s))

    def _wait(self, future: Future[Any], deadline_s: float) -> Any:
        try:
            # The exchange ends itself at its deadline, so this longer wait runs out only if the event loop is dead.
            return future.result(deadline_s + _CLOSE_TIMEOUT_S)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Closes all connections; running requests fail with `EngineDied`. Idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(self._shut()).result(_CLOSE_TIMEOUT_S)
            finally:
                thread.release()

    # ------------------------------------------------------------------ one exchange

    def _start(
        self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float, admin: bool, text: bool = False
    ) -> Future[Any]:
        data = None if body is None else json.dumps(body).encode()
        with self._lock:
            if self._closed:
                raise EngineDied(f"the client of {self.base_url} was closed")
            self._thread = self._thread or _LoopThread.acquire()
            return self._thread.run(self._exchange(method, path, data, deadline_s, admin, text))

    async def _exchange(self, method: str, path: str, data: bytes | None, deadline_s: float, admin: bool, text: bool) -> Any:
        url = self.base_url + path
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with asyncio.timeout(deadline_s):
                status, raw = await self._send(method, url, data, admin)
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: some answers that are not HTTP
            raise ServerFailed(f"{url}: {kind_and_text(error)}", url=url) from error
        except TimeoutError:
            raise ServerFailed(f"{url} gave no answer within {deadline_s:g} s", url=url) from None
        except OSError as error:
            raise ServerFailed(f"{url}: {kind_and_text(error)}", url=url) from error
        except asyncio.CancelledError as error:
            if error.args == (_CLOSED,):  # cancelled by `close`, not by the caller
                raise EngineDied(f"the client of {self.base_url} was closed") from None
            raise
        finally:
            self._tasks.discard(task)
        return self._read(url, status, raw, text)

    async def _send(self, method: str, url: str, data: bytes | None, admin: bool) -> tuple[int, bytes]:
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}  # compressing tokens costs more time than it saves
        token = (self._admin_token or self._token) if admin else self._token
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if data is not None:
            headers["Content-Type"] = "application/json"
        async with self._opened().request(method, url, data=data, headers=headers, allow_redirects=False) as answer:
            self._check_process(url, answer)
            chunks, size = [], 0
            async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
                size += len(chunk)
                if size > self._max_body_bytes:
                    raise ServerFailed(
                        f"{url} answered with more than {self._max_body_bytes} bytes", url=url, status=answer.status
                    )
                chunks.append(chunk)
            return answer.status, b"".join(chunks)

    def _check_process(self, url: str, answer: aiohttp.ClientResponse) -> None:
        """Rejects an answer of another process. Refusals are checked too, because a refusal of another process says nothing
        about the intended server."""
        if self.expects is not None and answer.headers.get(self.expects[0]) != self.expects[1]:
            raise ServerFailed(
                f"{url} answered {answer.status}, but not as the process that this client spoke to: it was restarted, or "
                "something else has its address",
                url=url,
            )

    def _opened(self) -> aiohttp.ClientSession:
        """Returns the session; creates it on its event loop at the first call."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # the fleet limits the number of running requests, not the connector
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    def _read(self, url: str, status: int, raw: bytes, text: bool) -> Any:
        if not 200 <= status < 300:
            raise failure_of(url, status, raw)
        if text:
            return raw.decode(errors="replace")
        if not raw.strip():
            return None
        try:
            return read_json(raw)
        except (ValueError, RecursionError) as error:
            raise ServerFailed(
                f"{url} answered {status} with a body that is not JSON: {error}", url=url, status=status
            ) from error

    async def _shut(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel(_CLOSED)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def read_json(raw: bytes | str) -> Any:
    """Parses JSON. orjson is three times as fast as Python's reader, which parses what orjson rejects (NaN, infinities,
    unpaired surrogates). The last of equal keys wins; integers beyond 64 bits become floats.

    Raises:
        ValueError, RecursionError: not JSON, or nested too deeply.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return json.loads(raw)


def failure_of(url: str, status: int, raw: bytes) -> DataFailure | ServerFailed:
    """Returns the failure for an HTTP status other than 2xx; see the module's docstring."""
    reason, code = _error_text(raw)
    message = f"{url} answered {status}: {reason}"
    if status in REQUEST_AT_FAULT:
        return DataFailure(code if code in KNOWN_REASONS else "refused_by_server", message)
    return ServerFailed(message, url=url, status=status)


def _error_text(raw: bytes) -> tuple[str, str]:
    """Returns the message and the code of an error's body, in any server's format; the code is empty if there is none."""
    try:
        body = read_json(raw)
    except (ValueError, RecursionError):
        body = raw.decode(errors="replace")
    code = ""
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            code = str(body.get("code", "")) or code
            body = body[key]
    return str(body)[:_MESSAGE_CHARACTERS].strip() or "(nothing)", code


MAX_EVENT_BYTES = 8 << 20
_END = "[DONE]"


async def stream_events(
    url: str, body: dict[str, Any], *, token: str | None, deadline_s: float
) -> AsyncGenerator[dict[str, Any], None]:
    """Posts ``body`` and yields each server-sent event's JSON until OpenAI's end mark ``[DONE]``.

    Raises:
        DataFailure, ServerFailed: as for `HttpClient`; also if the stream ends without ``[DONE]`` or contains an error.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        async with (
            asyncio.timeout(deadline_s),
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(url, json=body, headers=headers, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise failure_of(url, answer.status, await answer.content.read(MAX_EVENT_BYTES))
            buffer = b""
            async for chunk in answer.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                if len(buffer) > MAX_EVENT_BYTES:
                    raise ServerFailed(f"{url} sent an event of more than {MAX_EVENT_BYTES} bytes", url=url, status=200)
                for line in lines:
                    event = line.decode(errors="replace").strip().removeprefix("data:").strip()
                    if event == _END:
                        return
                    if event and not event.startswith(":"):
                        yield _parsed(url, event)
    except aiohttp.ClientError as error:
        raise ServerFailed(f"{url}: {kind_and_text(error)}", url=url) from error
    except TimeoutError:
        raise ServerFailed(f"{url} had not ended its answer within {deadline_s:g} s", url=url) from None
    raise ServerFailed(f"{url} ended its answer without {_END}", url=url, status=200)


def _parsed(url: str, event: str) -> dict[str, Any]:
    try:
        parsed = read_json(event)
    except (ValueError, RecursionError) as error:
        raise ServerFailed(f"{url} sent an event that is not JSON: {error}", url=url, status=200) from error
    if not isinstance(parsed, dict) or "error" in parsed:
        raise ServerFailed(f"{url} ended its answer: {parsed}", url=url, status=200)
    return parsed
