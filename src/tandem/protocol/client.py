"""The one HTTP client to inference servers: JSON in, JSON out, every wait with a deadline, every body with a bound.

All clients of a process share one event loop in a thread of its own, so a connection outlives the loop of whoever asks.
What goes wrong becomes one of three values, so that callers need to know neither HTTP nor the library:

- `DataFailure`: status 400, 413 or 422: the request itself is at fault, on any server. Its reason is ``refused_by_server``,
  or ``prompt_too_long`` where the server says that;
- `ServerFailed`: all else that is no answer: connection refused or cut, deadline, other 4xx, 3xx, 5xx, no JSON, no end,
  another process than the one that was spoken to before (`HttpClient.expects`);
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
"""Largest answer that is read; a completion has some hundred bytes a token."""

REQUEST_AT_FAULT = frozenset({400, 413, 422})

KNOWN_REASONS = frozenset({"prompt_too_long", "media_mismatch", "media_missing"})
"""Codes of refusals that are passed on, because our own engines drop a prompt for the same reason."""

_CHUNK_BYTES = 1 << 16
_CLOSE_TIMEOUT_S = 10.0
_MESSAGE_CHARACTERS = 500
_CLOSED = "the client was closed"
_KEEP_ALIVE_S = 2.0
"""Idle connections are dropped before any server would (5 s): a request must not be sent into a closing one."""


class _LoopThread:
    """An event loop in a thread, for as long as there are clients of it."""

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
    """Talks to one server. All methods may be called from any thread, the coroutines awaited on any event loop.

    ``token`` goes with every request as ``Authorization: Bearer``; ``admin_token`` takes its place where ``admin`` is
    set. Both are sent to ``base_url`` only: redirects are not followed and proxies not used. Nothing is sent or started
    before the first request.

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
            shown = base_url.rpartition("@")[2].partition("?")[0].partition("#")[0]  # what is cut off may be a password
            raise ConfigError(f"a server's address is http://HOST:PORT or https://HOST:PORT and no more, got {shown!r}")
        self.base_url = base_url.rstrip("/")
        self._token, self._admin_token = token, admin_token
        self._connect_timeout_s, self._max_body_bytes = connect_timeout_s, max_body_bytes
        self.expects: tuple[str, str] | None = None
        """Header and value of every answer from now on: of another process behind the address nothing is believed."""

        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def post(self, path: str, body: dict[str, Any], *, deadline_s: float, admin: bool = False) -> Any:
        """Sends ``body`` and returns the answer, parsed; None for an empty one. Cancelling it drops the connection.

        Raises:
            DataFailure, ServerFailed, EngineDied: see the module.
        """
        return await asyncio.wrap_future(self._start("POST", path, body, deadline_s, admin))

    def call(self, path: str, body: dict[str, Any] | None = None, *, deadline_s: float, admin: bool = False) -> Any:
        """Blocks until the answer is there: `post` where there is a body (``{}`` is one), else GET."""
        return self._wait(self._start("GET" if body is None else "POST", path, body, deadline_s, admin), deadline_s)

    def call_text(self, path: str, *, deadline_s: float) -> str:
        """A page that is no JSON, such as Prometheus' metrics."""
        return str(self._wait(self._start("GET", path, None, deadline_s, False, text=True), deadline_s))

    def _wait(self, future: Future[Any], deadline_s: float) -> Any:
        try:
            # The exchange ends itself at its deadline; that long again would mean a dead event loop.
            return future.result(deadline_s + _CLOSE_TIMEOUT_S)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Drops all connections; requests under way fail with `EngineDied`. Idempotent."""
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
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: some answers that are no HTTP
            raise ServerFailed(f"{url}: {kind_and_text(error)}", url=url) from error
        except TimeoutError:
            raise ServerFailed(f"{url} gave no answer within {deadline_s:g} s", url=url) from None
        except OSError as error:
            raise ServerFailed(f"{url}: {kind_and_text(error)}", url=url) from error
        except asyncio.CancelledError as error:
            if error.args == (_CLOSED,):  # not by the caller, who would not hear it
                raise EngineDied(f"the client of {self.base_url} was closed") from None
            raise
        finally:
            self._tasks.discard(task)
        return self._read(url, status, raw, text)

    async def _send(self, method: str, url: str, data: bytes | None, admin: bool) -> tuple[int, bytes]:
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}  # tokens are not worth the time of compressing
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
        """Also of a refusal: what another process refuses says nothing of the one that is meant."""
        if self.expects is not None and answer.headers.get(self.expects[0]) != self.expects[1]:
            raise ServerFailed(
                f"{url} answered {answer.status}, but not as the process that this client spoke to: it was restarted, or "
                "something else has its address",
                url=url,
            )

    def _opened(self) -> aiohttp.ClientSession:
        """The session, made on the loop that it belongs to."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # the fleet bounds how many requests are under way, not the connector
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
            raise ServerFailed(f"{url} answered {status} with what is no JSON: {error}", url=url, status=status) from error

    async def _shut(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel(_CLOSED)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def read_json(raw: bytes | str) -> Any:
    """The value of an answer, for every client of servers: three times as fast as Python's reader, which reads what orjson
    refuses (NaN, infinities, halves of characters). Of equal keys the last counts; whole numbers beyond 64 bits are floats.

    Raises:
        ValueError, RecursionError: it is no JSON, or too deep.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return json.loads(raw)


def failure_of(url: str, status: int, raw: bytes) -> DataFailure | ServerFailed:
    """The failure that an answer without success means, see the module."""
    said, code = _said(raw)
    message = f"{url} answered {status}: {said}"
    if status in REQUEST_AT_FAULT:
        return DataFailure(code if code in KNOWN_REASONS else "refused_by_server", message)
    return ServerFailed(message, url=url, status=status)


def _said(raw: bytes) -> tuple[str, str]:
    """The message of an error's body, in the shapes that servers give it, and its code (empty without one)."""
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
    """Posts ``body`` and yields each event's JSON, up to the end that OpenAI's protocol marks.

    Raises:
        DataFailure, ServerFailed: as `HttpClient`; also where the stream ends without its mark, or holds an error.
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
        raise ServerFailed(f"{url} sent an event that is no JSON: {error}", url=url, status=200) from error
    if not isinstance(parsed, dict) or "error" in parsed:
        raise ServerFailed(f"{url} ended its answer: {parsed}", url=url, status=200)
    return parsed
