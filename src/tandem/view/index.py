"""The index of a run's recorded samples: a small data base in the cache folder, made again whenever a record has changed.

Texts stay where they are: the index knows the place of each line in its file. ``python -m tandem.view.index RUN CACHE``
brings it up to date in a process of its own, so that a long run costs the server neither memory nor time.
"""

import contextlib
import hashlib
import json
import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.config.errors import ConfigError
from tandem.tracking.record_files import lines_path, recorded_steps
from tandem.view.filters import Condition

VERSION = 1
"""The version of the tables; another one is another file."""

LONGEST_LINE = 1 << 26
"""Bytes of a line above which it is passed over: no model writes so much, and parsing takes ten times the memory."""

_COLUMNS = (
    *(
        "step",
        "grp",
        "sample",
        "line",
        "offset",
        "length",
        "sample_id",
        "source",
        "prompt",
        "reward",
        "accuracy",
        "advantage",
    ),
    *("tokens", "stop", "truncated", "dropped", "why", "failures", "greedy"),
)
_TABLES = f"""
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, stamp TEXT);
CREATE TABLE IF NOT EXISTS samples ({", ".join(_COLUMNS)});
CREATE INDEX IF NOT EXISTS samples_by_step ON samples (step, grp);
CREATE TABLE IF NOT EXISTS prompts (prompt INTEGER PRIMARY KEY, text TEXT);
CREATE TABLE IF NOT EXISTS groups (step INTEGER, grp INTEGER, prompt INTEGER, source TEXT, samples INTEGER, success REAL);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step);
"""

SHOWN_PROMPT = 300
"""Characters of a prompt in the list of prompts."""


def index_folder(cache: Path, run: Path) -> Path:
    """The folder of a run in the cache."""
    return cache / "view" / hashlib.sha256(os.fsencode(run.absolute())).hexdigest()[:20]


class SampleIndex:
    """The recorded samples of one run by figures and reasons. Each call opens the data base anew: any thread may ask."""

    def __init__(self, run: Path, cache: Path):
        self.run = run
        self._file = index_folder(cache, run) / f"samples-{VERSION}.sqlite"

    def pending(self) -> list[int]:
        """Steps whose record the index does not know, newest first: they are new, changed or gone."""
        known = {row["step"]: row["stamp"] for row in self.rows("SELECT step, stamp FROM steps")}
        there = {step: _stamp(lines_path(self.run, step)) for step in recorded_steps(self.run)}
        return sorted((step for step in known.keys() | there.keys() if known.get(step) != there.get(step)), reverse=True)

    def update(self, step: int | None = None) -> None:
        """Reads the record of this step, or of all, where it is new or has changed."""
        for one in self.pending() if step is None else [step]:
            stamp = _stamp(lines_path(self.run, one))
            known = next(self.rows("SELECT stamp FROM steps WHERE step = ?", [one]), {"stamp": None})
            if stamp != known["stamp"]:
                rows = [] if stamp is None else [_row(one, *place) for place in read_lines(self.run, one)]
                with self._open() as base:
                    _store(base, one, stamp, rows)

    def select(
        self, condition: Condition, order: str, *, step: int | None = None, window: tuple[int, int] = (-1, 0)
    ) -> Iterator[dict[str, Any]]:
        """The samples of a step, or of all, that fit by their figures; ``order`` is of ours, never from outside.
        ``window``: how many (-1: all) after how many."""
        where, values = _where(condition, step)
        return self.rows(f"SELECT * FROM samples WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?", [*values, *window])

    def count(self, condition: Condition, *, step: int | None = None) -> int:
        """The number of those samples."""
        where, values = _where(condition, step)
        return int(next(self.rows(f"SELECT count(*) AS count FROM samples WHERE {where}", values))["count"])

    def rows(self, sql: str, values: Iterable[Any] = ()) -> Iterator[dict[str, Any]]:
        """The rows of a question to the data base, which can only be read here."""
        with self._open() as base:
            base.row_factory = sqlite3.Row
            for row in base.execute(sql, list(values)):
                yield dict(row)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            base = sqlite3.connect(self._file, timeout=30)
        except (OSError, sqlite3.OperationalError) as error:
            raise ConfigError(f"the index cannot be kept in {self._file.parent}: {error}; set TANDEM_CACHE") from error
        try:
            base.execute("PRAGMA synchronous = OFF")  # it can always be made again
            if not base.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                base.executescript(_TABLES)
            with base:
                yield base
        finally:
            base.close()


def _where(condition: Condition, step: int | None) -> tuple[str, list[Any]]:
    parts = (["step = ?"] if step is not None else []) + ([condition.sql] if condition.sql else [])
    return " AND ".join(parts) or "1", ([] if step is None else [step]) + condition.values


def _stamp(file: Path) -> str | None:
    try:
        state = file.stat()
    except OSError:
        return None
    return f"{state.st_size} {state.st_mtime_ns}"


def read_lines(run: Path, step: int) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
    """(number, offset, bytes, sample) of each line of a record; what is torn or no sample is passed over."""
    offset = 0
    with contextlib.suppress(FileNotFoundError), lines_path(run, step).open("rb") as file:  # its place was needed since
        for number, data in enumerate(file):
            sample = parse_line(data)
            if sample is not None:
                yield number, offset, len(data), sample
            offset += len(data)


def parse_line(data: bytes) -> dict[str, Any] | None:
    """The sample in a line; None where it is torn or no sample."""
    try:
        sample = json.loads(data.decode(errors="replace")) if len(data) <= LONGEST_LINE else None
    except (ValueError, RecursionError):
        return None
    return sample if isinstance(sample, dict) else None


def _row(step: int, line: int, offset: int, length: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    stops = sample.get("stop_reason")
    stops = [str(one) for one in stops] if isinstance(stops, list) else []
    failures = sample.get("failures")
    prompt = question_of(sample)
    return {
        **{name: _number(sample.get(name)) for name in ("reward", "accuracy", "advantage", "tokens", "sample", "sample_id")},
        **{"step": step, "grp": _number(sample.get("group")), "line": line, "offset": offset, "length": length},
        **{name: str(sample.get(name) or "")[:500] for name in ("source", "dropped", "why")},
        "prompt": int.from_bytes(hashlib.blake2b(prompt.encode(errors="replace"), digest_size=7).digest()),
        "text": prompt[:SHOWN_PROMPT].encode(errors="replace").decode(),
        "stop": " ".join(sorted(set(stops)))[:200].encode(errors="replace").decode(),
        "truncated": "length" in stops,
        "failures": "\n".join(map(str, failures))[:2000] if isinstance(failures, list) else "",
        "greedy": bool(sample.get("greedy")),
    }


def question_of(sample: Mapping[str, Any]) -> str:
    """The first turn of the user, which tells one prompt from another; the whole prompt where there are no turns."""
    turns = sample.get("messages")
    said = [turn.get("content") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    roles = [turn.get("role") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    first = said[roles.index("user")] if "user" in roles else sample.get("prompt") or (said[0] if said else "")
    return first if isinstance(first, str) else json.dumps(first, ensure_ascii=False, default=str)


def _number(value: Any) -> float | int | None:
    return value if isinstance(value, int | float) and abs(value) < 2**62 else None


def _store(base: sqlite3.Connection, step: int, stamp: str | None, rows: list[dict[str, Any]]) -> None:
    """All that the index has about a step."""
    for table in ("samples", "steps", "groups"):
        base.execute(f"DELETE FROM {table} WHERE step = ?", [step])
    if stamp is None:
        return
    base.execute("INSERT INTO steps VALUES (?, ?)", [step, stamp])
    for row in rows:  # a text with half a character is none for a data base
        row |= {name: row[name].encode(errors="replace").decode() for name in ("source", "dropped", "why", "failures")}
    marks = ", ".join(f":{name}" for name in _COLUMNS)
    base.executemany(f"INSERT INTO samples VALUES ({marks})", rows)
    base.executemany("INSERT OR IGNORE INTO prompts VALUES (:prompt, :text)", rows)
    base.execute(
        "INSERT INTO groups SELECT step, grp, min(prompt), min(source), count(*), avg(coalesce(accuracy, reward)) "
        "FROM samples WHERE step = ? AND dropped = '' GROUP BY grp",
        [step],
    )


if __name__ == "__main__":
    SampleIndex(Path(sys.argv[1]), Path(sys.argv[2])).update()
