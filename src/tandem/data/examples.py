"""Readers of the usual formats for imitation, preferences and judgements. Each reader converts rows to one format.

A row with a wrong type or without a needed column is an error when the data is read. A valid row that is useless (an empty
completion, two equal sides) is read; the encoder drops and counts it. Both messages name the row.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from tandem.config.data import SOURCE, WHERE
from tandem.config.errors import ConfigError
from tandem.data.files import RawRow
from tandem.data.programs import find_layout
from tandem.data.rows import (
    Message,
    Prompt,
    Row,
    answer_text,
    ends_with_reply,
    messages_of,
    prompt_of,
    speakers,
    tools_of,
    with_suffix,
)
from tandem.data.table import ANSWERS, CONVERSATIONS, FULL_REPLIES, PROMPTS, Table

Reader = Callable[..., list[Row]]
"""``reader(table, source=…, reward=…)`` returns rows in one format, like `tandem.data.rows.normalise`."""

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")
_DIALOGUE = re.compile(r"\n\n(Human|Assistant): ?")


def conversations(table: Table, *, source: str, reward: str | None = None) -> list[Row]:
    """Reads rows to imitate: ``messages`` (the whole conversation), ``train_from`` (the first message that may be learnt)
    and ``tools`` (a list of JSON schemas, or None).

    Unless `prompt_column` or `answer_column` is set, the first of these formats that fits is read:

    - ``messages`` (or ``conversations``) with assistant turns. All are learnt, except those with ``weight: 0``.
    - ``prompt`` and ``completion``, each a text or messages.
    - A question and an answer under any of their usual names.

    `prompt_suffix` is appended to the question.

    Raises:
        ConfigError: no format fits, or several columns could be learnt; a value has the wrong type (the message names file
            and line); `prompt_suffix` is set for whole conversations, which have no single question.
    """
    conversation = _conversation_column(table)
    if conversation is not None:
        if table.config.prompt_suffix:
            raise table.error(
                f"prompt_suffix={table.config.prompt_suffix!r} is appended to a row's question, and these rows are whole "
                "conversations, every reply of which is learnt: leave it out, or give rows with a prompt and a completion"
            )
        return [_imitated(table, row, [], conversation.messages(row), source) for row in table.rows]
    is_program = find_layout(table.rows[0].columns) is not None
    named = table.config.prompt_column or table.config.answer_column
    if not named and not table.usual(CONVERSATIONS) and table.has("prompt") and table.has("completion"):
        prompt, reply = Prompt(table, ("prompt",)), "completion"
    else:
        prompt = prompt_of(table)
        reply = table.configured("answer_column") or _reply_column(table, is_program)
    table.column(reply, "learnt")
    return [_answered(table, row, prompt, reply, source) for row in table.rows]


def _conversation_column(table: Table) -> Prompt | None:
    """Finds the column of whole conversations: `answer_column`, or else a usual name. Returns None if the rows are questions
    with answers."""
    configured = table.configured("answer_column")
    names = [configured] if configured else table.usual(CONVERSATIONS)
    matches = [name for name in names if any(map(_is_conversation, table.samples(name)))]
    if not matches or table.config.prompt_column is not None:
        return None
    name, answers = matches[0], [] if configured else table.usual(ANSWERS)
    open_rows = [row for row in table.sample if not ends_with_reply(row.columns.get(name))]
    if answers and len(open_rows) == len(table.sample):
        return None  # the reply is in a separate column
    if answers and open_rows:
        raise table.ambiguous((name, answers[0]), "what is learnt", "answer_column", open_rows[0])
    table.column(name, "every assistant turn")
    for other in [] if configured else [column for column in table.usual((*CONVERSATIONS, *FULL_REPLIES)) if column != name]:
        for row in table.sample:
            texts, replies = (
                [text.strip() for _, text in speakers(row.columns.get(column)) if isinstance(text, str)]
                for column in (name, other)
            )
            if any(text and text not in texts for text in replies):
                raise table.ambiguous((name, other), "what is learnt", "answer_column", row)
    if not configured:
        Prompt(table)  # raises if another column asks a different question
    return Prompt(table, (name,))


def _reply_column(table: Table, is_program: bool) -> str:
    """Returns the column of the reply to learn, for rows without `answer_column`. Raises `ConfigError` if there is none, or
    if two columns differ."""
    names = table.usual(ANSWERS)
    if not any(table.samples(name) for name in names):
        raise table.error(
            f"no row has an answer to learn; columns there: {', '.join(table.columns)}; looked for {', '.join(ANSWERS)}: "
            f"set {table.section}answer_column"
        )
    for other in [] if is_program else names[1:]:
        for row in table.sample:
            if None not in (both := [row.columns.get(name) for name in (names[0], other)]) and both[0] != both[1]:
                raise table.ambiguous((names[0], other), "what is learnt", "answer_column", row)
    return names[0]


def _answered(table: Table, row: RawRow, prompt: Prompt, column: str, source: str) -> Row:
    messages, reply = prompt.messages(row), table.value(row, column)
    if messages[-1]["role"] == "assistant" and len(messages) > 1:
        messages.pop()  # the reply to learn comes from the column
    learnt = messages_of(reply, column, row.where) if isinstance(reply, (list, Mapping)) else None
    text = answer_text(reply, column, row.where) if learnt is None else ""
    return _imitated(table, row, with_suffix(messages, table.config.prompt_suffix), learnt or [_reply(text or "")], source)


def _is_conversation(value: Any) -> bool:
    """True if the value is messages of both the user and the assistant."""
    return {"user", "assistant"} <= {role for role, _ in speakers(value)}


def pairs(table: Table, *, source: str, reward: str | None = None) -> list[Row]:
    """Reads ranked pairs: ``messages`` (the prompt), ``chosen`` and ``rejected`` (lists of messages), ``margin`` (a number
    or None), and ``tools``.

    Formats: ``chosen`` and ``rejected`` as texts beside a prompt; as messages, with the prompt at the start of both or in a
    separate column; as texts of the form "\\n\\nHuman: …\\n\\nAssistant: …"; and ``response_0`` and ``response_1`` with
    ``better_response_id``. A column of messages that ends with a reply does not count as the prompt.

    Raises:
        ConfigError: a column is missing, a value has the wrong type, or the two sides have different prompts.
    """
    _rank(table, "better_response_id")
    prompt = _prompt_beside(table)
    if table.has("margin"):
        table.column("margin")
    return [_pair(table, row, prompt, source) for row in table.rows]


def safety(table: Table, *, source: str, reward: str | None = None) -> list[Row]:
    """Reads pairs like `pairs`, in which ``chosen`` is the safer side. Adds ``chosen_safe`` and ``rejected_safe`` (bools).

    Formats: those of `pairs` with columns ``chosen_safe`` and ``rejected_safe``; and PKU-SafeRLHF's: ``response_0`` and
    ``response_1`` with ``safer_response_id``, ``is_response_0_safe`` and ``is_response_1_safe``.

    Raises:
        ConfigError: as for `pairs`, and if a label is neither true nor false.
    """
    _rank(table, "safer_response_id", labelled=True)
    prompt = _prompt_beside(table)
    return [
        _pair(table, row, prompt, source)
        | {label: truth(table.value(row, label), label, row.where) for label in ("chosen_safe", "rejected_safe")}
        for row in table.rows
    ]


def _rank(table: Table, by: str, *, labelled: bool = False) -> None:
    """Adds the columns ``chosen`` and ``rejected`` to rows with two numbered responses; other rows must have these columns.

    Args:
        table: the rows, which are replaced.
        by: the column with the number of the chosen response, 0 or 1.
        labelled: the rows have labels that say whether each response is safe.
    """
    answers = ("response_0", "response_1")
    if table.has("chosen") or not any(map(table.has, answers)):
        table.require("chosen", "rejected", *(("chosen_safe", "rejected_safe") if labelled else ()))
        return
    labels = ("is_response_0_safe", "is_response_1_safe") if labelled else ()
    table.require(*answers, by, *labels)
    rows = []
    for row in table.rows:
        chosen_id = str(table.value(row, by)).strip().removesuffix(".0")
        if chosen_id not in ("0", "1"):
            raise ConfigError(
                f"{row.where}: column {by!r} must be 0 or 1, the number of a response; got {row.columns[by]!r}"
            )
        order = (0, 1) if chosen_id == "0" else (1, 0)
        sides = {name: table.value(row, answers[i]) for name, i in zip(("chosen", "rejected"), order, strict=True)}
        if labelled:
            verdicts = [truth(table.value(row, name), name, row.where) for name in labels]
            sides |= {"chosen_safe": verdicts[order[0]], "rejected_safe": verdicts[order[1]]}
        rows.append(RawRow({**row.columns, **sides}, row.where))
    table.replace(rows)


def judged(table: Table, *, source: str, reward: str | None = None) -> list[Row]:
    """Reads single completions with a label: ``messages`` (the prompt), ``completion`` (messages), ``label`` (bool) and
    ``tools``.

    Formats: ``prompt``, ``completion`` and ``label``; or ranked pairs as in `pairs`, each side of which becomes a row.

    Raises:
        ConfigError: a column is missing, a value has the wrong type, or a label is neither true nor false.
    """
    if not table.has("label") and table.has("chosen") and table.has("rejected"):
        return [
            {name: row[name] for name in ("messages", "tools", SOURCE, WHERE)}
            | {"completion": row[side], "label": side == "chosen"}
            for row in pairs(table, source=source)
            for side in ("chosen", "rejected")
        ]
    table.require("completion", "label")
    prompt = Prompt(table)
    return [
        _row(table, row, source)
        | {
            "messages": prompt.messages(row),
            "completion": _completion(table, row, "completion"),
            "label": truth(table.value(row, "label"), "label", row.where),
        }
        for row in table.rows
    ]


def steps(table: Table, *, source: str, reward: str | None = None) -> list[Row]:
    """Reads completions judged step by step: ``messages`` (the prompt), ``steps`` (texts) and ``labels`` (a bool a step).

    Columns: ``prompt``, ``completions`` (a list of texts) and ``labels``.

    Raises:
        ConfigError: a column is missing, a value has the wrong type, or the numbers of labels and steps differ.
    """
    table.require("completions", "labels")
    prompt = Prompt(table)
    rows = []
    for row in table.rows:
        texts, labels = table.value(row, "completions"), table.value(row, "labels")
        if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            raise ConfigError(f"{row.where}: column 'completions' must be a list of texts, the steps; got {texts!r}")
        if not isinstance(labels, list) or len(labels) != len(texts):
            got = f"{len(labels)}" if isinstance(labels, list) else repr(labels)
            raise ConfigError(
                f"{row.where}: column 'labels' must be a list with one label for each of {len(texts)} steps, got {got}"
            )
        verdicts = [truth(label, "labels", row.where) for label in labels]
        rows.append({"messages": prompt.messages(row), "steps": texts, "labels": verdicts, SOURCE: source, WHERE: row.where})
    return rows


def truth(value: Any, column: str, where: str) -> bool:
    """Converts a label to a bool: true or false, 1 or 0, or a word such as ``yes``.

    Raises:
        ConfigError: the value is none of these.
    """
    word = str(value).strip().lower()
    if value is not None and word.removesuffix(".0") in TRUE + FALSE:
        return word.removesuffix(".0") in TRUE
    raise ConfigError(f"{where}: column {column!r} must be true or false (or 1 or 0), got {value!r}")


def _row(table: Table, row: RawRow, source: str) -> Row:
    """Returns the keys that the rows of all formats have in common."""
    if table.has("tools"):
        table.column("tools")
    return {"tools": tools_of(row), SOURCE: source, WHERE: row.where}


def _imitated(table: Table, row: RawRow, prompt: list[Message], completion: list[Message], source: str) -> Row:
    return _row(table, row, source) | {"messages": [*prompt, *completion], "train_from": len(prompt)}


def _prompt_beside(table: Table) -> Prompt | None:
    """Returns the prompt of ranked pairs, or None if no column holds it. Messages that end with a reply are not a prompt."""
    usual = [name for name in PROMPTS if not any(map(ends_with_reply, table.samples(name)))]
    return Prompt(table, usual) if table.config.prompt_column is not None or table.usual(usual) else None


def _pair(table: Table, row: RawRow, prompt_columns: Prompt | None, source: str) -> Row:
    sides = [table.value(row, side) for side in ("chosen", "rejected")]
    if all(isinstance(side, str) for side in sides):
        if prompt_columns is None:
            one, other = (_dialogue(side, row.where) for side in sides)
            prompt, chosen, rejected = _divided(one, other, row.where)
        else:
            prompt = prompt_columns.messages(row)
            chosen, rejected = ([_reply(side)] for side in sides)
    else:
        chosen, rejected = (_completion(table, row, side) for side in ("chosen", "rejected"))
        begin_with_prompt = all(side and side[0]["role"] != "assistant" for side in (chosen, rejected))
        prompt = [] if prompt_columns is None else prompt_columns.messages(row)
        if prompt_columns is None or begin_with_prompt:
            shared, chosen, rejected = _divided(chosen, rejected, row.where)
            prompt = _same_question(prompt, shared, row.where)
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if side and side[0]["role"] != "assistant":
            raise ConfigError(
                f"{row.where}: what follows the prompt in {name!r} must begin with the assistant, got {side[0]['role']!r}; "
                "both sides need the same prompt"
            )
    margin = row.columns.get("margin")
    if margin is not None:
        margin = _number(margin, row.where)
    return _row(table, row, source) | {"messages": prompt, "chosen": chosen, "rejected": rejected, "margin": margin}


def _divided(
    chosen: list[Message], rejected: list[Message], where: str
) -> tuple[list[Message], list[Message], list[Message]]:
    """Splits two conversations. Returns the messages with which both begin, and the rest of each conversation, which is
    never empty."""
    max_size = min(len(chosen), len(rejected)) - 1
    size = next((i for i in range(max_size) if chosen[i] != rejected[i]), max(0, max_size))
    if not size:
        raise ConfigError(
            f"{where}: chosen and rejected begin with different messages, and there is no prompt; begin both with the same "
            "messages, or give a column with the prompt"
        )
    return chosen[:size], chosen[size:], rejected[size:]


def _same_question(prompt: list[Message], shared: list[Message], where: str) -> list[Message]:
    """Returns the messages with which both sides begin. If these have no system message, the row's ``prompt`` provides it.
    Raises `ConfigError` if the last question of ``prompt`` is not among them."""
    questions = [[message["content"] for message in messages if message["role"] == "user"] for messages in (prompt, shared)]
    if all(questions) and str(questions[0][-1]).strip() not in [str(text).strip() for text in questions[1]]:
        raise ConfigError(f"{where}: chosen and rejected begin with a question other than the prompt column's")
    lead = [] if any(message["role"] == "system" for message in shared) else prompt
    return [*(message for message in lead if message["role"] == "system"), *shared]


def _dialogue(text: str, where: str) -> list[Message]:
    """Parses a conversation written as "\\n\\nHuman: …\\n\\nAssistant: …"."""
    parts = _DIALOGUE.split(text if text.startswith("\n\n") else "\n\n" + text)
    if parts[0].strip() or len(parts) < 3:
        raise ConfigError(
            f"{where}: chosen and rejected are texts, and there is no prompt; give the prompt in a column (prompt_column), "
            'or write the sides as messages, or as "\\n\\nHuman: …\\n\\nAssistant: …"'
        )
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[name], "content": text.strip()} for name, text in zip(parts[1::2], parts[2::2], strict=True)]


def _completion(table: Table, row: RawRow, name: str) -> list[Message]:
    value = table.value(row, name)
    return [_reply(value or "")] if value is None or isinstance(value, str) else messages_of(value, name, row.where)


def _reply(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise ConfigError(f"{where}: column 'margin' must be a number, got {value!r}")
    return number
