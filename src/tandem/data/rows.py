"""One shape for all rows: ``messages``, ``answer``, ``source``, ``reward_name`` beside the original columns."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.api.program_tests import COLUMN
from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.config.nearest import nearest_names
from tandem.data.files import RawRow
from tandem.data.programs import find_layout
from tandem.data.programs.layout import ProgramLayout

PROMPTS = ("messages", "prompt", "question", "problem", "instruction")
ANSWERS = ("answer", "solution", "completion", "response")
ROLES = ("system", "user", "assistant", "tool")

Row = dict[str, Any]


def normalise(raw: Sequence[RawRow], config: DatasetConfig, *, source: str, reward: str | None = None) -> list[Row]:
    """Adds ``messages`` (list of {role, content}), ``answer`` (text or None), ``source`` and ``reward_name``.

    The original columns stay, except where they have one of these names. What the answer holds stays as it is (GSM8K's
    working and ``#### 18``): rewards extract. A last message of the assistant becomes the answer where no column is.

    Raises:
        ConfigError: no such column (names those there), or a value of the wrong type (with file and line).
    """
    if not raw:
        return []
    layout = find_layout(raw[0].columns)
    if layout is not None:
        raw = [_program(row, layout, config) for row in raw]
    columns = list(raw[0].columns)
    prompt = _columns(columns, config.prompt_column, _mapped_first(PROMPTS, config), raw[0].where, "prompt_column")
    answer = _columns(columns, config.answer_column, _mapped_first(ANSWERS, config), raw[0].where, "answer_column")
    refuse_unread(config, (*prompt, *answer), raw[0].where)
    if not prompt:
        raise ConfigError(
            f"{raw[0].where}: no column for the question among {', '.join(columns) or 'none'}; "
            f"looked for {', '.join(PROMPTS)}: set prompt_column"
        )
    return [_row(row, prompt, answer, config.prompt_suffix, source, reward) for row in raw]


def _program(raw: RawRow, layout: ProgramLayout, config: DatasetConfig) -> RawRow:
    """The row with its tests in the one case format; with the layout's question and reference where no column is named."""
    try:
        tests = layout.tests(raw.columns)
        added: Row = {COLUMN: None if tests is None else tests.as_column()}
        if config.prompt_column is None:
            added["messages"] = [{"role": "user", "content": layout.question(raw.columns)}]
        if config.answer_column is None:
            added["answer"] = layout.reference(raw.columns)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{raw.where}: the row has the columns of {layout.name}, and one has another form: {error!r}"
        ) from error
    return RawRow({**raw.columns, **added}, raw.where)


def renamed(raw: Sequence[RawRow], columns: Mapping[str, str]) -> list[RawRow]:
    """Rows whose columns have our names: ``columns`` maps ours to theirs.

    Raises:
        ConfigError: the first row has no such column.
    """
    for ours, theirs in columns.items() if raw else ():
        if theirs not in raw[0].columns:
            raise ConfigError(
                f"{raw[0].where}: columns.{ours}={theirs}, but the row has no such column; "
                f"{nearest_names(theirs, list(raw[0].columns))}"
            )
    if not columns:
        return list(raw)
    back = {theirs: ours for ours, theirs in columns.items()}
    return [
        RawRow(
            {back.get(name, name): value for name, value in row.columns.items() if name in back or name not in columns},
            row.where,
        )
        for row in raw
    ]


def refuse_unread(config: DatasetConfig, read: Sequence[str], where: str) -> None:
    """Passes if every column that `columns` gives another name is among those that are read.

    Raises:
        ConfigError: one is not; names those that are, and what was perhaps meant.
    """
    for ours, theirs in config.columns.items():
        if ours not in read:
            alike = [name for family in (PROMPTS, ANSWERS) if ours in family for name in read if name in family]
            hint = f"did you mean columns.{alike[0]}={theirs}? " if alike else ""
            raise ConfigError(
                f"{where}: columns.{ours}={theirs} would change nothing: of these rows {', '.join(read)} are read. {hint}"
                f"Leave it out: the column keeps its own name, {theirs!r}, for rewards and workflows too"
            )


def _mapped_first(usual: tuple[str, ...], config: DatasetConfig) -> tuple[str, ...]:
    """The usual names, those that the user gave to a column before the others."""
    return tuple(sorted(usual, key=lambda name: name not in config.columns))


def _columns(there: list[str], wished: str | None, usual: tuple[str, ...], where: str, key: str) -> tuple[str, ...]:
    """The columns to read; several are joined by a space. Empty if none is found and none was wished for."""
    if wished is not None:
        if wished not in there:
            raise ConfigError(f"{where}: {key}={wished}, but the row has no such column; {nearest_names(wished, there)}")
        return (wished,)
    lower = {name.lower(): name for name in there}
    if key == "prompt_column" and usual[0] not in lower and "body" in lower and "question" in lower:
        return (lower["body"], lower["question"])  # SVAMP: the story and what is asked
    return next(((lower[name],) for name in usual if name in lower), ())


def _row(raw: RawRow, prompt: tuple[str, ...], answer: tuple[str, ...], suffix: str, source: str, reward: str | None) -> Row:
    missing = [name for name in (*prompt, *answer) if name not in raw.columns]
    if missing:
        there = ", ".join(raw.columns) or "none"
        raise ConfigError(f"{raw.where}: column {missing[0]!r} is missing, other rows have it; columns there: {there}")
    messages = _messages(raw, prompt)
    expected = _answer(raw.columns[answer[0]], answer[0], raw.where) if answer else None
    if messages[-1]["role"] == "assistant":
        content = messages.pop()["content"]
        expected = content if expected is None else expected
        if not messages:
            raise ConfigError(f"{raw.where}: column {prompt[0]!r} has only a message of the assistant; it needs a question")
    return {
        **raw.columns,
        "messages": with_suffix(messages, suffix),
        "answer": expected,
        "source": source,
        "reward_name": reward,
    }


def _messages(raw: RawRow, prompt: tuple[str, ...]) -> list[dict[str, Any]]:
    values = [raw.columns[name] for name in prompt]
    if isinstance(values[0], list) and len(values) == 1:
        for message in values[0]:
            fine = isinstance(message, Mapping) and message.get("role") in ROLES
            if not (fine and isinstance(message.get("content"), (str, list))):
                raise ConfigError(
                    f"{raw.where}: column {prompt[0]!r} must be a list of {{role, content}} with a "
                    f"role of {', '.join(ROLES)}; got {message!r}"
                )
        if values[0]:
            return [dict(message) for message in values[0]]
    for name, value in zip(prompt, values, strict=True):
        if not isinstance(value, str) or not value.strip():
            got = "nothing" if value in ("", None, []) else f"{type(value).__name__} {value!r}"
            raise ConfigError(f"{raw.where}: column {name!r} must be text or a list of messages, got {got}")
    return [{"role": "user", "content": values[0] if len(values) == 1 else _joined(values)}]


def _joined(parts: Sequence[str]) -> str:
    """The parts as sentences: SVAMP's stories often lack the last stop."""
    texts = [part.strip() for part in parts]
    return " ".join([text if text[-1] in ".!?" else text + "." for text in texts[:-1]] + texts[-1:])


def _answer(value: Any, name: str, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(int(value)) if value == int(value) else str(value)
    raise ConfigError(f"{where}: column {name!r} must be text or a number, got {type(value).__name__} {value!r}")


def with_suffix(messages: list[dict[str, Any]], suffix: str) -> list[dict[str, Any]]:
    """Messages whose last one ends with a text."""
    if not suffix:
        return messages
    content = messages[-1]["content"]
    longer = [*content, {"type": "text", "text": suffix}] if isinstance(content, list) else content + suffix
    return [*messages[:-1], messages[-1] | {"content": longer}]
