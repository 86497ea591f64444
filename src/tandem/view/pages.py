"""The pages of the viewer: served with answers to their queries and live events of changes, or written with the answers into
one HTML file, a report."""

import asyncio
import base64
import hashlib
import json
import mimetypes
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from aiohttp import web

from tandem.config.errors import ConfigError
from tandem.protocol.access import ServerLimits
from tandem.protocol.bodies import Refusal, record, text
from tandem.protocol.server import Application, Route
from tandem.state.existing import run_info
from tandem.state.machine import now
from tandem.view.index import SampleIndex
from tandem.view.questions import SCHEMAS, RunAnswers, bounded
from tandem.view.runs import is_run, logs, signs

STATIC = Path(__file__).with_name("static")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; media-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
LOOK_S = 1.0
"""Seconds between two checks of the run folders for changes."""

GRAPH_S = 120.0
BODY_BYTES = 1 << 14


class Viewer(Application):
    """Serves the pages about some runs. Indexes are updated in child processes, which end with the server."""

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
        """Does nothing: no request must finish before the server ends."""

    async def watch(self) -> None:
        """Checks every `LOOK_S` whether runs have changed, and notifies the event streams."""
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
                result = await asyncio.to_thread(self._questions.ask, name, body)
                if name in ("samples", "prompts", "reasons", "again"):
                    await self._bring_up_to_date(body.get("other", body["run"]))
            except ConfigError as error:
                raise Refusal(404, str(error)) from error
            return result

        return Route("POST", f"/api/{name}", "data", name, answer, SCHEMAS[name], None, BODY_BYTES)

    async def _bring_up_to_date(self, name: str) -> None:
        """Starts a process that updates the index of a run, unless one is running or the index is up to date."""
        folder = self._questions.runs.folder(name)
        making = self._making.get(name)
        if making is not None and making.returncode is None:
            return
        if await asyncio.to_thread(SampleIndex(folder, self._cache).pending):
            words = ("-m", "tandem.view.index", str(folder), str(self._cache))
            self._making[name] = await asyncio.create_subprocess_exec(sys.executable, *words)

    async def _graph(self, body: dict[str, Any], _: web.Request) -> dict[str, str]:
        """Returns the models and stages of a run as a Mermaid graph, from `tandem graph` with the run's configuration."""
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
                out, refused = await process.communicate()
        except TimeoutError:
            raise Refusal(503, f"tandem graph has not answered within {GRAPH_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise Refusal(404, f"tandem graph says: {refused.decode(errors='replace')[-2000:].strip()}")
        return {"mermaid": out.decode(errors="replace")}

    async def _events(self, _: dict[str, Any], request: web.Request) -> web.StreamResponse:
        """Streams server-sent events with the names of changed runs."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        async for names in self._changes():
            await response.write(f"data: {json.dumps(names)}\n\n".encode())
        return response

    async def _changes(self) -> AsyncIterator[list[str]]:
        """Yields the names of new, removed and changed runs. An empty list every 15 s keeps the connection alive."""
        known = self._signs
        yield []
        while True:
            try:
                async with asyncio.timeout(15), self._changed:
                    await self._changed.wait_for(lambda: self._signs != known)  # noqa: B023 — called before `known` changes
            except TimeoutError:
                yield []
            before, known = known, self._signs
            changed = [name for name in before.keys() | known.keys() if before.get(name) != known.get(name)]
            if changed:
                yield changed


MOST_BYTES = 12 << 20
"""Most bytes of all answers together; samples beyond it are left out."""

STEPS = 12
"""Most steps whose samples are in a report: the first, the last and some between."""

MOST_TEXT = 20_000
"""Most characters of one text in a report."""

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "([^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_ORDERS = ("seen", "learnt", "forgotten", "worst", "best")


def report(questions: RunAnswers) -> str:
    """Returns the HTML page about all runs of ``questions``.

    Raises:
        ConfigError: there is no run, or the curves and logs alone exceed `MOST_BYTES`.
    """
    style = "\n".join((STATIC / name).read_text() for name in ("uplot/uPlot.min.css", "style.css"))
    scripts = [(STATIC / "uplot/uPlot.iife.min.js").read_text(), bundle(STATIC / "js", "app.js")]
    hashes = " ".join(map(_hash, scripts))
    other_rules = "img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    policy = f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; {other_rules}"
    data = json.dumps({"written": now()[:16].replace("T", " "), "answers": answers(questions)}, allow_nan=False)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Tandem</title>',
            f'<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n<div id="app"></div>',
            f'<script type="application/json" id="answers">{data.replace("<", chr(92) + "u003c")}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        ]
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bundle(folder: Path, first: str) -> str:
    """Joins the JavaScript modules into one script, each in its own function, because a page opened from a file may not load
    modules. ``first``: the module that imports the others."""
    imports: dict[str, set[str]] = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        if name not in imports:
            statements = _IMPORT.findall((folder / name).read_text())
            imports[name] = {_beside(folder, name, other) for _, other in statements}
            waiting += imports[name]
    return "\n".join(_module(folder, name) for name in TopologicalSorter(imports).static_order())


def _beside(folder: Path, name: str, other: str) -> str:
    return (folder / name).parent.joinpath(other).resolve().relative_to(folder.resolve()).as_posix()


def _module(folder: Path, name: str) -> str:
    text = (folder / name).read_text()
    exports = ", ".join(_EXPORT.findall(text))
    text = _IMPORT.sub(lambda match: f"const {match[1]} = {_variable(_beside(folder, name, match[2]))};", text)
    text = _EXPORT.sub("", text)
    if re.search(r"^\s*(?:import|export)\b", text, re.MULTILINE) or "</script" in text.lower():
        raise AssertionError(f"{name} imports or exports in a form that a report does not support")
    return f"const {_variable(name)} = (() => {{\n{text}\nreturn {{ {exports} }};\n}})();"


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name)


def answers(questions: RunAnswers) -> dict[str, Any]:
    """Returns the answers to all queries of a report's pages, by `_key`. Samples are included until `MOST_BYTES`."""
    runs = questions.runs.all()
    if not any(map(is_run, runs.values())):
        raise ConfigError("there is no run in these folders")
    entries, room = {_key("runs", {}): questions.ask("runs", {})}, MOST_BYTES
    for name, folder in runs.items():
        for key, answer in _of_run(questions, name, folder):
            entries[key] = answer
    room -= len(json.dumps(entries))
    if room < 0:
        raise ConfigError("the curves and logs of these runs are too large for one file; name fewer runs")
    for number, name in enumerate(runs):
        share = room // (len(runs) - number)
        steps = questions.ask("steps", {"run": name})
        fitting_steps: set[int] = set()
        for step in _spread(steps):
            step_answers = dict(_of_step(questions, name, step, share))
            size = len(json.dumps(step_answers))
            if size > share:
                break
            share, room = share - size, room - size
            entries |= step_answers
            fitting_steps.add(step)
        entries[_key("steps", {"run": name})] = sorted(fitting_steps)
    return entries


def _key(name: str, body: Mapping[str, Any]) -> str:
    """Returns the text under which the answer to a query is stored; the page's JavaScript builds the same text."""
    return json.dumps([name, body], sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _of_run(questions: RunAnswers, name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    questions.index(folder).update()
    requests: list[tuple[str, dict[str, Any]]] = [
        ("curves", {"after": 0, "file": ""}),
        ("facts", {}),
        ("config", {}),
        ("reasons", {}),
    ]
    requests += [("log", {"name": log}) for log in {"log.txt": None, **logs(folder)}]
    requests += [("prompts", {"order": order, "offset": 0}) for order in _ORDERS]
    for question, body in requests:
        yield _key(question, {"run": name, **body}), questions.ask(question, {"run": name, **body})


def _spread(steps: list[int]) -> list[int]:
    """Chooses up to `STEPS` steps, evenly spread, and puts the last and the first before the others."""
    places = sorted({round(n * (len(steps) - 1) / (STEPS - 1)) for n in range(STEPS)}) if steps else []
    return [steps[place] for place in dict.fromkeys([*places[-1:], *places])]


def _of_step(questions: RunAnswers, name: str, step: int, room: int) -> Iterator[tuple[str, Any]]:
    """Yields the answers about a step's samples, and about their tokens as far as these fit in half of ``room`` (bytes)."""
    body = {"run": name, "step": step, "filter": "", "order": "group", "offset": 0, "limit": 1000}
    samples = questions.ask("samples", body)
    yield _key("samples", body), samples
    yield _key("timeline", {"run": name, "step": step}), questions.ask("timeline", {"run": name, "step": step})
    for group in dict.fromkeys(row["group"] for row in samples["rows"]):
        body = {"run": name, "step": step, "group": group}
        yield _key("group", body), bounded(questions.ask("group", body), MOST_TEXT)
    room //= 2
    for row in samples["rows"]:
        body = {"run": name, "step": step, "line": row["line"], "first": 0}
        try:
            tokens = questions.ask("tokens", body)
        except ConfigError:
            continue  # a dropped prompt has no tokens
        room -= len(json.dumps(tokens))
        if room < 0:
            return
        yield _key("tokens", body), tokens
