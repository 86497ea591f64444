"""Tools of MCP servers (Model Context Protocol), over standard input and output or over HTTP.

The wire is JSON-RPC: `initialize`, `tools/list`, `tools/call`. It is spoken here and not through a library, so that a server
which hangs or dies is this file's to cut off, to name and to start again.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp

from tandem.api.failures import InfrastructureFailure
from tandem.config.errors import ConfigError, kind_and_text
from tandem.rollout.tools.tool import Tool, Toolbox, ToolFailure

VERSION = "2025-06-18"
"""Version of the protocol. A server may answer with an older one: these three requests are the same in all."""

CLIENT = {"name": "tandem", "version": "1"}
MOST_BYTES = 16 << 20
"""Most bytes of one message."""

MOST_WORDS = 500
"""Bytes of a server's errors that are told when it dies."""

WORDS_S = 2.0
"""Seconds for which they are waited for: a program of the server's may hold the pipe open for ever."""

ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "PYTHONPATH")
"""Variables of this process's environment that a server sees: no keys."""


class ServerGone(Exception):
    """The server ended, or the connection to it did."""


class McpBox(Toolbox):
    """The tools of one server: ``mcp(command='python my_server.py')`` or ``mcp(url='http://localhost:8000/mcp')``.

    One server is shared by all episodes, unless ``each_episode``. A server that died is started again by the next call.
    """

    def __init__(
        self,
        *,
        command: str | None = None,
        url: str | None = None,
        each_episode: bool = False,
        start_s: float = 30.0,
        prefix: str = "",
    ):
        """``start_s``: the longest that a server may take to list its tools. ``prefix``: before the names of all tools."""
        if (command is None) == (url is None):
            raise ConfigError("tool mcp needs command (a program to start) or url, and not both")
        self.each_episode, self.prefix = each_episode, prefix
        argv = shlex.split(command or "")
        if command is not None and (not argv or shutil.which(argv[0]) is None):
            raise ConfigError(f"tool mcp: command={command!r} names no program of this machine")
        make = partial(Piped, argv) if command is not None else partial(Posted, str(url))
        self._make = partial(McpServer, make, command or str(url), start_s)
        self._shared: McpServer | None = None

    @asynccontextmanager
    async def open(self, data: Mapping[str, Any]) -> Any:
        """Implements `Toolbox.open`.

        Raises:
            InfrastructureFailure: ``mcp_server``: it cannot be started, or lists no tools in time.
        """
        if self._shared is None or self._shared.loop is not asyncio.get_running_loop():
            self.close()
            self._shared = self._make()
        server = self._make() if self.each_episode else self._shared
        try:
            yield [self._tool(server, one) for one in await server.tools()]
        finally:
            if self.each_episode:
                server.kill()

    def _tool(self, server: "McpServer", listed: Mapping[str, Any]) -> Tool:
        name = str(listed["name"])
        schema = {key: value for key, value in (listed.get("inputSchema") or {}).items() if key != "$schema"}
        function = {"name": f"{self.prefix}{name}", "description": listed.get("description") or "", "parameters": schema}
        return Tool({"type": "function", "function": function}, partial(server.call, name))

    def close(self) -> None:
        """Implements `Toolbox.close`."""
        if self._shared is not None:
            self._shared.kill()
            self._shared = None


class Connection(ABC):
    """A way to send messages to a server and to get their answers."""

    @abstractmethod
    async def begin(self) -> None:
        """Starts the server, or connects to it."""

    @abstractmethod
    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; `{}` to a notification, which has no ``id``. Raises `ServerGone`."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it at once; for any thread, idempotent."""

    gone: bool = False

    @property
    def words(self) -> str:
        """The end of what the server said beside its messages."""
        return ""


class McpServer:
    """A server that is started when it is needed, and again when it has died. Of one event loop."""

    def __init__(self, make: Any, name: str, start_s: float):
        self.loop = asyncio.get_running_loop()
        self.starts = 0
        self._make, self._name, self._start_s = make, name, start_s
        self._connection: Connection | None = None
        self._numbers = itertools.count(1)
        self._tools: list[dict[str, Any]] = []
        self._starting = asyncio.Lock()

    async def tools(self) -> list[dict[str, Any]]:
        """The tools that the server lists; asked once each time it is started."""
        await self._running()
        return self._tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a call's result.

        Raises:
            ToolFailure: the tool says that it failed; or the server died.
        """
        connection = await self._running()
        try:
            result = await self._ask(connection, "tools/call", {"name": name, "arguments": dict(arguments)})
        except ServerGone as error:
            raise ToolFailure(
                f"the tool's server ended during the call ({error}); it is started again for the next"
            ) from None
        parts = [part.get("text") or f"[{part.get('type', 'unknown')}]" for part in result.get("content") or ()]
        text = "\n".join(map(str, parts)) or json.dumps(result.get("structuredContent") or {}, ensure_ascii=False)
        if result.get("isError"):
            raise ToolFailure(text)
        return text

    def kill(self) -> None:
        """Ends it; idempotent."""
        if self._connection is not None:
            self._connection.kill()

    async def _running(self) -> Connection:
        async with self._starting:
            if self._connection is None or self._connection.gone:
                self.kill()
                self._connection = None
                connection = self._make()
                try:
                    async with asyncio.timeout(self._start_s):
                        await self._start(connection)
                except BaseException as error:
                    connection.kill()
                    if isinstance(error, ServerGone | OSError | ToolFailure):
                        words = "; ".join(filter(None, (kind_and_text(error), connection.words)))
                        raise InfrastructureFailure("mcp_server", f"{self._name} did not start: {words}") from error
                    raise
                self._connection, self.starts = connection, self.starts + 1
            return self._connection

    async def _start(self, connection: Connection) -> None:
        await connection.begin()
        hello = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": CLIENT}
        await self._ask(connection, "initialize", hello)
        await connection.ask({"jsonrpc": "2.0", "method": "notifications/initialized"})
        tools: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = await self._ask(connection, "tools/list", {"cursor": cursor} if cursor else {})
            tools += page.get("tools") or []
            cursor = page.get("nextCursor")
            if not cursor:
                break
        self._tools = tools

    async def _ask(self, connection: Connection, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": parameters}
        answer = await connection.ask(message)
        if "error" in answer:
            raise ToolFailure(str((answer["error"] or {}).get("message") or answer["error"]))
        return dict(answer.get("result") or {})


class Piped(Connection):
    """A program of ours: a message a line on its standard input and output. It ends when we do."""

    def __init__(self, argv: list[str]):
        self._argv = argv
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._said = b""
        self._why = "it closed its output"
        self._waiting: dict[Any, asyncio.Future[dict[str, Any]]] = {}

    async def begin(self) -> None:
        """Implements `Connection.begin`."""
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, limit=MOST_BYTES, start_new_session=True
        )
        self._reader = asyncio.create_task(self._read(self._process))

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Implements `Connection.ask`."""
        answer = asyncio.get_running_loop().create_future()
        if "id" in message:
            self._waiting[message["id"]] = answer
        try:
            if self.gone or self._process is None:
                raise ServerGone("it is gone")
            await self._send(message)
            return await answer if "id" in message else {}
        except ServerGone as error:
            self._waiting.pop(message.get("id"), None)
            self.kill()
            if self._reader is None:
                raise
            await asyncio.wait([self._reader], timeout=2 * WORDS_S)  # it learns the exit code, whoever noticed the end first
            raise ServerGone(self._why) from error
        finally:
            self._waiting.pop(message.get("id"), None)

    async def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
        except OSError as error:
            self.gone = True
            raise ServerGone("it closed its input") from error

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        listening = asyncio.create_task(self._listen(process))
        try:
            while line := await process.stdout.readline():
                await self._take(line)
        except (ValueError, ServerGone) as error:
            self._why = str(error)
        finally:
            self.gone = True
            self.kill()
            with contextlib.suppress(asyncio.CancelledError):
                code = await process.wait()
                await asyncio.wait([listening], timeout=WORDS_S)
                self._why = f"{self._why}; exit code {code}"
            listening.cancel()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ServerGone(self._why))

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Remembers the end of what the server says beside its messages, for the error when it dies."""
        assert process.stderr is not None
        while piece := await process.stderr.read(1 << 12):
            self._said = (self._said + piece)[-MOST_WORDS:]

    @property
    def words(self) -> str:
        return self._said.decode(errors="replace").strip()

    async def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return  # a server that prints something else beside its messages
        if not isinstance(message, dict):
            return
        if "method" in message and "id" in message:  # the server asks: we answer pings, and offer nothing else
            refusal = {"error": {"code": -32601, "message": "not offered by this client"}}
            await self._send(
                {"jsonrpc": "2.0", "id": message["id"]} | ({"result": {}} if message["method"] == "ping" else refusal)
            )
        answer = self._waiting.get(message.get("id"))
        if answer is not None and not answer.done() and "method" not in message:
            answer.set_result(message)

    def kill(self) -> None:
        """Implements `Connection.kill`."""
        self.gone = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


class Posted(Connection):
    """A server elsewhere, by HTTP: a request a message, answered as JSON or as a stream of events."""

    def __init__(self, url: str):
        self._url = url
        self._headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": VERSION}

    async def begin(self) -> None:
        """Implements `Connection.begin`."""

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Implements `Connection.ask`."""
        try:
            async with (
                aiohttp.ClientSession(read_bufsize=MOST_BYTES) as client,
                client.post(self._url, json=message, headers=self._headers) as answer,
            ):
                if answer.status >= 400:
                    raise ServerGone(f"status {answer.status}")
                if session := answer.headers.get("Mcp-Session-Id"):
                    self._headers["Mcp-Session-Id"] = session
                return await self._answer(answer, message) if "id" in message else {}
        except (aiohttp.ClientError, ServerGone, OSError, ValueError) as error:
            self.gone = True
            raise ServerGone(f"{self._url}: {kind_and_text(error)}") from error

    async def _answer(self, answer: aiohttp.ClientResponse, message: dict[str, Any]) -> dict[str, Any]:
        if answer.content_type != "text/event-stream":
            return dict(json.loads(await answer.text()))
        async for line in answer.content:
            if line.startswith(b"data:"):
                event = json.loads(line[5:])
                if event.get("id") == message["id"] and "method" not in event:
                    return dict(event)
        raise ServerGone("the stream ended without an answer")

    def kill(self) -> None:
        """Implements `Connection.kill`."""
        self.gone = True
