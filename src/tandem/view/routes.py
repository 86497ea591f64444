"""The viewer's server: pages for everyone who reaches it, answers for those who may ask, and what changes, live."""

import asyncio
import json
import mimetypes
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from tandem.config.errors import ConfigError
from tandem.protocol.limits import ServerLimits
from tandem.protocol.refusal import Refusal
from tandem.protocol.schema import record, text
from tandem.protocol.server import Application, Route
from tandem.state.existing import run_info
from tandem.view.index import SampleIndex
from tandem.view.questions import SCHEMAS, RunAnswers
from tandem.view.runs import signs

STATIC = Path(__file__).with_name("static")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; media-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
LOOK_S = 1.0
"""Seconds between two looks at the folders."""

GRAPH_S = 120.0
BODY_BYTES = 1 << 14


class Viewer(Application):
    """The pages about some runs. Indexes of long runs are made in processes beside it, which end with it."""

    limits = ServerLimits(max_connections=256)

    def __init__(self, questions: RunAnswers, cache: Path):
        self._questions, self._cache = questions, cache
        self._signs: dict[str, str] = {}
        self._changed = asyncio.Condition()
        self._making: dict[str, asyncio.subprocess.Process] = {}
        self.routes = [
            *(self._file(file) for file in sorted(STATIC.rglob("*")) if file.is_file()),
            Route("GET", "/api/events", "data", "what changes", self._events),
            Route("POST", "/api/graph", "data", "graph", self._graph, record({"run": text(500)}, ["run"]), None, BODY_BYTES),
            *(self._question(name) for name in SCHEMAS),
        ]

    def headers(self) -> Mapping[str, str]:
        return {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}

    def busy(self) -> bool:
        return False

    def drain(self) -> None:
        """Nothing is under way that must end well."""

    async def watch(self) -> None:
        """Looks whether runs have changed, and tells those who listen."""
        while True:
            runs = await asyncio.to_thread(self._look)
            if runs != self._signs:
                async with self._changed:
                    self._signs = runs
                    self._changed.notify_all()
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        for process in self._making.values():
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _look(self) -> dict[str, str]:
        return {name: signs(folder) for name, folder in self._questions.runs.all().items()}

    def _file(self, file: Path) -> Route:
        path = "/" if file.name == "index.html" else f"/{file.relative_to(STATIC).as_posix()}"
        kind = mimetypes.guess_type(file.name)[0] or "text/plain"
        data = file.read_bytes()

        async def answer(_: dict[str, Any], __: web.Request) -> web.Response:
            return web.Response(body=data, content_type=kind, charset="utf-8")

        return Route("GET", path, "open", "a part of the page", answer)

    def _question(self, name: str) -> Route:
        async def answer(body: dict[str, Any], _: web.Request) -> Any:
            try:
                said = await asyncio.to_thread(self._questions.ask, name, body)
                if name in ("samples", "prompts", "reasons", "again"):
                    await self._bring_up_to_date(body.get("other", body["run"]))
            except ConfigError as error:
                raise Refusal(404, str(error)) from error
            return said

        return Route("POST", f"/api/{name}", "data", name, answer, SCHEMAS[name], None, BODY_BYTES)

    async def _bring_up_to_date(self, name: str) -> None:
        """Starts making the index of a run, unless that is going on or it has all."""
        folder = self._questions.runs.folder(name)
        making = self._making.get(name)
        if making is not None and making.returncode is None:
            return
        if await asyncio.to_thread(SampleIndex(folder, self._cache).pending):
            words = ("-m", "tandem.view.index", str(folder), str(self._cache))
            self._making[name] = await asyncio.create_subprocess_exec(sys.executable, *words)

    async def _graph(self, body: dict[str, Any], _: web.Request) -> dict[str, str]:
        """The models and stages of a run as `tandem graph` draws them, by the configuration that it wrote."""
        try:
            folder = self._questions.runs.folder(body["run"])
        except ConfigError as error:
            raise Refusal(404, str(error)) from error
        kind = str(run_info(folder).get("command") or "train")
        words = ("-m", "tandem", "graph", str(folder / "config.yaml"), "--for", kind, "--mermaid")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(GRAPH_S):
                out, error = await process.communicate()
        except TimeoutError:
            raise Refusal(503, f"tandem graph has not answered within {GRAPH_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise Refusal(404, f"tandem graph says: {error.decode(errors='replace')[-2000:].strip()}")
        return {"mermaid": out.decode(errors="replace")}

    async def _events(self, _: dict[str, Any], request: web.Request) -> web.StreamResponse:
        """Server-sent events: the names of the runs that have changed."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        async for names in self._changes():
            await response.write(f"data: {json.dumps(names)}\n\n".encode())
        return response

    async def _changes(self) -> AsyncIterator[list[str]]:
        """The runs that came, went or wrote; an empty list now and then shows that somebody is still there."""
        known = self._signs
        yield []
        while True:
            try:
                async with asyncio.timeout(15), self._changed:
                    await self._changed.wait_for(lambda: self._signs != known)  # noqa: B023 — looked at at once
            except TimeoutError:
                yield []
            before, known = known, self._signs
            changed = [name for name in before.keys() | known.keys() if before.get(name) != known.get(name)]
            if changed:
                yield changed
