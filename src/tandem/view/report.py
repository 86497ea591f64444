"""One HTML file with everything in it: the same pages as the viewer's, and the answers to what they ask."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from tandem.config.errors import ConfigError
from tandem.state.run_folder import now
from tandem.view.questions import RunAnswers, bounded
from tandem.view.routes import STATIC
from tandem.view.runs import is_run, logs

MOST_BYTES = 12 << 20
"""Bytes of answers; samples are left out from where they would be more."""

STEPS = 12
"""Steps whose samples are in a report: the first, the last and some between."""

MOST_TEXT = 20_000
"""Characters of one text in a report."""

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "([^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_ORDERS = ("seen", "learnt", "forgotten", "worst", "best")


def report(questions: RunAnswers) -> str:
    """The page about all runs of these questions.

    Raises:
        ConfigError: there is no run, or the curves alone are too much for one file.
    """
    style = "\n".join((STATIC / name).read_text() for name in ("uplot/uPlot.min.css", "style.css"))
    scripts = [(STATIC / "uplot/uPlot.iife.min.js").read_text(), bundle(STATIC / "js", "app.js")]
    hashes = " ".join(map(_hash, scripts))
    rest = "img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    policy = f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; {rest}"
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
    """The modules as one script, each in a function of its own: a page from a file may not load modules."""
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
    text = _IMPORT.sub(lambda found: f"const {found[1]} = {_variable(_beside(folder, name, found[2]))};", text)
    text = _EXPORT.sub("", text)
    if re.search(r"^\s*(?:import|export)\b", text, re.MULTILINE) or "</script" in text.lower():
        raise AssertionError(f"{name} imports or exports in a way that a report cannot take")
    return f"const {_variable(name)} = (() => {{\n{text}\nreturn {{ {exports} }};\n}})();"


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name)


def answers(questions: RunAnswers) -> dict[str, Any]:
    """The answers that the pages of a report ask for, by question; samples as far as there is room."""
    runs = questions.runs.all()
    if not any(map(is_run, runs.values())):
        raise ConfigError("there is no run in these folders")
    entries, room = {_key("runs", {}): questions.ask("runs", {})}, MOST_BYTES
    for name, folder in runs.items():
        for key, answer in _of_run(questions, name, folder):
            entries[key] = answer
    room -= len(json.dumps(entries))
    if room < 0:
        raise ConfigError("the curves and logs of these runs are too much for one file; name fewer runs")
    for number, name in enumerate(runs):
        share = room // (len(runs) - number)
        steps = questions.ask("steps", {"run": name})
        fitting_steps: set[int] = set()
        for step in _spread(steps):
            more = dict(_of_step(questions, name, step, share))
            size = len(json.dumps(more))
            if size > share:
                break
            share, room = share - size, room - size
            entries |= more
            fitting_steps.add(step)
        entries[_key("steps", {"run": name})] = sorted(fitting_steps)
    return entries


def _key(name: str, body: Mapping[str, Any]) -> str:
    """The same text as the page makes of a question."""
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
    """Up to `STEPS` of them, the last and the first before all others."""
    places = sorted({round(n * (len(steps) - 1) / (STEPS - 1)) for n in range(STEPS)}) if steps else []
    return [steps[place] for place in dict.fromkeys([*places[-1:], *places])]


def _of_step(questions: RunAnswers, name: str, step: int, room: int) -> Iterator[tuple[str, Any]]:
    """The samples of a step, and their tokens as far as those fit in half the room."""
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
            continue  # a dropped prompt has none
        room -= len(json.dumps(tokens))
        if room < 0:
            return
        yield _key("tokens", body), tokens
