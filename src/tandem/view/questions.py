"""Answers the queries of a page about runs, by name. The server sends the answers over HTTP; a report contains them."""

import contextlib
import itertools
import json
import math
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.config.errors import ConfigError
from tandem.protocol.bodies import Schema, integer, record, text
from tandem.tracking.record_files import lines_path, recorded_steps
from tandem.view.columns import MOST_TOKENS, ShownMedia, TokenColumns, decoder, media_numbers, shown_columns
from tandem.view.index import SHOWN_PROMPT, SampleIndex, index_folder, parse_line, question_of, read_filter
from tandem.view.runs import (
    Runs,
    config_differences,
    config_text,
    curves,
    facts,
    log_entries,
    summary,
    timeline,
)

MOST_TEXT = 200_000
"""Most characters of one text in an answer."""

MOST_SAMPLES = 1000
"""Most samples in one answer."""

MOST_PROMPTS = 100
COLUMNS = 60
"""Most columns of the picture of prompts over time."""

SEARCH_S = 20.0
"""A search for words stops after this time, in seconds, and says at which step it stopped."""

ORDERS = {
    "reward": "reward IS NULL, reward DESC, step, line",
    "advantage": "advantage IS NULL, advantage DESC, step, line",
    "tokens": "tokens IS NULL, tokens DESC, step, line",
    "group": "step, grp, reward DESC",
    "step": "step DESC, grp, reward DESC",
}
_RUN: dict[str, Schema] = {"run": text(500)}
_STEP: dict[str, Schema] = {**_RUN, "step": integer(-1, 2**53)}


class RunAnswers:
    """Answers queries about the runs of one viewer. Thread-safe."""

    def __init__(self, runs: Runs, cache: Path):
        self.runs, self._cache = runs, cache

    def ask(self, name: str, body: Mapping[str, Any]) -> Any:
        """Answers the query ``name`` with the arguments ``body`` (see `SCHEMAS`), in JSON types.

        Raises:
            ConfigError: a run, step or sample does not exist, or a filter cannot be parsed.
        """
        if name == "runs":
            lines = [summary(run, folder) for run, folder in self.runs.all().items()]
            return [line | {"health": bounded(line["health"])} for line in lines]
        folder = self.runs.folder(body["run"])
        arguments = {key: value for key, value in body.items() if key != "run"}
        answer = _OF_ONE_RUN[name] if name in _OF_ONE_RUN else getattr(self, f"_{name}")
        return answer(folder, **arguments)

    def index(self, folder: Path) -> SampleIndex:
        """Opens the index of a run."""
        return SampleIndex(folder, self._cache)

    def _differences(self, folder: Path, other: str) -> list[dict[str, str]]:
        return config_differences(folder, self.runs.folder(other))

    def _reasons(self, folder: Path) -> dict[str, Any]:
        sql = "SELECT dropped AS reason, count(*) AS count, max(step) AS step FROM samples WHERE dropped != ''"
        index = self.index(folder)
        pending = len(index.pending())
        return {"rows": list(index.rows(f"{sql} GROUP BY dropped ORDER BY count DESC LIMIT 100")), "pending": pending}

    def _samples(self, folder: Path, step: int, filter: str, order: str, offset: int, limit: int) -> dict[str, Any]:
        """Returns the samples of a step (-1: of all steps) that match a filter, with the beginning of their texts."""
        index, condition = self.index(folder), read_filter(filter)
        if step >= 0:
            index.update(step)
        pending = len(index.pending()) if step < 0 else 0  # first: steps that are added meanwhile count
        only = None if step < 0 else step
        if not condition.words:
            samples = [
                _excerpt(folder, row) for row in index.select(condition, ORDERS[order], step=only, window=(limit, offset))
            ]
            fit, stopped_at = index.count(condition, step=only), None
        else:
            samples, fit, stopped_at = self._search(
                folder, index.select(condition, f"step DESC, {ORDERS[order]}", step=only), condition.words, offset, limit
            )
        return {"rows": samples, "fit": fit, "stopped_at": stopped_at, "pending": pending}

    @staticmethod
    def _search(
        folder: Path, rows: Iterable[dict[str, Any]], words: list[str], offset: int, limit: int
    ) -> tuple[list[dict[str, Any]], int, int | None]:
        """Returns (samples, number of matches, the step at which the time was up or None). Opens each record once."""
        until, fit = time.monotonic() + SEARCH_S, 0
        excerpts: list[dict[str, Any]] = []
        for step, of_step in itertools.groupby(rows, key=lambda row: row["step"]):
            if time.monotonic() > until:
                return excerpts, fit, step
            with (
                contextlib.suppress(OSError, ValueError),  # the record was removed, or is empty
                lines_path(folder, step).open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                for row in of_step:
                    line = data[row["offset"] : row["offset"] + row["length"]]
                    if _has(line, words) and _says(parse_line(line) or {}, words):
                        if fit >= offset and len(excerpts) < limit:
                            excerpts.append(_excerpt(folder, row))
                        fit += 1
        return excerpts, fit, None

    def _group(self, folder: Path, step: int, group: int) -> list[dict[str, Any]]:
        """Returns the full records of the samples of a group, the best reward first."""
        index = self.index(folder)
        index.update(step)
        rows = index.rows(
            "SELECT * FROM samples WHERE step = ? AND grp = ? ORDER BY reward DESC, line LIMIT 500", [step, group]
        )
        samples = [{"line": row["line"], **bounded(parse_line(read_text(folder, row)) or {})} for row in rows]
        media = ShownMedia()
        return [
            {**sample, "media": [media.of(number) for number in media_numbers(sample.get("messages"))]} for sample in samples
        ]

    def _again(self, folder: Path, step: int, group: int, other: str) -> dict[str, Any]:
        """Returns the groups of the same prompt in the run ``other``, which may be this run: (step, group, number of
        samples, mean success)."""
        first_index, index = self.index(folder), self.index(self.runs.folder(other))
        first_index.update(step)
        prompt = next(
            first_index.rows("SELECT prompt FROM samples WHERE step = ? AND grp = ?", [step, group]), {"prompt": None}
        )
        sql = "SELECT step, grp, samples, success FROM groups WHERE prompt = ? ORDER BY step, grp LIMIT 2000"
        groups = [list(row.values()) for row in index.rows(sql, [prompt["prompt"]])]
        return {"groups": groups, "pending": len(index.pending())}

    def _tokens(self, folder: Path, step: int, line: int, first: int) -> dict[str, Any]:
        """Returns the tokens of a sample with their values, by trajectory."""
        index = self.index(folder)
        index.update(step)
        row = next(index.rows("SELECT sample_id FROM samples WHERE step = ? AND line = ?", [step, line]), None)
        if row is None:
            raise ConfigError(f"step {step} has no sample in line {line}")
        if row["sample_id"] is None:
            raise ConfigError("this prompt was not trained, so its tokens are not recorded")
        columns = TokenColumns(folder, step, index_folder(self._cache, folder))
        piece, note = decoder(folder)
        entries = []
        for trajectory in columns.trajectories(row["sample_id"]):
            ids = trajectory["input_ids"][first : first + MOST_TOKENS].tolist()
            entries.append(
                {
                    **{
                        "length": len(trajectory["input_ids"]),
                        "first": first,
                        "ids": ids,
                        "pieces": [piece(token) for token in ids],
                    },
                    "trained": trajectory["loss_mask"][first : first + MOST_TOKENS].astype(int).tolist(),
                    "columns": shown_columns(trajectory, first),
                }
            )
        return {"note": note, "trajectories": entries, "times": columns.times(row["sample_id"])}

    def _prompts(self, folder: Path, order: str, offset: int) -> dict[str, Any]:
        """Returns the success of each prompt over time: the mean accuracy of its recorded samples, or without accuracy the
        mean reward."""
        index = self.index(folder)
        pending = len(index.pending())
        ends = next(index.rows("SELECT min(step) AS first, max(step) AS last FROM groups"))
        if ends["last"] is None:
            return {"rows": [], "count": 0, "edges": [], "pending": pending}
        first, last = ends["first"], ends["last"]
        width = max(1, math.ceil((last - first + 1) / COLUMNS))
        cells: dict[int, dict[int, list[float]]] = {}
        sql = f"""SELECT prompt, (step - {first}) / {width} AS place, sum(success * samples) / sum(samples) AS success,
            sum(samples) AS samples, max(step) AS step, max(grp) AS grp FROM groups WHERE success IS NOT NULL
            GROUP BY prompt, place ORDER BY place"""
        for row in index.rows(sql):
            cell = [float(f"{row['success']:.4g}"), row["samples"], row["step"], row["grp"]]
            cells.setdefault(row["prompt"], {})[row["place"]] = cell
        ranked = sorted(cells, key=lambda prompt: _PROMPT_ORDERS[order](list(cells[prompt].values())))
        page = ranked[offset : offset + MOST_PROMPTS]
        marks = ",".join("?" * len(page))
        texts = {row["prompt"]: row["text"] for row in index.rows(f"SELECT * FROM prompts WHERE prompt IN ({marks})", page)}
        rows = [{"text": texts.get(prompt, ""), "cells": cells[prompt]} for prompt in page]
        edges = list(range(first, last + 1, width))
        return {"rows": rows, "count": len(ranked), "edges": edges, "pending": pending}


_OF_ONE_RUN: dict[str, Callable[..., Any]] = {
    "curves": curves,
    "facts": lambda folder: bounded(facts(folder)),
    "config": lambda folder: {"text": config_text(folder)},
    "log": log_entries,
    "timeline": timeline,
    "steps": recorded_steps,
}
"""Queries that the files of one run answer, without its index."""

_PROMPT_ORDERS: dict[str, Callable[[list[list[float]]], Any]] = {
    "seen": lambda cells: -sum(cell[1] for cell in cells),
    "worst": lambda cells: (cells[-1][0], -len(cells)),
    "best": lambda cells: (-cells[-1][0], -len(cells)),
    "learnt": lambda cells: cells[0][0] - cells[-1][0],
    "forgotten": lambda cells: cells[-1][0] - max(cell[0] for cell in cells),
}

SCHEMAS: dict[str, Schema] = {
    "runs": record({}),
    "curves": record({**_RUN, "after": integer(0, 2**53), "file": text(40)}, ["run", "after", "file"]),
    "facts": record(_RUN, ["run"]),
    "config": record(_RUN, ["run"]),
    "differences": record({**_RUN, "other": text(500)}, ["run", "other"]),
    "log": record({**_RUN, "name": text(500)}, ["run", "name"]),
    "timeline": record(_STEP, ["run", "step"]),
    "steps": record(_RUN, ["run"]),
    "reasons": record(_RUN, ["run"]),
    "samples": record(
        {
            **_STEP,
            **{"filter": text(2000), "order": {"enum": list(ORDERS)}, "offset": integer(0, 10**9)},
            "limit": integer(1, MOST_SAMPLES),
        },
        ["run", "step", "filter", "order", "offset", "limit"],
    ),
    "group": record({**_STEP, "group": integer(-1, 2**53)}, ["run", "step", "group"]),
    "again": record({**_STEP, "group": integer(-1, 2**53), "other": text(500)}, ["run", "step", "group", "other"]),
    "tokens": record({**_STEP, "line": integer(0, 10**9), "first": integer(0, 10**9)}, ["run", "step", "line", "first"]),
    "prompts": record(
        {**_RUN, "order": {"enum": list(_PROMPT_ORDERS)}, "offset": integer(0, 10**9)}, ["run", "order", "offset"]
    ),
}
"""Query → schema of its arguments; all arguments are required."""


def read_text(folder: Path, row: Mapping[str, Any]) -> bytes:
    """Reads the line of a sample from its file; empty if the record was removed meanwhile."""
    try:
        with lines_path(folder, row["step"]).open("rb") as file:
            file.seek(row["offset"])
            return file.read(row["length"])
    except OSError:
        return b""


def _has(line: bytes, words: list[str]) -> bool:
    """True if each word, with JSON escapes, is in the raw line."""
    text = line.decode(errors="replace").lower()
    return all(json.dumps(word, ensure_ascii=False)[1:-1] in text for word in words)


def _says(sample: Mapping[str, Any], words: list[str]) -> bool:
    """True if each word is in a text that the model read or wrote."""
    read = (str(sample.get("prompt") or ""), str(sample.get("completion") or ""), *_texts(sample.get("messages")))
    text = "\n".join(read).lower()
    return all(word in text for word in words)


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts within a chat, including tool calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _excerpt(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a sample, with the end of its prompt and the beginning of its last answer."""
    sample = parse_line(read_text(folder, row)) or {}
    keep = (
        "step",
        "line",
        "sample",
        "reward",
        "accuracy",
        "advantage",
        "tokens",
        "stop",
        "dropped",
        "why",
        "failures",
        "source",
    )
    excerpt = {name: row[name] for name in keep} | {"group": row["grp"]}
    prompt = sample.get("prompt")  # absent if the prompt was dropped before generation; then use its turns
    excerpt["prompt"] = (prompt if isinstance(prompt, str) else question_of(sample))[-SHOWN_PROMPT:]
    return excerpt | {"completion": str(sample.get("completion") or "")[:SHOWN_PROMPT]}


def bounded(value: Any, most: int = MOST_TEXT) -> Any:
    """Limits a value for a page: long texts and lists are cut (a text says so), and numbers that are not finite become null.
    ``most``: most characters of a text."""
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[:most]}… ({len(value) - most} more characters)"
    if isinstance(value, dict):
        return {str(key)[:500]: bounded(item, most) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bounded(item, most) for item in value[:2000]]
    return None if isinstance(value, float) and not math.isfinite(value) else value
