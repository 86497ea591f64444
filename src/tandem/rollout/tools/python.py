"""A Python tool for the model: a session in the sandbox whose variables persist between calls."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any

from tandem.api.failures import WaitTimeout
from tandem.api.sandbox import Limits, Program, Sandbox, SandboxProcess
from tandem.rollout.tools.tool import Tool, Toolbox, ToolFailure, tool_schema

SESSION = r"""
import ast, contextlib, io, json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
most, space = int(sys.stdin.readline()), {"__name__": "__main__"}
while line := sys.stdin.readline():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            tree = ast.parse(json.loads(line), "<code>")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<code>", "exec"), space)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<code>", "eval"), space)
                if value is not None:
                    print(repr(value))
        except BaseException as error:
            print("".join(traceback.format_exception_only(error)).strip())
    answers.write(json.dumps(said.getvalue()[:most]) + "\n")
    answers.flush()
"""
"""The program in the sandbox: reads one line of JSON with code, writes one line of JSON with the output, and repeats."""

MOST_CHARACTERS = 100_000
EPISODE_S = 24 * 3600.0
"""Time limit of a session, in seconds. Each call has its own, shorter deadline."""


def python(code: str) -> str:
    """Runs Python code. Variables stay for later calls. Gives what is printed, and the value of the last line.

    Args:
        code: the code
    """
    raise NotImplementedError  # only a description for the model; `PythonSession.run` runs the code


class PythonBox(Toolbox):
    """The tool `python`: each episode has its own session in the run's sandbox."""

    def __init__(self, sandbox: Sandbox, *, memory_mib: int = 512, cpu_s: float = 60.0):
        """``memory_mib``, ``cpu_s``: limits of one session."""
        self.sandbox = sandbox
        self.limits = Limits(wall_s=EPISODE_S, cpu_s=cpu_s, memory_mib=memory_mib, output_bytes=1 << 30)

    @asynccontextmanager
    async def open(self, data: Mapping[str, Any]) -> Any:
        """Implements `Toolbox.open`. The session is started at the first call."""
        session = PythonSession(self.sandbox, self.limits)
        try:
            yield (Tool(tool_schema(python), session.run),)
        finally:
            await session.close()


class PythonSession:
    """A Python session that persists between calls. If a call is cut off, the session is lost and the next call starts
    another."""

    def __init__(self, sandbox: Sandbox, limits: Limits):
        self.sandbox, self.limits = sandbox, limits
        self._process: SandboxProcess | None = None
        self._lost = False
        self._one_at_a_time = asyncio.Lock()

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """Runs the code of a call and returns its output.

        Raises:
            ToolFailure: the session has ended.
        """
        async with self._one_at_a_time:
            note = "(Python was restarted: earlier variables are gone.)\n" if self._lost and self._process is None else ""
            try:
                output = await self._ask(str(arguments["code"]))
            except BaseException:
                await asyncio.shield(self.close())
                self._lost = True
                raise
            return note + (output or "(nothing was printed)")

    async def _ask(self, code: str) -> str:
        if self._process is None:
            program = Program(source=SESSION, stdin=f"{MOST_CHARACTERS}\n".encode())
            self._process = await self.sandbox.start(program, self.limits)
        answer = b""
        try:
            await self._process.send(json.dumps(code).encode() + b"\n", EPISODE_S)
            while not answer.endswith(b"\n"):
                piece = await self._process.receive(1 << 16, EPISODE_S)
                if not piece:
                    raise BrokenPipeError
                answer += piece
            return str(json.loads(answer))
        except (BrokenPipeError, WaitTimeout, ValueError):
            outcome = await self._process.close()
            self._process = None
            raise ToolFailure(f"Python ended ({outcome.status}); its variables are gone") from None

    async def close(self) -> None:
        """Closes the session. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                await process.close()
