"""`environment=openenv:HOST:PORT`: an environment behind an OpenEnv server, over its WebSocket."""

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
    """A session of its own on the server, which must allow as many as episodes are under way (``max_concurrent_envs``)."""

    def __init__(self, id: str, action: str = "message", observation: str | None = None):
        """``id``: the server's address, with or without ``http://``. ``action``: the field of its actions that the reply
        goes into, unless the action is a JSON object. ``observation``: the field that the model reads; None: the only text
        among the fields, or all of them as JSON."""
        address = id if "://" in id else f"http://{id}"
        self._url = f"{address.rstrip('/')}/ws"
        self._action, self._observation = action, observation
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def reset(self, data: Mapping[str, Any], seed: int) -> str:
        """Begins an episode."""
        if self._socket is None or self._socket.closed:
            await self._connect()
        return self._text(await self._ask("reset", {"seed": seed}))

    async def step(self, action: Any) -> StepResult:
        """Acts."""
        answer = await self._ask("step", action if isinstance(action, dict) else {self._action: action})
        return StepResult(self._text(answer), float(answer.get("reward") or 0.0), bool(answer.get("done")))

    async def close(self) -> None:  # type: ignore[override]  # either will do
        """Ends the session."""
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
        """Reads also between two calls, or the server's pings would go unanswered while the model writes."""
        async for message in socket:
            if message.type == aiohttp.WSMsgType.TEXT:
                answers.put_nowait(json.loads(message.data))
        answers.put_nowait(None)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Raises `InvalidAction` if the server finds the action invalid; `ConnectionError`, `RuntimeError` otherwise."""
        if self._socket is None:
            raise ConnectionError("step before reset")
        await self._socket.send_json({"type": kind, "data": dict(data)})
        answer = await self._answers.get()
        if answer is None:
            raise ConnectionError(f"the OpenEnv server at {self._url} has closed the session")
        told: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            words = str(told.get("message", told))
            if kind == "step" and told.get("code") == "VALIDATION_ERROR":
                raise InvalidAction(words)
            raise RuntimeError(f"the OpenEnv server at {self._url} answered {told.get('code')}: {words}")
        return told

    def _text(self, answer: Mapping[str, Any]) -> str:
        fields = answer.get("observation") or {}
        if self._observation is not None:
            return str(fields[self._observation])
        texts = [value for value in fields.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(fields)
