"""`environment=openenv:HOST:PORT`: client of an OpenEnv server over its WebSocket."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from tandem.api.environment import Environment, InvalidAction, StepResult

CONNECT_S = 10.0
MAX_BYTES = 16 << 20


class OpenEnvClient(Environment):
    """One session on an OpenEnv server. The server must allow as many sessions as episodes run (``max_concurrent_envs``)."""

    def __init__(self, id: str, action: str = "message", observation: str | None = None):
        """``id``: the server's address, with or without ``http://``. ``action``: the field in which a reply is sent; a reply
        that is a JSON object is sent as the whole action instead. ``observation``: the field shown to the model; None: the
        text field if there is exactly one, otherwise all fields as JSON."""
        address = id if "://" in id else f"http://{id}"
        self._url = f"{address.rstrip('/')}/ws"
        self._action, self._observation = action, observation
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def reset(self, data: Mapping[str, Any], seed: int) -> str:
        """Begins an episode and returns the first observation."""
        if self._socket is None or self._socket.closed:
            await self._connect()
        return self._text(await self._ask("reset", {"seed": seed}))

    async def step(self, action: Any) -> StepResult:
        """Sends an action and returns its result."""
        answer = await self._ask("step", action if isinstance(action, dict) else {self._action: action})
        return StepResult(self._text(answer), float(answer.get("reward") or 0.0), bool(answer.get("done")))

    async def close(self) -> None:  # type: ignore[override]  # the base class allows sync and async
        """Closes the session."""
        if self._socket is not None and not self._socket.closed:
            with contextlib.suppress(ConnectionError):
                await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._reading is not None:
            self._reading.cancel()
        if self._session is not None:
            await self._session.close()

    async def _connect(self) -> None:
        await self.close()
        self._answers = asyncio.Queue()
        self._session = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(CONNECT_S):
                self._socket = await self._session.ws_connect(self._url, max_msg_size=MAX_BYTES)
        except BaseException:
            await self._session.close()
            raise
        self._reading = asyncio.create_task(self._read(self._socket, self._answers))

    async def _read(self, socket: aiohttp.ClientWebSocketResponse, answers: "asyncio.Queue[dict[str, Any] | None]") -> None:
        """Puts all answers of the server into the queue. Runs between calls too, so that the server's pings are answered."""
        async for message in socket:
            if message.type == aiohttp.WSMsgType.TEXT:
                answers.put_nowait(json.loads(message.data))
        answers.put_nowait(None)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the answer's data. Raises `InvalidAction` if the server rejects the action as invalid,
        `ConnectionError` if there is no session, `RuntimeError` for other errors."""
        if self._socket is None:
            raise ConnectionError("step before reset")
        await self._socket.send_json({"type": kind, "data": dict(data)})
        answer = await self._answers.get()
        if answer is None:
            raise ConnectionError(f"the OpenEnv server at {self._url} has closed the session")
        content: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            words = str(content.get("message", content))
            if kind == "step" and content.get("code") == "VALIDATION_ERROR":
                raise InvalidAction(words)
            raise RuntimeError(f"the OpenEnv server at {self._url} answered {content.get('code')}: {words}")
        return content

    def _text(self, answer: Mapping[str, Any]) -> str:
        fields = answer.get("observation") or {}
        if self._observation is not None:
            return str(fields[self._observation])
        texts = [value for value in fields.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(fields)
