"""One format for all rows: the data set's columns, ``messages`` and ``answer``, and Tandem's own columns ``tandem.…``."""

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from tandem.api.chat_template import text_of
from tandem.api.sandbox import COLUMN
from tandem.config.data import REWARD, SOURCE, WHERE
from tandem.config.errors import ConfigError
from tandem.data.files import RawRow, Written
from tandem.data.programs import ProgramLayout, find_layout
from tandem.data.table import ANSWERS, CONVERSATIONS, PROMPTS, SYSTEMS, Table

ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {
    **{role: role for role in ROLES},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
}
"""Name of a speaker in OpenAI's format or in ShareGPT's ``{from, value}`` → role."""

Row = dict[str, Any]
Message = dict[str, Any]


def normalise(table: Table, *, source: str, reward: str | None = None) -> list[Row]:
    """Adds ``messages`` (list of {role, content}), ``answer`` (text or None), ``tandem.source``, ``tandem.reward`` and
    ``tandem.where`` (file and line).

    Original columns are kept, unless they have one of these names. The text of the answer is not changed (GSM8K's keeps its
    working and ``#### 18``), because rewards extract the result. Without an answer column, a last message of the assistant
    becomes the answer.

    Raises:
        ConfigError: a column does not exist (the message lists the columns), several columns fit, or a value has the wrong
            type (the message names file and line).
    """
    prompt = prompt_of(table)
    column = table.configured("answer_column") or next(iter(table.usual(ANSWERS)), None)
    if column is not None:
        table.column(column, "" if column == "answer" else "the answer")
    if table.has("tools"):
        table.column("tools")
    rows = [_row(table, row, prompt, column, source, reward) for row in table.rows]
    empty = [row[WHERE] for row in rows if not (row["answer"] or "").strip()]
    if column is not None and empty:
        words = f"empty in {len(empty)} of {len(rows)} rows, first {empty[0]}"
        table.column(column, ", ".join(filter(None, (table.reads[column], words))))
    return rows


def prompt_of(table: Table) -> "Prompt":
    """Returns the `Prompt` of a table. Rows of a known programming benchmark first get their question, and their tests in
    Tandem's format.

    Raises:
        ConfigError: as for `Prompt`, or if a row's tests do not have the format of the benchmark.
    """
    layout = find_layout(table.rows[0].columns)
    if table.has(COLUMN):
        table.column(COLUMN)
    if layout is None:
        return Prompt(table)
    table.replace([_program(row, layout, table) for row in table.rows])
    table.reads |= dict.fromkeys(layout.columns, layout.name)
    return Prompt(table, ("messages",))


def _program(raw: RawRow, layout: ProgramLayout, table: Table) -> RawRow:
    """Returns the row with its tests in the common format. Adds the question and the reference answer of the layout, unless
    the configuration names a column for them."""
    try:
        tests = layout.tests(raw.columns)
        added: Row = {COLUMN: None if tests is None else tests.as_column()}
        if table.config.prompt_column is None:
            added["messages"] = [{"role": "user", "content": layout.question(raw.columns)}]
        if table.config.answer_column is None:
            added["answer"] = layout.reference(raw.columns)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{raw.where}: the row has the columns of {layout.name}, but one has another format: {error!r}"
        ) from error
    return RawRow({**raw.columns, **added}, raw.where)


class Prompt:
    """The question of each row. The columns that hold it are chosen once for all rows.

    The column is `prompt_column` if set. Otherwise it is SVAMP's body and question, or Alpaca's instruction and input
    (Dolly's context), which belong together; otherwise the first column with a usual name, if all other columns with a usual
    name have the same question.
    """

    def __init__(self, table: Table, usual: Sequence[str] = PROMPTS):
        """Chooses the columns. ``usual``: the usual names. Raises `ConfigError` if no column fits, or if several fit and ask
        different questions."""
        self._table = table
        self.columns = self._chosen(usual)
        for name in self.columns:
            purpose = (
                "the prompt, without its last reply" if any(map(ends_with_reply, table.samples(name))) else "the prompt"
            )
            table.reads.setdefault(name, "" if name == purpose.removeprefix("the ") else purpose)
        self._system = next(iter(table.usual(SYSTEMS)), None)
        if self._system is not None:
            table.column(self._system, "the system message")

    def _chosen(self, usual: Sequence[str]) -> tuple[str, ...]:
        table = self._table
        if (configured := table.configured("prompt_column")) is not None:
            return (configured,)
        columns = {name.lower(): name for name in table.usual(usual)}
        bodies = {name.lower(): name for name in table.usual(("body",))}
        if "question" in columns and bodies and not {*CONVERSATIONS} & set(columns):
            return (bodies["body"], columns["question"])
        if not columns:
            raise table.error(
                f"no column for the question among {', '.join(table.columns) or 'none'}; looked for {', '.join(usual)}: set "
                f"{table.section}prompt_column"
            )
        first, *others = columns.values()
        if first.lower() == "instruction":
            beside = table.usual(("input", "context"))  # Alpaca's and Dolly's
            if set(others) <= set(beside):
                return (first, *beside)
        if first not in table.config.columns:
            for other in others:
                self._agree(first, other)
        return (first,)

    def _agree(self, first: str, other: str) -> None:
        """Raises `ConfigError` if the two columns ask different questions in one of the sampled rows."""
        for row in self._table.sample:
            questions, other_questions = (
                {text.strip() for role, text in speakers(row.columns.get(name)) if role == "user" and isinstance(text, str)}
                for name in (first, other)
            )
            if questions and other_questions and questions.isdisjoint(other_questions):
                raise self._table.ambiguous((first, other), "the prompt", "prompt_column", row)

    def messages(self, row: RawRow) -> list[Message]:
        """Returns the messages of the row's prompt, after the system message of the row's system column, if any.

        Raises:
            ConfigError: the prompt is neither text nor messages; the message names the row.
        """
        first, *others = self.columns
        values = [self._table.value(row, first), *(row.columns.get(name) for name in others)]
        messages = messages_of(values[0], first, row.where) if values[0] and not isinstance(values[0], str) else []
        for name, value in zip(self.columns, values, strict=True) if not messages else ():
            empty = name != first and not value and first.lower() != "body"  # an instruction that needs no input
            if not empty and (not isinstance(value, str) or not value.strip()):
                got = "nothing" if value in ("", None, []) else f"{type(value).__name__} {value!r:.80}"
                raise ConfigError(f"{row.where}: column {name!r} must be text or a list of messages, got {got}")
        if not messages:
            is_story = len(values) > 1 and first.lower() == "body"
            text = _sentences(values) if is_story else "\n\n".join(value for value in values if value)
            messages = [{"role": "user", "content": text}]
        system = row.columns.get(self._system) if self._system is not None else None
        if not system or any(message["role"] == "system" for message in messages):
            return messages
        if not isinstance(system, str):
            raise ConfigError(f"{row.where}: column {self._system!r} must be text, got {type(system).__name__}")
        return [{"role": "system", "content": system}, *messages]


_MESSAGE_KEYS = ("role", "from", "content", "value")


def speakers(value: Any) -> list[tuple[str, Any]]:
    """Returns (role, content) of each message in a column, in OpenAI's or ShareGPT's format. A text counts as one message of
    the user."""
    if isinstance(value, str):
        return [("user", value.strip())]
    messages = [message for message in value if isinstance(message, Mapping)] if isinstance(value, list) else []
    return [(SPEAKERS.get(str(m.get("role", m.get("from"))), ""), m.get("content", m.get("value"))) for m in messages]


def ends_with_reply(value: Any) -> bool:
    """True if the value is a list of messages whose last message is the assistant's."""
    return [role for role, _ in speakers(value)][-1:] == ["assistant"]


def _sentences(parts: Sequence[str]) -> str:
    """Joins a story and its question, and adds the full stop that SVAMP's stories often lack."""
    texts = [part.strip() for part in parts]
    return " ".join([text if text[-1] in ".!?" else text + "." for text in texts[:-1]] + texts[-1:])


def messages_of(value: Any, name: str, where: str) -> list[Message]:
    """Converts a list of messages, or a single message, to {role, content}; ShareGPT's {from, value} is supported too. Keys
    with null are left out; a null content, as in a message with tool calls, becomes an empty text.

    Raises:
        ConfigError: the value is neither a message nor a list of messages; the error names the row.
    """
    if not isinstance(value, (list, Mapping)):
        raise ConfigError(
            f"{where}: column {name!r} must be text or a list of messages, got "
            f"{'float' if isinstance(value, float) else type(value).__name__} {value!r:.80}"
        )
    return [_message(message, name, where) for message in ([value] if isinstance(value, Mapping) else value)]


def _message(message: Any, name: str, where: str) -> Message:
    if isinstance(message, Mapping):
        ((role, content),) = speakers([message])
        calls = message.get("tool_calls") or []
        if not (
            isinstance(calls, list)
            and all(isinstance(c, Mapping) and isinstance(c.get("function", c), Mapping) for c in calls)
        ):
            raise ConfigError(
                f"{where}: tool_calls in {name!r} must be a list of {{function: {{name, arguments}}}}, got {calls!r:.200}"
            )
        if content is None and role in ("assistant", "tool"):
            content = ""
        if role and isinstance(content, (str, list)):
            others = {key: value for key, value in message.items() if value is not None and key not in _MESSAGE_KEYS}
            return {"role": role, "content": content, **others}
    raise ConfigError(
        f"{where}: column {name!r} must be a list of {{role, content}} with a role of {', '.join(ROLES)}; "
        f"got {message!r:.200}"
    )


def tools_of(row: RawRow) -> list[Any] | None:
    """Returns the tools of a row from its column ``tools``: a list of JSON schemas, or such a list as JSON text. None if
    there are no tools.

    Raises:
        ConfigError: the column holds something else; the message names the row.
    """
    value = row.columns.get("tools")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{row.where}: column 'tools' is not JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ConfigError(f"{row.where}: column 'tools' must be a list of JSON schemas, got {value!r:.80}")
    return value


def _row(table: Table, raw: RawRow, prompt: Prompt, answer: str | None, source: str, reward: str | None) -> Row:
    messages = prompt.messages(raw)
    expected = answer_text(table.value(raw, answer), answer, raw.where) if answer else None
    if messages[-1]["role"] == "assistant":
        content = messages.pop()["content"]
        expected = text_of(content) if expected is None else expected
        if not messages:
            raise ConfigError(
                f"{raw.where}: column {prompt.columns[0]!r} has only a message of the assistant; add the user's question"
            )
    tools = {"tools": tools_of(raw)} if table.has("tools") else {}
    return {
        **{name: float(value) if isinstance(value, Written) else value for name, value in raw.columns.items()},
        "messages": with_suffix(messages, table.config.prompt_suffix),
        "answer": expected,
        SOURCE: source,
        REWARD: reward,
        WHERE: raw.where,
    } | tools


def answer_text(value: Any, name: str, where: str) -> str | None:
    """Returns an answer as text. A number is written as in its file; a whole number loses its ``.0``.

    Raises:
        ConfigError: the answer is neither text nor a finite number; the message names the row.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) and math.isfinite(value):
        text = value.text if isinstance(value, Written) else format(Decimal(str(value)), "f")
        return text.removesuffix(".0")
    inner = (
        f"; name a value within it with a dot: {', '.join(f'{name}.{key}' for key in value)}"
        if isinstance(value, Mapping) and value
        else ""
    )
    raise ConfigError(f"{where}: column {name!r} must be text or a number, got {type(value).__name__} {value!r:.80}{inner}")


def with_suffix(messages: list[Message], suffix: str) -> list[Message]:
    """Appends ``suffix`` to the last message; returns new messages."""
    if not suffix:
        return messages
    content = messages[-1]["content"]
    longer = [*content, {"type": "text", "text": suffix}] if isinstance(content, list) else content + suffix
    return [*messages[:-1], messages[-1] | {"content": longer}]
