"""File tools for the model in a sandboxed workspace: read, write, edit, and run the tests."""

import asyncio
import inspect
from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tandem.api.sandbox import Limits, Outcome, Program, Sandbox, Workspace
from tandem.config.errors import ConfigError
from tandem.rollout.tools.tool import Tool, Toolbox, ToolFailure, tool_schema


class FilesBox(Toolbox):
    """The tools `list_files`, `read_file`, `write_file`, `edit_file`, and with a test command `run_tests`.

    Each episode has its own workspace. It starts with the files of ``folder`` and the files in the row's column ``files``, a
    mapping of paths to texts.
    """

    def __init__(self, sandbox: Sandbox, *, folder: str = "", test: str = "", test_s: float = 30.0, memory_mib: int = 512):
        """``test``: a shell command that runs the tests; ``test_s``: its time limit in seconds."""
        self.sandbox, self.test = sandbox, test
        self.limits = Limits(wall_s=test_s, cpu_s=test_s, memory_mib=memory_mib)
        root = Path(folder).expanduser()
        if folder and not root.is_dir():
            raise ConfigError(f"tool files: there is no folder {root}")
        paths = (path for path in sorted(root.rglob("*")) if path.is_file()) if folder else ()
        self.files = {str(path.relative_to(root)): path.read_bytes() for path in paths}

    @asynccontextmanager
    async def open(self, data: Mapping[str, Any]) -> Any:
        """Implements `Toolbox.open`. The workspace is created at the first call."""
        row_files = {str(path): str(text).encode() for path, text in (data.get("files") or {}).items()}
        desk = Desk(self, self.files | row_files)
        try:
            tools = [desk.list_files, desk.read_file, desk.write_file, desk.edit_file]
            yield [_tool(function) for function in (*tools, *([desk.run_tests] if self.test else []))]
        finally:
            await desk.close()


def _tool(function: Any) -> Tool:
    async def run(arguments: Mapping[str, Any]) -> str:
        try:
            inspect.signature(function).bind(**arguments)
            return str(await function(**arguments))
        # the path does not exist or is outside the workspace
        except (OSError, ConfigError, TypeError, UnicodeDecodeError) as error:
            raise ToolFailure(str(error)) from None

    return Tool(tool_schema(function), run)


class Desk:
    """One episode's workspace. Its methods are the tools; the model sees their docstrings."""

    def __init__(self, box: FilesBox, files: Mapping[str, bytes]):
        self._box, self._files = box, files
        self._workspace: Workspace | None = None
        self._opening = asyncio.Lock()

    async def list_files(self) -> str:
        """Lists all files."""
        outcome = await self._shell("find . -type f | sort | cut -c3-")
        return outcome.stdout.decode(errors="replace").strip() or "(no files)"

    async def read_file(self, path: str) -> str:
        """Reads a file.

        Args:
            path: the file
        """
        return (await (await self._opened()).read(path)).decode()

    async def write_file(self, path: str, content: str) -> str:
        """Writes a file; one that is there is replaced.

        Args:
            path: the file
            content: all of its text
        """
        await (await self._opened()).write(path, content.encode())
        return f"{path} was written."

    async def edit_file(self, path: str, old: str, new: str) -> str:
        """Replaces a text in a file.

        Args:
            path: the file
            old: the text to replace, which must occur exactly once
            new: the text to put there
        """
        workspace = await self._opened()
        text = (await workspace.read(path)).decode()
        if text.count(old) != 1:
            raise ToolFailure(f"the text occurs {text.count(old)} times in {path}; it must occur exactly once")
        await workspace.write(path, text.replace(old, new).encode())
        return f"{path} was changed."

    async def run_tests(self) -> str:
        """Runs the tests."""
        outcome = await self._shell(self._box.test)
        output = (outcome.stdout + outcome.stderr).decode(errors="replace").strip()
        return f"{'The tests pass' if outcome.status == 'ok' else f'The tests fail ({outcome.status})'}.\n{output}".strip()

    async def close(self) -> None:
        """Closes the workspace. Idempotent."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            await workspace.close()

    async def _shell(self, command: str) -> Outcome:
        return await (await self._opened()).exec(Program(argv=("/bin/sh", "-c", command)))

    async def _opened(self) -> Workspace:
        async with self._opening:
            if self._workspace is None:
                self._workspace = await self._box.sandbox.open(self._files, self._box.limits)
            return self._workspace
