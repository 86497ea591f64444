"""One loopback server a run, behind which every sample has a session of its own."""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from tandem.api.media import reader_of
from tandem.api.workflow import GeneratesTokens
from tandem.config.generation import GenerationConfig
from tandem.protocol.access import Access, Audience
from tandem.protocol.dialects import DIALECTS, Dialect
from tandem.protocol.limits import ServerLimits
from tandem.protocol.refusal import Refusal
from tandem.protocol.server import Application, Route, Server
from tandem.protocol.tool_calls import CallReader
from tandem.protocol.turns import Turn
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.recording.forest import Forest, ReplyReader
from tandem.rollout.recording.session import PendingTurn, RecordingSession, Retry, SessionLimits
from tandem.rollout.recording.verdict import read_verdict

HOST = "127.0.0.1"

MAX_BODY_BYTES, MAX_MEDIA_BODY_BYTES = 8 << 20, 32 << 20
"""Longest body of a request; the second for a model that sees or hears."""

KEEP_ALIVE_S = 5.0
"""A stream whose turn is not there yet gets a comment this often."""

SEND_S = 30.0
"""A client that takes none of its answer for so long has left."""

ENDED = 4096
"""Sessions that are over and remembered, so that a late request is told so."""

EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

ANYTHING: Mapping[str, Any] = {"type": "object", "additionalProperties": True}


class SessionRecorder:
    """Opens sessions; the first one starts the server, on the event loop that it is opened on.

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
        """``max_body_bytes``: of one request; None: as the model needs. ``context``: most tokens of the engine, if known."""
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
        """A session for the block; behind it the session is over, and its sample can be made."""
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
        """Runs an agent in a thread beside that of the engine: one that blocks keeps neither the server nor the engine."""
        return self._agents.start(coroutine)

    def session_of(self, request: web.Request) -> RecordingSession:
        """The session of a key. The server asks here, so that the recorder lives as long as its server listens."""
        return self.sessions.of(request)

    async def _listening(self) -> int:
        """The port. Starts the server if none runs on this loop."""
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
        except Exception as error:  # the worker boundary: whoever opens a session raises it
            port.set_exception(error)

    def close(self) -> None:
        """Ends the agents and the server; idempotent. From another thread than the loop's."""
        self._agents.close()
        if self._loop is not None and self._server is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._server.cancel)
        self._loop = self._server = self._port = None


class Sessions:
    """The sessions of a run, by their keys."""

    def __init__(self) -> None:
        self._open: dict[bytes, RecordingSession] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def open(self, session: RecordingSession) -> None:
        """Makes the session's key known from now on."""
        self._open[_digest(session.key)] = session

    def end(self, session: RecordingSession) -> None:
        """Its key opens nothing any more."""
        name = _digest(session.key)
        self._open.pop(name, None)
        self._ended[name] = None
        while len(self._ended) > ENDED:
            self._ended.popitem(last=False)

    def of(self, request: web.Request) -> RecordingSession:
        """The session of a request, by the key in its path, or as bearer token, or in ``x-api-key``.

        Raises:
            Refusal: 401 without a key that is known; 410 where the session is over.
        """
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = request.match_info.get("key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        name = _digest(key or request.headers.get("x-api-key", ""))
        session = self._open.get(name)
        if session is not None:
            return session
        if name in self._ended:
            raise Refusal(410, "this session is over", code="session_ended")
        message = "this needs the key of a session, as bearer token, as x-api-key, or in the path /sessions/KEY/v1/…"
        raise Refusal(401, message, code="unknown_key", headers={"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    """Keys are looked up by digest: comparing them directly would tell how much of one is right."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True)
class KeyedAccess(Access):
    """Each route needs the key of a session. Asked before the body is read."""

    find: Callable[[web.Request], object]

    def check_token(self, request: web.Request, audience: Audience) -> None:
        """Raises `Refusal` as `Sessions.of`."""
        self.find(request)


class Endpoint(Application):
    """The routes: every dialect, the models, and the reward; each also with the key in its path."""

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
        keyed = [Route(r.method, f"/sessions/{{key}}{r.path}", *_rest(r)) for r in routes]
        self.routes: Sequence[Route] = (*routes, *keyed)

    def headers(self) -> Mapping[str, str]:
        """A connection serves one request: many agents never close theirs, and each would stay open."""
        return {"Connection": "close"}

    def busy(self) -> bool:
        """Number of requests under way; nothing waits for a turn at the end of a run."""
        return False

    def drain(self) -> None:
        """Waits for nothing, see `Application`."""

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
        """One turn in a dialect. The reply is taken once all of it is written to a client that is still there."""
        session = self._sessions.of(request)
        counts = request.path.endswith(dialect.count_path or "/")
        try:
            retry = _retry(request)
            turn, asked = await session.read(dialect.read, body, request.content_length or self.limits.max_body_bytes)
            if counts:
                return web.json_response(dialect.counted(len(asked.input_ids)))
            attempt = session.begin(turn, asked, retry)
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
                await response.prepare(request)  # once
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
    """A block that writes: a client that takes nothing has left."""
    try:
        async with asyncio.timeout(SEND_S):
            yield
    except TimeoutError:
        raise ConnectionResetError("the reader of an answer takes nothing") from None


def _model(name: str) -> dict[str, Any]:
    """A model as OpenAI's and Anthropic's clients read it; any name is the policy's."""
    made = {"id": name, "object": "model", "created": 0, "owned_by": "tandem"}
    return made | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _rest(route: Route) -> tuple[Any, ...]:
    return route.audience, route.summary, route.handler, route.body, route.answer, route.max_body_bytes, route.refused


def _retry(request: web.Request) -> Retry:
    """Reads the headers: OpenAI's and Anthropic's clients count how often they sent a request before."""
    count = request.headers.get("x-stainless-retry-count", "0")
    if not (count.isdecimal() and len(count) < 10):
        raise Refusal(400, f"x-stainless-retry-count must be a number of at most 9 digits, got {count!r:.40}")
    return Retry(int(count), request.headers.get("Idempotency-Key", ""))
