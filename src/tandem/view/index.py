"""The index of a run's recorded samples: a small SQLite database in the cache folder, updated when a record has changed.

Texts are not copied: the index stores the place of each line in its file. ``python -m tandem.view.index RUN CACHE`` updates
it in a separate process, so that a long run costs the server neither memory nor time.

Also translates a filter as the user types it, such as ``truncated reward > 0 failed: timeout "the words"``, into an SQL
condition and words to search for in the texts.
"""

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tandem.api.shared_files import json_object
from tandem.config.errors import ConfigError
from tandem.tracking.record_files import lines_path, recorded_steps

NUMBERS = {name: name for name in ("reward", "advantage", "accuracy", "tokens", "step", "sample")} | {"group": "grp"}
FLAGS = {
    "truncated": "truncated",
    "dropped": "dropped != ''",
    "trained": "dropped = ''",
    "failed": "(dropped != '' OR failures != '')",
    "right": "accuracy >= 1",
    "wrong": "accuracy < 1",
    "greedy": "greedy",
}
TEXTS = {
    "failed": "dropped || ' ' || why || ' ' || failures",
    "dropped": "dropped || ' ' || why",
    "source": "source",
    "stop": "stop",
}
_TERM = re.compile(
    r"(?P<no>not\s+)?(?:"
    r"(?P<number>[a-z]+)\s*(?P<sign>>=|<=|≥|≤|!=|==|=|>|<)\s*(?P<value>[^\s\"()]*)"
    r'|(?P<field>[a-z]+):\s*(?:"(?P<phrase>[^"]*)"|(?P<part>[^\s"]+))'
    r'|"(?P<quoted>[^"]*)"|(?P<word>[^\s"]+))',
    re.IGNORECASE,
)


_SIGNS = re.compile(r"[<>=!≥≤]+|[<>=!≥≤]?[-+.\d]+|\(.*|.*\)")
"""Words that look like part of an unsupported expression: an operator alone, a number, or brackets."""


class Condition(NamedTuple):
    """A filter of samples, as an SQL condition with its values, and words."""

    sql: str
    values: list[float | str]
    words: list[str]
    """Each word must be in the prompt or in an answer, ignoring case."""


def read_filter(text: str) -> Condition:
    """Parses a filter. All its terms must hold; ``not`` negates the term after it; ``and`` between terms is optional.

    Raises:
        ConfigError: a name is unknown (the message lists the names), a value is not a number, or a term cannot be parsed.
    """
    parts: list[str] = []
    values: list[float | str] = []
    words: list[str] = []
    if text.count('"') % 2:
        raise ConfigError("a quote is not closed: write words to search for between two quotes")
    for term in _TERM.finditer(text):
        negation = "NOT " if term["no"] else ""
        if term["number"]:
            column = _named(NUMBERS, term["number"], "figure")
            try:
                values.append(float(term["value"]))
            except ValueError:
                raise ConfigError(f"{term[0]!r}: {term['value']!r} is not a number") from None
            sign = {"≥": ">=", "≤": "<=", "==": "="}.get(term["sign"], term["sign"])
            parts.append(f"{negation}coalesce({column} {sign} ?, 0)")
        elif term["field"]:
            parts.append(f"{negation}instr(lower({_named(TEXTS, term['field'], 'text')}), ?)")
            values.append((term["phrase"] or term["part"] or "").lower())
        elif term["word"] and term["word"].lower() in FLAGS:
            parts.append(f"{negation}coalesce({FLAGS[term['word'].lower()]}, 0)")
        elif term["word"] and (term["word"].lower() in {*NUMBERS, *TEXTS, "or"} or _SIGNS.fullmatch(term["word"])):
            raise ConfigError(
                f'{term[0]!r} cannot be read: write terms such as `reward > 0`, `truncated`, `failed: timeout` and "the '
                'words", all of which must hold; put any other words in quotes'
            )
        elif negation:
            raise ConfigError(
                f"{term[0]!r}: write `not` before a term such as `truncated` or `reward > 0`, not before words"
            )
        elif (word := term["quoted"] or term["word"]) and word.lower() != "and":
            words.append(word.lower())
    return Condition(" AND ".join(f"({part})" for part in parts), values, words)


def _named(table: dict[str, str], name: str, kind: str) -> str:
    if name.lower() not in table:
        raise ConfigError(f"there is no {kind} {name!r}; there are {', '.join(table)}; put words to search for in quotes")
    return table[name.lower()]


VERSION = 1
"""Version of the tables; each version has its own file."""

LONGEST_LINE = 1 << 26
"""Most bytes of a line; a longer line is skipped, because no model writes so much and parsing takes ten times the memory."""

_COLUMNS = (
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
    "tokens",
    "stop",
    "truncated",
    "dropped",
    "why",
    "failures",
    "greedy",
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
"""Most characters of a prompt in the list of prompts."""


def index_folder(cache: Path, run: Path) -> Path:
    """Returns the folder of a run in the cache."""
    return cache / "view" / hashlib.sha256(os.fsencode(run.absolute())).hexdigest()[:20]


class SampleIndex:
    """The index of the recorded samples of one run. Thread-safe, because each call opens the database anew."""

    def __init__(self, run: Path, cache: Path):
        self.run = run
        self._file = index_folder(cache, run) / f"samples-{VERSION}.sqlite"

    def pending(self) -> list[int]:
        """Returns the steps whose index is out of date, newest first: their record is new, changed or removed."""
        known = {row["step"]: row["stamp"] for row in self.rows("SELECT step, stamp FROM steps")}
        present = {step: _stamp(lines_path(self.run, step)) for step in recorded_steps(self.run)}
        return sorted((step for step in known.keys() | present.keys() if known.get(step) != present.get(step)), reverse=True)

    def update(self, step: int | None = None) -> None:
        """Reads the record of this step (None: of all steps) into the index, if it has changed."""
        for number in self.pending() if step is None else [step]:
            stamp = _stamp(lines_path(self.run, number))
            known = next(self.rows("SELECT stamp FROM steps WHERE step = ?", [number]), {"stamp": None})
            if stamp != known["stamp"]:
                rows = [] if stamp is None else [_row(number, *place) for place in read_lines(self.run, number)]
                with self._open() as base:
                    _store(base, number, stamp, rows)

    def select(
        self, condition: Condition, order: str, *, step: int | None = None, window: tuple[int, int] = (-1, 0)
    ) -> Iterator[dict[str, Any]]:
        """Yields the samples of a step (None: of all steps) that satisfy ``condition.sql``.

        Args:
            condition: from `read_filter`; its words are not checked here.
            order: an SQL expression; never text from a request.
            step: only samples of this step.
            window: (most samples, -1: all; number of samples to skip).
        """
        where, values = _where(condition, step)
        return self.rows(f"SELECT * FROM samples WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?", [*values, *window])

    def count(self, condition: Condition, *, step: int | None = None) -> int:
        """Returns the number of samples that `select` would yield without a window."""
        where, values = _where(condition, step)
        return int(next(self.rows(f"SELECT count(*) AS count FROM samples WHERE {where}", values))["count"])

    def rows(self, sql: str, values: Iterable[Any] = ()) -> Iterator[dict[str, Any]]:
        """Yields the rows of an SQL query."""
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
            raise ConfigError(
                f"the index cannot be written to {self._file.parent}: {error}; set TANDEM_CACHE to another folder"
            ) from error
        try:
            base.execute("PRAGMA synchronous = OFF")  # a lost index can be built again
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
    """Yields (number, offset, length in bytes, sample) of each line of a record. Skips lines that are not a sample."""
    offset = 0
    with contextlib.suppress(FileNotFoundError), lines_path(run, step).open("rb") as file:  # the run may have removed it
        for number, data in enumerate(file):
            sample = parse_line(data)
            if sample is not None:
                yield number, offset, len(data), sample
            offset += len(data)


def parse_line(data: bytes) -> dict[str, Any] | None:
    """Parses the sample in a line; None if the line is incomplete or not a sample."""
    return json_object(data.decode(errors="replace")) if len(data) <= LONGEST_LINE else None


def _row(step: int, line: int, offset: int, length: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    stops = sample.get("stop_reason")
    stops = [str(stop) for stop in stops] if isinstance(stops, list) else []
    failures = sample.get("failures")
    prompt = question_of(sample)
    return {
        **{name: _number(sample.get(name)) for name in ("reward", "accuracy", "advantage", "tokens", "sample", "sample_id")},
        **{"step": step, "grp": _number(sample.get("group")), "line": line, "offset": offset, "length": length},
        **{name: str(sample.get(name) or "")[:500] for name in ("source", "dropped", "why")},
        "prompt": int.from_bytes(hashlib.blake2b(prompt.encode(errors="replace"), digest_size=7).digest()),
        "text": prompt[:SHOWN_PROMPT],
        "stop": " ".join(sorted(set(stops)))[:200],
        "truncated": "length" in stops,
        "failures": "\n".join(map(str, failures))[:2000] if isinstance(failures, list) else "",
        "greedy": bool(sample.get("greedy")),
    }


def question_of(sample: Mapping[str, Any]) -> str:
    """Returns the first message of the user, by which prompts are told apart; without messages, the whole prompt."""
    turns = sample.get("messages")
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    roles = [turn.get("role") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    first = contents[roles.index("user")] if "user" in roles else sample.get("prompt") or (contents[0] if contents else "")
    return first if isinstance(first, str) else json.dumps(first, ensure_ascii=False, default=str)


def _number(value: Any) -> float | int | None:
    return value if isinstance(value, int | float) and abs(value) < 2**62 else None


def _store(base: sqlite3.Connection, step: int, stamp: str | None, rows: list[dict[str, Any]]) -> None:
    """Replaces all rows of a step in the index. ``stamp``: None removes the step."""
    for table in ("samples", "steps", "groups"):
        base.execute(f"DELETE FROM {table} WHERE step = ?", [step])
    if stamp is None:
        return
    base.execute("INSERT INTO steps VALUES (?, ?)", [step, stamp])
    texts = ("source", "text", "stop", "dropped", "why", "failures")
    for row in rows:  # SQLite cannot store a text with a lone surrogate
        row |= {name: row[name].encode(errors="replace").decode() for name in texts}
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
