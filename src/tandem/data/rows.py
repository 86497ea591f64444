"""One shape for all rows: ``messages`` and ``answer`` beside the columns of the data set, and Tandem's own ``tandem.…``."""

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from tandem.api.chat_template import text_of
from tandem.api.program_tests import COLUMN
from tandem.config.data import REWARD, SOURCE, WHERE
from tandem.config.errors import ConfigError
from tandem.data.files import RawRow, Written
from tandem.data.programs import find_layout
from tandem.data.programs.layout import ProgramLayout
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
"""Who speaks, in OpenAI's words and in those of ShareGPT's ``{from, value}``, by our roles."""

Row = dict[str, Any]
Message = dict[str, Any]


def normalise(table: Table, *, source: str, reward: str | None = None) -> list[Row]:
    """Adds ``messages`` (list of {role, content}), ``answer`` (text or None), ``tandem.source``, ``tandem.reward`` and
    ``tandem.where`` (file and line).

    The original columns stay, except where they have one of these names. What the answer holds stays as it is (GSM8K's
    working and ``#### 18``): rewards extract. A last message of the assistant becomes the answer where no column is.

    Raises:
        ConfigError: no such column (names those there), several that could be meant, or a value of the wrong type (with
            file and line).
    """
    prompt = prompt_of(table)
    column = table.wished("answer_column") or next(iter(table.usual(ANSWERS)), None)
    if column is not None:
        table.column(column, "" if column == "answer" else "the answer")
    if table.has("tools"):
        table.column("tools")
    return [_row(table, row, prompt, column, source, reward) for row in table.rows]


def prompt_of(table: Table) -> "Prompt":
    """The question of the rows; rows of programs and their tests get theirs, and the tests in our form.

    Raises:
        ConfigError: see `Prompt`; or a row's tests have another form than its layout says.
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
    """The row with its tests in the one case format; with the layout's question and reference where no column is named."""
    try:
        tests = layout.tests(raw.columns)
        added: Row = {COLUMN: None if tests is None else tests.as_column()}
        if table.config.prompt_column is None:
            added["messages"] = [{"role": "user", "content": layout.question(raw.columns)}]
        if table.config.answer_column is None:
            added["answer"] = layout.reference(raw.columns)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{raw.where}: the row has the columns of {layout.name}, and one has another form: {error!r}"
        ) from error
    return RawRow({**raw.columns, **added}, raw.where)


class Prompt:
    """The question of each row; which columns hold it is decided once.

    `prompt_column`; else SVAMP's body and question, or Alpaca's instruction and input (Dolly's context), which belong
    together; else the one column that has one of the usual names. Of several the first, if all of them ask the same.
    """

    def __init__(self, table: Table, usual: Sequence[str] = PROMPTS):
        """Raises `ConfigError` where no column fits, or where several do that ask for different things."""
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
        if (wished := table.wished("prompt_column")) is not None:
            return (wished,)
        there = {name.lower(): name for name in table.usual(usual)}
        bodies = {name.lower(): name for name in table.usual(("body",))}
        if "question" in there and bodies and not {*CONVERSATIONS} & set(there):
            return (bodies["body"], there["question"])
        if not there:
            raise table.error(
                f"no column for the question among {', '.join(table.columns) or 'none'}; looked for {', '.join(usual)}: set "
                f"{table.section}prompt_column"
            )
        first, *others = there.values()
        if first.lower() == "instruction":
            beside = table.usual(("input", "context"))  # Alpaca's and Dolly's
            if set(others) <= set(beside):
                return (first, *beside)
        if first not in table.config.columns:
            for other in others:
                self._agree(first, other)
        return (first,)

    def _agree(self, first: str, other: str) -> None:
        """Passes if both columns ask the same in all rows that are looked at."""
        for row in self._table.sample:
            one, two = (
                {text.strip() for role, text in speakers(row.columns.get(name)) if role == "user" and isinstance(text, str)}
                for name in (first, other)
            )
            if one and two and one.isdisjoint(two):
                raise self._table.ambiguous((first, other), "the prompt", "prompt_column", row)

    def messages(self, row: RawRow) -> list[Message]:
        """The messages of the row's prompt, with the system message of its column, if it has one.

        Raises:
            ConfigError: neither text nor messages; says the row.
        """
        first, *others = self.columns
        values = [self._table.value(row, first), *(row.columns.get(name) for name in others)]
        found = messages_of(values[0], first, row.where) if values[0] and not isinstance(values[0], str) else []
        for name, value in zip(self.columns, values, strict=True) if not found else ():
            empty = name != first and not value and first.lower() != "body"  # an instruction that needs no input
            if not empty and (not isinstance(value, str) or not value.strip()):
                got = "nothing" if value in ("", None, []) else f"{type(value).__name__} {value!r:.80}"
                raise ConfigError(f"{row.where}: column {name!r} must be text or a list of messages, got {got}")
        if not found:
            is_story = len(values) > 1 and first.lower() == "body"
            text = _sentences(values) if is_story else "\n\n".join(value for value in values if value)
            found = [{"role": "user", "content": text}]
        system = row.columns.get(self._system) if self._system is not None else None
        if not system or any(message["role"] == "system" for message in found):
            return found
        if not isinstance(system, str):
            raise ConfigError(f"{row.where}: column {self._system!r} must be text, got {type(system).__name__}")
        return [{"role": "system", "content": system}, *found]


_SAID = ("role", "from", "content", "value")


def speakers(value: Any) -> list[tuple[str, Any]]:
    """(role, content) of each message of a column, ShareGPT's too; a text is the user's."""
    if isinstance(value, str):
        return [("user", value.strip())]
    messages = [message for message in value if isinstance(message, Mapping)] if isinstance(value, list) else []
    return [(SPEAKERS.get(str(m.get("role", m.get("from"))), ""), m.get("content", m.get("value"))) for m in messages]


def ends_with_reply(value: Any) -> bool:
    """True of messages of which the last is the assistant's."""
    return [role for role, _ in speakers(value)][-1:] == ["assistant"]


def _sentences(parts: Sequence[str]) -> str:
    """A story and its question: SVAMP's stories often lack the last stop."""
    texts = [part.strip() for part in parts]
    return " ".join([text if text[-1] in ".!?" else text + "." for text in texts[:-1]] + texts[-1:])


def messages_of(value: Any, name: str, where: str) -> list[Message]:
    """Messages as {role, content}, of a list (ShareGPT's {from, value} too) or of a single one. Keys that are null are left
    out; a null content, as beside tool calls, is an empty text.

    Raises:
        ConfigError: something else; says the row.
    """
    if not isinstance(value, (list, Mapping)):
        raise ConfigError(
            f"{where}: column {name!r} must be text or a list of messages, got {type(value).__name__} {value!r:.80}"
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
            others = {key: value for key, value in message.items() if value is not None and key not in _SAID}
            return {"role": role, "content": content, **others}
    raise ConfigError(
        f"{where}: column {name!r} must be a list of {{role, content}} with a role of {', '.join(ROLES)}; "
        f"got {message!r:.200}"
    )


def tools_of(row: RawRow) -> list[Any] | None:
    """The tools that a row offers in its column ``tools``: a list of JSON schemas, or such a list as JSON text.

    Raises:
        ConfigError: something else; says the row.
    """
    value = row.columns.get("tools")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{row.where}: column 'tools' is no JSON: {error}") from error
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
                f"{raw.where}: column {prompt.columns[0]!r} has only a message of the assistant; it needs a question"
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
    """An answer as text: a number as it is written in the file, a whole one without decimals.

    Raises:
        ConfigError: neither text nor a finite number; says the row.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) and math.isfinite(value):
        text = value.text if isinstance(value, Written) else format(Decimal(str(value)), "f")
        return text.removesuffix(".0")
    inner = (
        f"; a value within it is named with a dot: {', '.join(f'{name}.{key}' for key in value)}"
        if isinstance(value, Mapping) and value
        else ""
    )
    raise ConfigError(f"{where}: column {name!r} must be text or a number, got {type(value).__name__} {value!r:.80}{inner}")


def with_suffix(messages: list[Message], suffix: str) -> list[Message]:
    """Messages whose last one ends with a text."""
    if not suffix:
        return messages
    content = messages[-1]["content"]
    longer = [*content, {"type": "text", "text": suffix}] if isinstance(content, list) else content + suffix
    return [*messages[:-1], messages[-1] | {"content": longer}]
