"""The rows of one source as they stand in their files, and what is read of their columns: one decision for all rows."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.config.data import OURS, DatasetConfig
from tandem.config.errors import ConfigError, nearest_names
from tandem.data.files import RawRow

CONVERSATIONS = ("messages", "conversations", "conversation")
PROMPTS = (*CONVERSATIONS, "prompt", "question", "problem", "instruction", "query", "input")
FULL_REPLIES = ("completion", "response", "output", "generated_solution")
ANSWERS = ("answer", "expected_answer", "ground_truth", "reward_model.ground_truth", "solution", *FULL_REPLIES)
SYSTEMS = ("system", "system_prompt")
"""Usual names of columns; of several the first counts."""

SAMPLE = 64
"""Rows, spread evenly, whose values decide what a column holds."""

_MISSING = object()


@dataclass(frozen=True)
class Reading:
    """The columns of a data set that are read, and those that are not, to be shown to the user."""

    source: str
    reads: Mapping[str, str]
    """Column → purpose; the purpose is empty where the column's name says it."""

    unread: tuple[str, ...]
    """Columns that no reader asks for. A reward or a workflow may, by name."""

    left_out: Mapping[str, int] = field(default_factory=dict)
    """Rows that cannot be used, by reason."""

    def told(self, asked: Iterable[str] = ()) -> str:
        """One line. ``asked``: columns that a reward asks for by name; ``row`` among them: it gets all."""
        names = set(asked)
        reads = [f"{name} ({purpose})" if purpose else name for name, purpose in self.reads.items()]
        reads += [f"{name} (the reward)" for name in self.unread if name in names]
        unread = ", ".join(name for name in self.unread if name not in names)
        label = "not read by Tandem (the reward or workflow gets the whole row)" if "row" in names else "not read"
        left_out = ", ".join(f"{number} {reason}" for reason, number in self.left_out.items())
        lines = [
            f"reads: {', '.join(reads)}",
            f"{label}: {unread}" * bool(unread),
            f"rows left out: {left_out}" * bool(left_out),
        ]
        return "; ".join(filter(None, lines))


class Table:
    """The rows of one source. A reader asks for columns by name; what it does not ask for counts as not read."""

    def __init__(self, rows: Sequence[RawRow], config: DatasetConfig, section: str = ""):
        """``section``: where the configuration has the keys of this data set, such as ``train_dataset.``."""
        self.config, self.section = config, section
        self._own = _union(rows)
        for ours, theirs in config.columns.items():
            if not _has(self._own, rows, theirs):
                raise ConfigError(
                    f"{rows[0].where}: {section}columns.{ours}={theirs}, but the row has no such column; "
                    f"{nearest_names(theirs, self._own)}"
                )
        for name in set(OURS) & set(self._own):
            raise ConfigError(f"{rows[0].where}: the column {name!r} has a name that Tandem gives to rows: rename it")
        self.replace([_renamed(row, config.columns) for row in rows] if config.columns else rows)
        names = {*PROMPTS, *ANSWERS, "chosen", "rejected", config.prompt_column, config.answer_column} & {*self.columns}
        odd = [name for name in names if any(_plain(value) is not value for value in self.samples(name))]
        if odd:
            plain = [{name: _plain(row.columns[name]) for name in odd if name in row.columns} for row in self.rows]
            self.replace([RawRow(row.columns | new, row.where) for row, new in zip(self.rows, plain, strict=True)])
        self._given = self.columns
        self.reads: dict[str, str] = {}

    def replace(self, rows: Sequence[RawRow]) -> None:
        """Puts other rows, in the same order, in place of these."""
        self.rows, self.columns = rows, _union(rows)
        self.sample = rows[:: -(-len(rows) // SAMPLE)]

    def has(self, name: str) -> bool:
        """True if some row has the column; ``a.b`` is the value ``b`` in the column ``a``."""
        return _has(self.columns, self.sample, name)

    def column(self, name: str, purpose: str = "") -> str:
        """Notes that a column is read, and as what."""
        self.reads[name] = purpose
        return name

    def wished(self, key: str) -> str | None:
        """The column that the configuration names by ``prompt_column`` or ``answer_column``.

        Raises:
            ConfigError: no row has it.
        """
        name: str | None = getattr(self.config, key)
        if name is not None and not self.has(name):
            head = name.rpartition(".")[0]
            inner = [f"{head}.{key}" for value in self.samples(head)[:1] if isinstance(value, Mapping) for key in value]
            is_slip = name not in PROMPTS + ANSWERS
            hint = nearest_names(name, [*self.columns, *inner]) if is_slip else f"columns there: {', '.join(self.columns)}"
            raise self.error(f"{self.section}{key}={name}, but the row has no such column; {hint}")
        return name

    def usual(self, names: Sequence[str]) -> list[str]:
        """The columns of these names that are there, whatever their case; those that the user named come first."""
        lower = {name.lower(): name for name in self.columns}
        found = {name: lower.get(name, name) for name in names if name in lower or self.has(name)}
        return [found[name] for name in sorted(found, key=lambda name: name not in self.config.columns)]

    def value(self, row: RawRow, name: str) -> Any:
        """The value of a row in a column.

        Raises:
            ConfigError: this row lacks the column.
        """
        value = _reach(row.columns, name)
        if value is _MISSING:
            there = ", ".join(row.columns) or "none"
            raise ConfigError(f"{row.where}: column {name!r} is missing, other rows have it; columns there: {there}")
        return value

    def samples(self, name: str) -> list[Any]:
        """The values of some rows that have the column, nulls left out."""
        values = [_reach(row.columns, name) for row in self.sample]
        return [value for value in values if value is not _MISSING and value is not None]

    def require(self, *names: str) -> None:
        """Notes that these columns are read; raises `ConfigError` where no row has one of them."""
        for name in names:
            if not self.has(name):
                raise self.error(
                    f"this kind of training needs the columns {', '.join(names)}, and {name!r} is missing; "
                    f"{nearest_names(name, self.columns)}. If it has another name: {self.section}columns.{name}=NAME"
                )
            self.column(name)

    def error(self, words: str) -> ConfigError:
        """An error about all rows."""
        return ConfigError(f"{self.rows[0].where}: {words}")

    def ambiguous(self, names: Sequence[str], purpose: str, key: str, row: RawRow) -> ConfigError:
        """The error for columns of which each could be meant, and that differ in a row."""
        keys = " or ".join(f"{self.section}{key}={name}" for name in names)
        return ConfigError(f"{row.where}: columns {' and '.join(names)} both fit {purpose}, and differ here: set {keys}")

    def reading(self, source: str) -> Reading:
        """The columns that were read, and the others.

        Raises:
            ConfigError: `columns` gives a name to a column that is not read.
        """
        for ours, theirs in self.config.columns.items():
            if ours not in self.reads:
                alike = [name for family in (PROMPTS, ANSWERS) if ours in family for name in self.reads if name in family]
                hint = f"did you mean {self.section}columns.{alike[0]}={theirs}? " if alike else ""
                raise self.error(
                    f"{self.section}columns.{ours}={theirs} would change nothing: of these rows {', '.join(self.reads)} are "
                    f"read. {hint}Leave it out: the column keeps its own name, {theirs!r}, for rewards and workflows too"
                )
        parents = {name.partition(".")[0] for name in self.reads} | {*self.reads}
        theirs = {ours: f"{ours}={name}" for ours, name in self.config.columns.items()}
        reads = {theirs.get(name, name): purpose for name, purpose in self.reads.items()}
        replaced = [f"{name} (replaced)" for name in theirs if name in self._own and self.config.columns[name] != name]
        return Reading(source, reads, (*(name for name in self._given if name not in parents), *replaced))


def _plain(value: Any) -> Any:
    """A value of an array library as Python's own, and a conversation in JSON text, as a csv has it, as a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        with contextlib.suppress(ValueError, RecursionError):
            parts = json.loads(value)
            if parts and all(isinstance(part, dict) and {"role", "from"} & part.keys() for part in parts):
                return parts
    return value


def _union(rows: Sequence[RawRow]) -> list[str]:
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row.columns))
    return list(columns)


def _has(columns: Sequence[str], rows: Sequence[RawRow], name: str) -> bool:
    return name in columns or ("." in name and any(_reach(row.columns, name) is not _MISSING for row in rows))


def _reach(columns: Mapping[str, Any], name: str) -> Any:
    """A column, or a value within it: ``reward_model.ground_truth``."""
    if name in columns:
        return columns[name]
    head, dot, rest = name.partition(".")
    inner = columns.get(head) if dot else None
    return _reach(inner, rest) if isinstance(inner, Mapping) else _MISSING


def _renamed(row: RawRow, names: Mapping[str, str]) -> RawRow:
    """The row with columns by our names; ``names`` maps ours to theirs."""
    gone = {*names, *names.values()}
    given = {ours: _reach(row.columns, theirs) for ours, theirs in names.items()}
    return RawRow(
        {name: value for name, value in row.columns.items() if name not in gone}
        | {ours: value for ours, value in given.items() if value is not _MISSING},
        row.where,
    )
