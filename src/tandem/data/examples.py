"""Rows to imitate and rows that were judged: the field's formats, each in one shape.

What has the wrong type or lacks a column is refused when the data is read; what is only useless (an empty completion, two
equal sides) is left to the encoder, which drops and counts it. Both say the row.
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
"""``reader(table, source=…, reward=…)``: rows in one shape, as `tandem.data.rows.normalise`."""

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")
_DIALOGUE = re.compile(r"\n\n(Human|Assistant): ?")


def conversations(table: Table, *, source: str, reward: str | None = None) -> list[Row]:
    """Rows to imitate: ``messages`` (the whole conversation) and ``train_from``, the first message that may be learnt.

    Formats, of which the first that fits is read unless `prompt_column` or `answer_column` is set: ``messages`` (or
    ``conversations``) with turns of the assistant, all of which are learnt but those with ``weight: 0``; ``prompt`` and
    ``completion``, each text or messages; a question and an answer under any of their usual names. `prompt_suffix` is put
    behind the question. Each row has ``tools`` too, those that it offers or None.

    Raises:
        ConfigError: no such columns, or several that could be learnt; a value of the wrong type (with file and line); a
            `prompt_suffix` for whole conversations, which have no one question.
    """
    whole = _whole(table)
    if whole is not None:
        if table.config.prompt_suffix:
            raise table.error(
                f"prompt_suffix={table.config.prompt_suffix!r} is put behind a row's question, and these rows are whole "
                "conversations, every reply of which is learnt: leave it out, or give rows with a prompt and a completion"
            )
        return [_imitated(table, row, [], whole.messages(row), source) for row in table.rows]
    is_program = find_layout(table.rows[0].columns) is not None
    named = table.config.prompt_column or table.config.answer_column
    if not named and not table.usual(CONVERSATIONS) and table.has("prompt") and table.has("completion"):
        prompt, reply = Prompt(table, ("prompt",)), "completion"
    else:
        prompt = prompt_of(table)
        reply = table.wished("answer_column") or _reply_column(table, is_program)
    table.column(reply, "learnt")
    return [_answered(table, row, prompt, reply, source) for row in table.rows]


def _whole(table: Table) -> Prompt | None:
    """Reads whole conversations; None if the rows are questions with an answer. `answer_column` may name it."""
    wished = table.wished("answer_column")
    names = [wished] if wished else table.usual(CONVERSATIONS)
    found = [name for name in names if any(map(_is_conversation, table.samples(name)))]
    if not found or table.config.prompt_column is not None:
        return None
    name, answers = found[0], [] if wished else table.usual(ANSWERS)
    open_rows = [row for row in table.sample if not ends_with_reply(row.columns.get(name))]
    if answers and len(open_rows) == len(table.sample):
        return None  # the reply is in a column of its own
    if answers and open_rows:
        raise table.ambiguous((name, answers[0]), "what is learnt", "answer_column", open_rows[0])
    table.column(name, "every assistant turn")
    for other in [] if wished else [one for one in table.usual((*CONVERSATIONS, *FULL_REPLIES)) if one != name]:
        for row in table.sample:
            said, replies = (
                [text.strip() for _, text in speakers(row.columns.get(column)) if isinstance(text, str)]
                for column in (name, other)
            )
            if any(text and text not in said for text in replies):
                raise table.ambiguous((name, other), "what is learnt", "answer_column", row)
    if not wished:
        Prompt(table)  # another column asks the same, or the rows are refused
    return Prompt(table, (name,))


def _reply_column(table: Table, is_program: bool) -> str:
    """The column that is learnt of rows that do not say it by `answer_column`."""
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
        messages.pop()  # the column says what is learnt
    learnt = messages_of(reply, column, row.where) if isinstance(reply, (list, Mapping)) else None
    text = answer_text(reply, column, row.where) if learnt is None else ""
    return _imitated(table, row, with_suffix(messages, table.config.prompt_suffix), learnt or [_reply(text or "")], source)


def _is_conversation(value: Any) -> bool:
    """True of messages of both the user and the assistant."""
    return {"user", "assistant"} <= {role for role, _ in speakers(value)}


def pairs(table: Table, *, source: str, reward: str | None = None) -> list[Row]:
    """Ranked pairs: ``messages`` (the prompt), ``chosen`` and ``rejected`` (lists of messages), ``margin`` (or None), and
    ``tools``.

    Formats: ``chosen`` and ``rejected`` as texts beside a prompt; as messages, with the prompt in front of both or in a
    column of its own; as texts of the form "\\n\\nHuman: …\\n\\nAssistant: …"; and ``response_0`` and ``response_1`` with
    ``better_response_id``. A column of messages that end with a reply is not the prompt.

    Raises:
        ConfigError: a column is missing, or a value of the wrong type; sides that do not share their prompt.
    """
    _rank(table, "better_response_id")
    prompt = _prompt_beside(table)
    if table.has("margin"):
        table.column("margin")
    return [_pair(table, row, prompt, source) for row in table.rows]


def safety(table: Table, *, source: str, reward: str | None = None) -> list[Row]:
    """Pairs of a safer side, ``chosen``, and another one, as `pairs` gives them, with ``chosen_safe`` and ``rejected_safe``
    (bools).

    Formats: those of `pairs` with two such columns; and PKU-SafeRLHF's: ``response_0`` and ``response_1`` with
    ``safer_response_id``, ``is_response_0_safe`` and ``is_response_1_safe``.

    Raises:
        ConfigError: as `pairs`; or a label that is neither true nor false.
    """
    _rank(table, "safer_response_id", labelled=True)
    prompt = _prompt_beside(table)
    return [
        _pair(table, row, prompt, source)
        | {label: truth(table.value(row, label), label, row.where) for label in ("chosen_safe", "rejected_safe")}
        for row in table.rows
    ]


def _rank(table: Table, by: str, *, labelled: bool = False) -> None:
    """Gives rows of two numbered answers the columns ``chosen`` and ``rejected``; others must have them. ``by``: the column
    with the number of the chosen one. ``labelled``: each is safe or not."""
    answers = ("response_0", "response_1")
    if table.has("chosen") or not any(map(table.has, answers)):
        table.require("chosen", "rejected", *(("chosen_safe", "rejected_safe") if labelled else ()))
        return
    labels = ("is_response_0_safe", "is_response_1_safe") if labelled else ()
    table.require(*answers, by, *labels)
    rows = []
    for row in table.rows:
        first = str(table.value(row, by)).strip().removesuffix(".0")
        if first not in ("0", "1"):
            raise ConfigError(
                f"{row.where}: column {by!r} must be 0 or 1, the number of a response; got {row.columns[by]!r}"
            )
        order = (0, 1) if first == "0" else (1, 0)
        sides = {name: table.value(row, answers[i]) for name, i in zip(("chosen", "rejected"), order, strict=True)}
        if labelled:
            verdicts = [truth(table.value(row, name), name, row.where) for name in labels]
            sides |= {"chosen_safe": verdicts[order[0]], "rejected_safe": verdicts[order[1]]}
        rows.append(RawRow({**row.columns, **sides}, row.where))
    table.replace(rows)


def judged(table: Table, *, source: str, reward: str | None = None) -> list[Row]:
    """Single completions with a verdict: ``messages`` (the prompt), ``completion`` (messages), ``label`` (bool), ``tools``.

    Formats: ``prompt``, ``completion`` and ``label``; or ranked pairs as in `pairs`, of which each side becomes a row.

    Raises:
        ConfigError: a column is missing, a value of the wrong type, a label that is neither true nor false.
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
    """Completions judged step by step: ``messages`` (the prompt), ``steps`` (texts) and ``labels`` (a bool for each).

    Columns: ``prompt``, ``completions`` (a list of texts) and ``labels``.

    Raises:
        ConfigError: a column is missing, a value of the wrong type, or not one label for each step.
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
    """A label as a bool: true or false, 1 or 0, or the words.

    Raises:
        ConfigError: it is neither.
    """
    word = str(value).strip().lower()
    if value is not None and word.removesuffix(".0") in TRUE + FALSE:
        return word.removesuffix(".0") in TRUE
    raise ConfigError(f"{where}: column {column!r} must be true or false (or 1 or 0), got {value!r}")


def _row(table: Table, row: RawRow, source: str) -> Row:
    """The part that all rows have."""
    if table.has("tools"):
        table.column("tools")
    return {"tools": tools_of(row), SOURCE: source, WHERE: row.where}


def _imitated(table: Table, row: RawRow, prompt: list[Message], completion: list[Message], source: str) -> Row:
    return _row(table, row, source) | {"messages": [*prompt, *completion], "train_from": len(prompt)}


def _prompt_beside(table: Table) -> Prompt | None:
    """The question beside two sides, if it has a column; `messages` that end with a reply are a side's."""
    usual = [name for name in PROMPTS if not any(map(ends_with_reply, table.samples(name)))]
    return Prompt(table, usual) if table.config.prompt_column is not None or table.usual(usual) else None


def _pair(table: Table, row: RawRow, asked: Prompt | None, source: str) -> Row:
    sides = [table.value(row, side) for side in ("chosen", "rejected")]
    if all(isinstance(side, str) for side in sides):
        if asked is None:
            sides = [_dialogue(side, row.where) for side in sides]
            prompt, chosen, rejected = _divided(*sides, row.where)
        else:
            prompt = asked.messages(row)
            chosen, rejected = ([_reply(side)] for side in sides)
    else:
        chosen, rejected = (_completion(table, row, side) for side in ("chosen", "rejected"))
        whole = all(side and side[0]["role"] != "assistant" for side in (chosen, rejected))
        prompt = [] if asked is None else asked.messages(row)
        if asked is None or whole:
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
    """The messages that both sides begin with, and the rest of each, which is never nothing."""
    most = min(len(chosen), len(rejected)) - 1
    size = next((i for i in range(most) if chosen[i] != rejected[i]), max(0, most))
    if not size:
        raise ConfigError(
            f"{where}: chosen and rejected begin with different messages, and there is no prompt; begin both with the same "
            "messages, or give a column with the prompt"
        )
    return chosen[:size], chosen[size:], rejected[size:]


def _same_question(prompt: list[Message], shared: list[Message], where: str) -> list[Message]:
    """The messages that both sides begin with, led by the system message of the row's ``prompt``, whose last question is
    among theirs."""
    questions = [[message["content"] for message in messages if message["role"] == "user"] for messages in (prompt, shared)]
    if all(questions) and str(questions[0][-1]).strip() not in [str(text).strip() for text in questions[1]]:
        raise ConfigError(f"{where}: chosen and rejected begin with another question than the column of the prompt has")
    lead = [] if any(message["role"] == "system" for message in shared) else prompt
    return [*(message for message in lead if message["role"] == "system"), *shared]


def _dialogue(text: str, where: str) -> list[Message]:
    """A conversation written as "\\n\\nHuman: …\\n\\nAssistant: …"."""
    parts = _DIALOGUE.split(text if text.startswith("\n\n") else "\n\n" + text)
    if parts[0].strip() or len(parts) < 3:
        raise ConfigError(
            f"{where}: chosen and rejected are texts, and there is no prompt; give the prompt in a column (prompt_column), "
            'or write the sides as messages, or as "\\n\\nHuman: …\\n\\nAssistant: …"'
        )
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(parts[1::2], parts[2::2], strict=True)]


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
