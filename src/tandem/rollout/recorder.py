"""The recorder: one loopback server for a run, on which every sample has a session of its own."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from tandem.api.media import reader_of
from tandem.api.workflow import GeneratesTokens
from tandem.config.rollout import GenerationConfig
from tandem.protocol.access import Access, Audience, ServerLimits, token_digest
from tandem.protocol.bodies import Refusal
from tandem.protocol.dialects import DIALECTS, Dialect
from tandem.protocol.server import Application, Route, Server
from tandem.protocol.tool_calls import CallReader
from tandem.protocol.turns import Turn
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.forest import Forest, ReplyReader
from tandem.rollout.recording_session import PendingTurn, RecordingSession, Retry, SessionLimits, read_verdict, session_ended

HOST = "127.0.0.1"

MAX_BODY_BYTES, MAX_MEDIA_BODY_BYTES = 8 << 20, 32 << 20
"""Maximum size of a request's body, in bytes. The second limit is for a model that takes images or sounds."""

KEEP_ALIVE_S = 5.0
"""Interval in seconds of comments in a stream whose turn is not finished."""

SEND_S = 30.0
"""A client that reads nothing of its answer for this long, in seconds, counts as disconnected."""

ENDED = 4096
"""Number of ended sessions that are remembered, so that a late request gets status 410."""

EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

ANYTHING: Mapping[str, Any] = {"type": "object", "additionalProperties": True}


class SessionRecorder:
    """Opens sessions. The first session starts the server, on the event loop of its caller.

    Example::

        async with recorder.session(engine, gconfig) as session:
            await my_agent(session.base_url, session.key)
        return session.sample(reward)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reader: ReplyReader | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_body_bytes: int | None = None,
        context: int | None = None,
    ):
        """``max_body_bytes``: maximum size of one request in bytes; None: the default for the model. ``context``: the
        engine's maximum number of tokens, if known."""
        self.sessions = Sessions()
        self._tokenizer, self._kwargs, self._context = tokenizer, dict(chat_template_kwargs or {}), context
        self._reader = reader or CallReader(tokenizer)
        most = MAX_BODY_BYTES if reader_of(tokenizer) is None else MAX_MEDIA_BODY_BYTES
        self._application = Endpoint(self.sessions, keep_alive_s, max_body_bytes or most)
        self._agents = BackgroundLoop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port: asyncio.Future[int] | None = None
        self._server: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def session(
        self,
        engine: GeneratesTokens,
        gconfig: GenerationConfig,
        *,
        limits: SessionLimits | None = None,
        side_calls: Literal["skip", "train"] = "skip",
    ) -> AsyncIterator[RecordingSession]:
        """Context manager that yields a new session. After the block the session has ended, and its sample can be made."""
        forest = Forest(self._tokenizer, self._reader, self._kwargs, self._context)
        session = RecordingSession(forest, engine, gconfig, limits=limits, side_calls=side_calls)
        root = f"http://{HOST}:{await self._listening()}"
        session.base_url, session.keyed_url = f"{root}/v1", f"{root}/sessions/{session.key}/v1"
        self.sessions.open(session)
        try:
            yield session
        finally:
            self.sessions.end(session)
            await session.close()

    def run_agent(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs an agent on the loop of a separate thread, so that a blocking agent stops neither the server nor the
        engine."""
        return self._agents.start(coroutine)

    def session_of(self, request: web.Request) -> RecordingSession:
        """Returns the session of a request's key. The server holds a reference to this bound method, and so keeps the
        recorder alive."""
        return self.sessions.of(request)

    async def _listening(self) -> int:
        """Returns the server's port. Starts the server if none runs on this loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._server is None or self._server.done():
            self._loop, self._port = loop, loop.create_future()
            self._server = loop.create_task(self._serve(self._port))
        assert self._port is not None
        return await asyncio.shield(self._port)

    async def _serve(self, port: "asyncio.Future[int]") -> None:
        access = KeyedAccess(None, None, Access.of(HOST, token=None, admin_token=None).hosts, self.session_of)
        try:
            async with Server(self._application, access).listening(HOST, 0) as number:
                port.set_result(number)
                await asyncio.Event().wait()  # until the loop ends, or `close`
        except Exception as error:  # the worker boundary: raised by the caller that opens a session
            port.set_exception(error)

    def close(self) -> None:
        """Ends the agents and the server. Idempotent. Must not be called on the server's event loop."""
        self._agents.close()
        if self._loop is not None and self._server is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop may have been closed meanwhile
                self._loop.call_soon_threadsafe(self._server.cancel)
        self._loop = self._server = self._port = None


class Sessions:
    """The sessions of a run by their keys."""

    def __init__(self) -> None:
        self._open: dict[bytes, RecordingSession] = {}
        self._ended: deque[bytes] = deque(maxlen=ENDED)

    def open(self, session: RecordingSession) -> None:
        """Makes the session's key valid."""
        self._open[token_digest(session.key)] = session

    def end(self, session: RecordingSession) -> None:
        """Makes the session's key invalid and remembers it as ended."""
        name = token_digest(session.key)
        self._open.pop(name, None)
        self._ended.append(name)

    def of(self, request: web.Request) -> RecordingSession:
        """Returns the session of a request, by the key in its path, as bearer token, or in ``x-api-key``.

        Raises:
            Refusal: 401, no known key; 410, the session has ended.
        """
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = request.match_info.get("key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        name = token_digest(key or request.headers.get("x-api-key", ""))
        session = self._open.get(name)
        if session is not None:
            return session
        if name in self._ended:
            raise session_ended()
        message = "this needs the key of a session, as bearer token, as x-api-key, or in the path /sessions/KEY/v1/…"
        raise Refusal(401, message, code="unknown_key", headers={"WWW-Authenticate": "Bearer"})


@dataclass(frozen=True)
class KeyedAccess(Access):
    """Requires the key of a session for each route. Checked before the body is read."""

    find: Callable[[web.Request], object]

    def check_token(self, request: web.Request, audience: Audience) -> None:
        """Raises `Refusal` if the request has no key of an open session, see `Sessions.of`."""
        self.find(request)


class Endpoint(Application):
    """The routes of the recorder: all dialects, the models, and the reward. Each route exists a second time with the
    session's key in its path."""

    def __init__(self, sessions: Sessions, keep_alive_s: float, max_body_bytes: int):
        self.limits = ServerLimits(max_body_bytes=max_body_bytes, max_depth=64, idle_timeout_s=5.0, shutdown_s=1.0)
        self._sessions, self._keep_alive_s = sessions, keep_alive_s
        routes = [
            Route("POST", path, "data", d.summary, partial(self._turn, d), ANYTHING, None, max_body_bytes, d.refused)
            for d in DIALECTS
            for path in (d.path, d.count_path)
            if path is not None
        ]
        routes.append(Route("GET", "/v1/models/{model:.+}", "data", "A model", self._model))
        routes.append(Route("GET", "/v1/models", "data", "The model", self._models))
        routes.append(Route("POST", "/reward", "data", "The agent's own reward", self._reward, ANYTHING, None, 1 << 16))
        routes.append(Route("POST", "/v1/reward", "data", "The same", self._reward, ANYTHING, None, 1 << 16))
        keyed = [replace(route, path=f"/sessions/{{key}}{route.path}") for route in routes]
        self.routes: Sequence[Route] = (*routes, *keyed)

    def headers(self) -> Mapping[str, str]:
        """Returns the headers of every answer. They close the connection after one request, because many agents never close
        theirs."""
        return {"Connection": "close"}

    def busy(self) -> bool:
        """Returns False: the end of a run does not wait for requests."""
        return False

    def drain(self) -> None:
        """Does nothing: there is no work to refuse or to wait for, see `Application`."""

    async def _models(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        return {"object": "list", "data": [_model("policy")]}

    async def _model(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        return _model(request.match_info["model"])

    async def _reward(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        try:
            verdict = read_verdict(body)
        except ValueError as error:
            raise Refusal(400, f'a reward is {{"reward": number}}: {error}') from error
        self._sessions.of(request).set_reward(verdict or {})
        return {"ok": True}

    async def _turn(self, dialect: Dialect, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        """Serves one turn. The reply counts as received once it is written completely to a connected client."""
        session = self._sessions.of(request)
        counts = request.path.endswith(dialect.count_path or "/")
        try:
            retry = _retry(request)
            turn, prompt = await session.read(dialect.read, body, request.content_length or self.limits.max_body_bytes)
            if counts:
                return web.json_response(dialect.counted(len(prompt.input_ids)))
            attempt = session.begin(turn, prompt, retry)
            with attempt.listening():
                answer = self._stream if turn.stream else self._whole
                response = await answer(dialect, turn, attempt, str(body.get("model") or "policy"), request)
                if attempt.done.exception() is None:
                    session.took(attempt)
                return response
        except Refusal as refusal:
            if not counts:
                session.refuse(refusal)
            return web.json_response(dialect.refused(refusal), status=refusal.status, headers=refusal.headers)

    async def _whole(
        self, dialect: Dialect, turn: Turn, attempt: PendingTurn, model: str, request: web.Request
    ) -> web.StreamResponse:
        answered = await asyncio.shield(attempt.done)
        response: web.StreamResponse = web.json_response(dialect.answer(turn, answered.reply, **answered.names, model=model))
        response.force_close()
        async with _sending():
            await response.prepare(request)
            await response.write_eof()
        return response

    async def _stream(
        self, dialect: Dialect, turn: Turn, attempt: PendingTurn, model: str, request: web.Request
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=EVENTS)
        response.force_close()
        while not (await asyncio.wait([attempt.done], timeout=self._keep_alive_s))[0]:
            async with _sending():
                await response.prepare(request)  # has an effect the first time only
                await response.write(b": the turn is being made\n\n")
        error = attempt.done.exception()
        if error is not None and not (response.prepared and isinstance(error, Refusal)):
            raise error
        async with _sending():
            await response.prepare(request)
            if isinstance(error, Refusal):
                await response.write(dialect.failed(error))
            else:
                answered = attempt.done.result()
                for event in dialect.events(turn, answered.reply, **answered.names, model=model):
                    await response.write(event)
            await response.write_eof()
        return response


@contextlib.asynccontextmanager
async def _sending() -> AsyncIterator[None]:
    """Context manager for writing an answer. A client that does not read within `SEND_S` counts as disconnected."""
    try:
        async with asyncio.timeout(SEND_S):
            yield
    except TimeoutError:
        raise ConnectionResetError("the client reads nothing of the answer") from None


def _model(name: str) -> dict[str, Any]:
    """Returns a model in the format of OpenAI's and Anthropic's clients. Any name stands for the policy."""
    made = {"id": name, "object": "model", "created": 0, "owned_by": "tandem"}
    return made | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _retry(request: web.Request) -> Retry:
    """Reads the headers in which OpenAI's and Anthropic's clients count the repetitions of a request."""
    count = request.headers.get("x-stainless-retry-count", "0")
    if not (count.isdecimal() and len(count) < 10):
        raise Refusal(400, f"x-stainless-retry-count must be a number of at most 9 digits, got {count!r:.40}")
    return Retry(int(count), request.headers.get("Idempotency-Key", ""))
