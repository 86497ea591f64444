"""The raw rows of one source, and the choice of the columns to read, made once for all rows."""

import contextlib
import itertools
import json
import re
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
"""Usual names of the columns for each purpose, the preferred name first."""

SAMPLE = 64
"""Number of rows, spread evenly, that are inspected to find out what a column holds."""

PRINTED = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")
"""The beginning of a list of messages as Python prints it, which is found in a csv file if nobody wrote it as JSON."""

_MISSING = object()


@dataclass(frozen=True)
class Reading:
    """The columns of a data set that are read and those that are not. The user sees this list."""

    source: str
    reads: Mapping[str, str]
    """Column → purpose; the purpose is empty if it is the column's name."""

    unread: tuple[str, ...]
    """Columns that no reader uses. A reward or a workflow may use them by name."""

    left_out: Mapping[str, int] = field(default_factory=dict)
    """Reason → number of rows that cannot be used."""

    def describe(self, used: Iterable[str] = ()) -> str:
        """Returns a text of one line about the columns. ``used``: columns that a reward uses by name; ``row`` stands for
        all."""
        names = set(used)
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
    """The rows of one source. Records the columns that a reader uses; all others count as not read."""

    def __init__(self, rows: Sequence[RawRow], config: DatasetConfig, section: str = ""):
        """Renames columns as ``config.columns`` says. ``section``: the configuration section of this data set, such as
        ``train_dataset.``, for error messages.

        Raises:
            ConfigError: ``config.columns`` names a missing column, or a column has a name that Tandem reserves.
        """
        self.config, self.section = config, section
        self._original = _union(rows)
        for ours, theirs in config.columns.items():
            if not _has(self._original, rows, theirs):
                raise ConfigError(
                    f"{rows[0].where}: {section}columns.{ours}={theirs}, but the row has no such column; "
                    f"{nearest_names(theirs, self._original)}"
                )
        for name in set(OURS) & set(self._original):
            raise ConfigError(f"{rows[0].where}: the column {name!r} has a name that Tandem reserves: rename it")
        self.replace([_renamed(row, config.columns) for row in rows] if config.columns else rows)
        names = {*PROMPTS, *ANSWERS, "chosen", "rejected", config.prompt_column, config.answer_column} & {*self.columns}
        for row, name in itertools.product(self.sample, names):
            if isinstance(text := row.columns.get(name), str) and PRINTED.match(text):
                raise ConfigError(
                    f"{row.where}: column {name!r} has a conversation as Python prints it, {text!r:.40}, which would be "
                    "read as plain text; write it as JSON (json.dumps), or the rows as jsonl or parquet"
                )
        odd = [
            name for name in names if name is not None and any(_plain(value) is not value for value in self.samples(name))
        ]
        if odd:
            plain = [{name: _plain(row.columns[name]) for name in odd if name in row.columns} for row in self.rows]
            self.replace([RawRow(row.columns | new, row.where) for row, new in zip(self.rows, plain, strict=True)])
        self._renamed = self.columns
        self.reads: dict[str, str] = {}

    def replace(self, rows: Sequence[RawRow]) -> None:
        """Replaces the rows by others in the same order."""
        self.rows, self.columns = rows, _union(rows)
        self.sample = rows[:: -(-len(rows) // SAMPLE)]

    def has(self, name: str) -> bool:
        """True if a row has the column; ``a.b`` is the value ``b`` in the column ``a``, searched in sampled rows only."""
        return _has(self.columns, self.sample, name)

    def column(self, name: str, purpose: str = "") -> str:
        """Records that a column is read, and for which purpose; returns its name."""
        self.reads[name] = purpose
        return name

    def configured(self, key: str) -> str | None:
        """Returns the column that the configuration key ``prompt_column`` or ``answer_column`` names, or None.

        Raises:
            ConfigError: no row has the column.
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
        """Returns the columns with one of these names, ignoring case; columns that the user renamed come first."""
        lower = {name.lower(): name for name in self.columns}
        columns = {name: lower.get(name, name) for name in names if name in lower or self.has(name)}
        return [columns[name] for name in sorted(columns, key=lambda name: name not in self.config.columns)]

    def value(self, row: RawRow, name: str) -> Any:
        """Returns the value of a row in a column.

        Raises:
            ConfigError: this row lacks the column.
        """
        value = _reach(row.columns, name)
        if value is _MISSING:
            columns = ", ".join(row.columns) or "none"
            raise ConfigError(f"{row.where}: column {name!r} is missing, other rows have it; columns there: {columns}")
        return value

    def samples(self, name: str) -> list[Any]:
        """Returns the values of a column in the sampled rows, without missing values and nulls."""
        values = [_reach(row.columns, name) for row in self.sample]
        return [value for value in values if value is not _MISSING and value is not None]

    def require(self, *names: str) -> None:
        """Records that these columns are read. Raises `ConfigError` if one of them is in no row."""
        for name in names:
            if not self.has(name):
                raise self.error(
                    f"this kind of training needs the columns {', '.join(names)}, and {name!r} is missing; "
                    f"{nearest_names(name, self.columns)}. If it has another name: {self.section}columns.{name}=NAME"
                )
            self.column(name)

    def error(self, words: str) -> ConfigError:
        """Returns an error about all rows. Its message names the place of the first row."""
        return ConfigError(f"{self.rows[0].where}: {words}")

    def ambiguous(self, names: Sequence[str], purpose: str, key: str, row: RawRow) -> ConfigError:
        """Returns an error about columns that fit the same purpose but differ in ``row``. ``key``: the configuration key
        that chooses one of them."""
        keys = " or ".join(f"{self.section}{key}={name}" for name in names)
        return ConfigError(f"{row.where}: columns {' and '.join(names)} both fit {purpose}, and differ here: set {keys}")

    def reading(self, source: str) -> Reading:
        """Returns the columns that were read, and the others.

        Raises:
            ConfigError: ``config.columns`` renames a column that is not read.
        """
        for ours, theirs in self.config.columns.items():
            if ours not in self.reads:
                alike = [name for family in (PROMPTS, ANSWERS) if ours in family for name in self.reads if name in family]
                hint = f"did you mean {self.section}columns.{alike[0]}={theirs}? " if alike else ""
                raise self.error(
                    f"{self.section}columns.{ours}={theirs} would change nothing: of these rows only "
                    f"{', '.join(self.reads)} are read. {hint}Leave it out: the column keeps its name {theirs!r}, also for "
                    "rewards and workflows"
                )
        parents = {name.partition(".")[0] for name in self.reads} | {*self.reads}
        labels = {ours: f"{ours}={name}" for ours, name in self.config.columns.items()}
        reads = {labels.get(name, name): purpose for name, purpose in self.reads.items()}
        replaced = [f"{name} (replaced)" for name in labels if name in self._original and self.config.columns[name] != name]
        return Reading(source, reads, (*(name for name in self._renamed if name not in parents), *replaced))


def _plain(value: Any) -> Any:
    """Converts an array to Python values, and a conversation in JSON text, as in a csv file, to a list. Other values are
    returned unchanged."""
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
    """Returns the value of a column, or a value within it, such as ``reward_model.ground_truth``; `_MISSING` if none."""
    if name in columns:
        return columns[name]
    head, dot, inner_name = name.partition(".")
    inner = columns.get(head) if dot else None
    return _reach(inner, inner_name) if isinstance(inner, Mapping) else _MISSING


def _renamed(row: RawRow, names: Mapping[str, str]) -> RawRow:
    """Returns the row with renamed columns. ``names``: Tandem's name → the name in the file."""
    removed = {*names, *names.values()}
    renamed = {ours: _reach(row.columns, theirs) for ours, theirs in names.items()}
    return RawRow(
        {name: value for name, value in row.columns.items() if name not in removed}
        | {ours: value for ours, value in renamed.items() if value is not _MISSING},
        row.where,
    )
