"""Tools of MCP servers (Model Context Protocol), over standard input and output or over HTTP.

The SDK implements the protocol. A server that is a program is started and ended here, so that a hanging one is stopped, a
dead one is reported with its exit code and last output, and none of its child processes remains.
"""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import IO, Any

import anyio
import httpx2
import mcp
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST, Implementation, jsonrpc_message_adapter

from tandem.api.failures import InfrastructureFailure
from tandem.config.errors import ConfigError, kind_and_text
from tandem.rollout.tools.tool import Tool, Toolbox, ToolFailure
from tandem.workers.process import keeper_command

CLIENT = Implementation(name="tandem", version="1")
MOST_BYTES = 16 << 20
"""Maximum size of one message."""

MOST_WORDS = 500
"""Maximum bytes of a dead server's stderr in the error message."""

WORDS_S = 2.0
"""Seconds to wait for that output and for the end of a server that was killed."""

CONNECT_S = 30.0
"""Time limit in seconds to connect to a server over HTTP. An answer may take as long as the call's own limit."""

ENVIRONMENT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "USER"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH"),
)
"""Environment variables that a server gets from this process; none holds a key."""


class McpBox(Toolbox):
    """The tools of one server: ``mcp(command='python my_server.py')`` or ``mcp(url='http://localhost:8000/mcp')``.

    All episodes share one server, unless ``each_episode`` is set. The next call restarts a server that has died.
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
        """``start_s``: maximum time in seconds for a server to list its tools. ``prefix``: put before the names of all
        tools."""
        if (command is None) == (url is None):
            raise ConfigError("tool mcp needs command (a program to start) or url, and not both")
        self.each_episode, self.prefix = each_episode, prefix
        argv = shlex.split(command or "")
        if command is not None and (not argv or shutil.which(argv[0]) is None):
            raise ConfigError(f"tool mcp: command={command!r} names no program of this machine")
        self._make = partial(McpServer, argv, url, start_s)
        self._shared: McpServer | None = None

    @asynccontextmanager
    async def open(self, data: Mapping[str, Any]) -> Any:
        """Implements `Toolbox.open`.

        Raises:
            InfrastructureFailure: ``mcp_server``: the server cannot be started, or lists no tools in time.
        """
        if self._shared is None or self._shared.loop is not asyncio.get_running_loop():
            self.close()
            self._shared = self._make()
        server = self._make() if self.each_episode else self._shared
        try:
            yield [self._tool(server, listed) for listed in (await server.running()).tools]
        finally:
            if self.each_episode:
                server.kill()

    def _tool(self, server: "McpServer", listed: mcp.types.Tool) -> Tool:
        schema = {key: value for key, value in listed.input_schema.items() if key != "$schema"}
        name, words = f"{self.prefix}{listed.name}", listed.description or ""
        function = {"name": name, "description": words, "parameters": schema}
        return Tool({"type": "function", "function": function}, partial(server.call, listed.name))

    def close(self) -> None:
        """Implements `Toolbox.close`."""
        if self._shared is not None:
            self._shared.kill()
            self._shared = None


class McpServer:
    """A server that is started at the first use and restarted after its death. Belongs to one event loop."""

    def __init__(self, argv: list[str], url: str | None, start_s: float):
        self.loop = asyncio.get_running_loop()
        self._argv, self._url, self._start_s = argv, url, start_s
        self._connection: Connection | None = None
        self._starting = asyncio.Lock()

    async def running(self) -> "Connection":
        """Returns the connection to the server; starts the server if it is not running."""
        async with self._starting:
            if self._connection is None or self._connection.gone:
                self._connection = connection = Connection(self._argv, self._url, self._start_s)
                try:
                    either: list[asyncio.Future[Any]] = [connection.ready, connection.task]
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                except BaseException:
                    connection.kill()
                    raise
                if not connection.ready.done():
                    name = self._url or shlex.join(self._argv)
                    raise InfrastructureFailure("mcp_server", f"{name} did not start: {connection.why}")
            return self._connection

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool and returns the text of its result.

        Raises:
            ToolFailure: the tool reports a failure, or the server died.
        """
        connection = await self.running()
        try:
            result = await connection.ready.result().call_tool(name, dict(arguments))
        except mcp.MCPError as error:
            # the SDK's errors if an HTTP server has forgotten the session, or answers with a status and no message
            if error.code != CONNECTION_CLOSED and not (self._url and error.code in (INVALID_REQUEST, INTERNAL_ERROR)):
                raise ToolFailure(error.message) from None
            connection.kill()
            await asyncio.wait([connection.task], timeout=2 * WORDS_S)  # the task reads the exit code
            why = connection.why or error.message
            raise ToolFailure(
                f"the tool's server ended during the call ({why}); it is started again by the next call"
            ) from None
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        text = "\n".join(parts) or json.dumps(result.structured_content or {}, ensure_ascii=False)
        if result.is_error:
            raise ToolFailure(text)
        return text

    def kill(self) -> None:
        """Kills the server. Idempotent."""
        if self._connection is not None:
            self._connection.kill()


async def _start(argv: list[str]) -> tuple[Any, IO[bytes]]:
    """Starts a server with a keeper. Returns the keeper's process, whose pipes are the server's, and the pipe that ends both
    when it closes. This is not a `Child`, because the event loop waits for its output and its end."""
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    pipe = asyncio.subprocess.PIPE
    ended, owner = os.pipe()
    try:
        process: Any = await asyncio.create_subprocess_exec(
            *keeper_command(argv, ended, grace_s=0, output=1),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=MOST_BYTES,
            env=environment,
            pass_fds=(ended,),
            start_new_session=True,
        )
    except BaseException:
        os.close(owner)
        raise
    finally:
        os.close(ended)
    return process, os.fdopen(owner, "wb")


class Connection:
    """One run of a server. The SDK requires that its objects are used in one task."""

    def __init__(self, argv: list[str], url: str | None, start_s: float):
        self.gone = False
        self.why = ""
        """The reason why the connection ended, once ``task`` is done."""

        self.tools: list[mcp.types.Tool] = []
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[mcp.Client] = self._loop.create_future()
        self._keeper: Any = None
        self._owner: IO[bytes] | None = None
        self.task = asyncio.create_task(self._serve(self._post(url) if url else self._pipe(argv), start_s))

    async def _serve(self, transport: Any, start_s: float) -> None:
        try:
            async with asyncio.timeout(start_s) as starting, mcp.Client(transport, client_info=CLIENT) as client:
                page = await client.list_tools()
                self.tools += page.tools
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    self.tools += page.tools
                starting.reschedule(None)
                self.ready.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # boundary: any error of a server ends only this server
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            late = isinstance(first, TimeoutError)
            words = f"it listed no tools in {start_s:g} s" if late else kind_and_text(first)
            self.why = f"{words}; {self.why}".removesuffix("; ")
        finally:
            self.gone = True

    @asynccontextmanager
    async def _post(self, url: str) -> AsyncIterator[Any]:
        """Connects to a server over HTTP and yields the streams."""
        timeout, most = httpx2.Timeout(CONNECT_S, read=None), MOST_BYTES
        async with (
            httpx2.AsyncClient(timeout=timeout) as http,
            # ending the session would be one more request that may hang
            streamable_http_client(url, http_client=http, terminate_on_close=False, max_sse_event_size=most) as streams,
        ):
            yield streams

    @asynccontextmanager
    async def _pipe(self, argv: list[str]) -> AsyncIterator[Any]:
        """Starts the server as a program and yields the streams: one message a line on stdin and stdout. Kills it and its
        descendants at the end; they also end with this process."""
        process, owner = await _start(argv)
        self._keeper, self._owner = process, owner
        from_server, reading = anyio.create_memory_object_stream[Any](0)
        writing, to_server = anyio.create_memory_object_stream[Any](0)
        errors = bytearray()

        async def listen() -> None:
            while line := await process.stdout.readline():
                with contextlib.suppress(ValueError):  # the server may also print lines that are not messages
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    await from_server.send(SessionMessage(message))
            self.gone = True
            raise EOFError("the server closed its output")

        async def notice() -> None:
            if await process.wait() < 0:  # processes that the server had started may hold its output open
                self.gone = True
                raise EOFError("the server's keeper was killed")

        async def speak() -> None:
            async for sent in to_server:
                try:
                    process.stdin.write(sent.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await process.stdin.drain()
                except ConnectionError:  # the server has closed its input, probably because it ends: wait for its exit code
                    await asyncio.wait([asyncio.create_task(process.wait())], timeout=WORDS_S)
                    raise

        async def remember() -> None:
            while piece := await process.stderr.read(1 << 12):
                errors[:] = (errors + piece)[-MOST_WORDS:]

        words = asyncio.create_task(remember())
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(listen)
                group.start_soon(notice)
                group.start_soon(speak)
                yield reading, writing
                group.cancel_scope.cancel()
        finally:
            self.kill()
            for stream in (from_server, reading, writing, to_server):
                stream.close()
            await asyncio.wait([asyncio.create_task(process.wait())], timeout=WORDS_S)
            if process.returncode is None or process.returncode < 0:  # the keeper hangs, or was killed and left processes
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait([words], timeout=WORDS_S)
            words.cancel()
            owner.close()
            self.why = f"exit code {process.returncode}; {errors.decode(errors='replace').strip()}".removesuffix("; ")

    def kill(self) -> None:
        """Kills the server at once. Idempotent; may be called from any thread."""
        self.gone = True
        with contextlib.suppress(RuntimeError, OSError):  # the loop may be closed, or the process have ended
            if self._keeper is None:
                self._loop.call_soon_threadsafe(self.task.cancel)
            elif self._keeper.returncode is None:
                os.kill(self._keeper.pid, signal.SIGTERM)  # it kills the server with its descendants; the task ends with it
        if self._owner is not None and self._loop.is_closed():  # the task never ends, so its descriptors are closed here
            self._owner.close()
            for end in filter(None, map(self._keeper._transport.get_pipe_transport, range(3))):
                end.get_extra_info("pipe").close()
