"""Rows to imitate and rows that were judged: the field's formats, each in one shape.

What has the wrong type or lacks a column is refused when the data is read; what is only useless (an empty completion, two
equal sides) is left to the encoder, which drops and counts it. Both say the row.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.config.nearest import nearest_names
from tandem.data.files import RawRow
from tandem.data.rows import ANSWERS, PROMPTS, ROLES, Row, normalise, refuse_unread, with_suffix

Reader = Callable[..., list[Row]]
"""``reader(raw, config, source=…, reward=…)``: rows in one shape, as `tandem.data.rows.normalise`."""

Message = dict[str, Any]
TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")
_DIALOGUE = re.compile(r"\n\n(Human|Assistant): ?")


def conversations(raw: Sequence[RawRow], config: DatasetConfig, *, source: str, reward: str | None = None) -> list[Row]:
    """Rows to imitate: ``messages`` (the whole conversation) and ``train_from``, the first message that may be learnt.

    Formats: ``messages`` with turns of the assistant (all of them are learnt); ``prompt`` and ``completion``, each text or
    messages; a question and an answer under any of their usual names. `prompt_suffix` is put behind the question.

    Raises:
        ConfigError: no such columns, or a value of the wrong type (with file and line); a `prompt_suffix` for whole
            conversations, which have no one question; `columns` that are not read.
    """
    if not raw:
        return []
    there = raw[0].columns
    if config.prompt_column is None and config.answer_column is None:
        if "messages" in there and not ({"answer", "solution"} & set(there)):
            refuse_unread(config, ("messages",), raw[0].where)
            if config.prompt_suffix:
                raise ConfigError(
                    f"{raw[0].where}: prompt_suffix={config.prompt_suffix!r} is put behind a row's question, and these rows "
                    "are whole conversations, every reply of which is learnt: leave it out, or give rows with a prompt and "
                    "a completion"
                )
            return [_imitated(row, [], _messages(_value(row, "messages"), "messages", row.where), source) for row in raw]
        if "prompt" in there and "completion" in there:
            refuse_unread(config, ("prompt", "completion"), raw[0].where)
            return [
                _imitated(
                    row, with_suffix(_prompt(row, "prompt"), config.prompt_suffix), _completion(row, "completion"), source
                )
                for row in raw
            ]
    found = normalise(raw, config, source=source, reward=reward)
    if all(one["answer"] is None for one in found):
        raise ConfigError(
            f"{raw[0].where}: no row has an answer to learn; columns there: {', '.join(raw[0].columns)}; "
            f"looked for {', '.join(ANSWERS)}: set answer_column"
        )
    return [
        _imitated(row, one["messages"], [_reply(one["answer"] or "")], source) for row, one in zip(raw, found, strict=True)
    ]


def pairs(raw: Sequence[RawRow], config: DatasetConfig, *, source: str, reward: str | None = None) -> list[Row]:
    """Ranked pairs: ``messages`` (the prompt), ``chosen`` and ``rejected`` (lists of messages), ``margin`` (or None).

    Formats: ``chosen`` and ``rejected`` as texts beside a prompt; as messages, with the prompt in front of both or in a
    column of its own; as texts of the form "\\n\\nHuman: …\\n\\nAssistant: …"; and ``response_0`` and ``response_1`` with
    ``better_response_id``.

    Raises:
        ConfigError: a column is missing, or a value of the wrong type; sides that do not share their prompt.
    """
    raw, read = _sides(raw, "better_response_id")
    _require(raw, ("chosen", "rejected"))
    column = _prompt_column(raw, config)
    _read_all(raw, config, column, *read, "margin")
    return [_pair(row, column, source) for row in raw]


def safety(raw: Sequence[RawRow], config: DatasetConfig, *, source: str, reward: str | None = None) -> list[Row]:
    """Pairs of a safer side, ``chosen``, and another one, as `pairs` gives them, with ``chosen_safe`` and ``rejected_safe``
    (bools).

    Formats: those of `pairs` with two such columns; and PKU-SafeRLHF's: ``response_0`` and ``response_1`` with
    ``safer_response_id``, ``is_response_0_safe`` and ``is_response_1_safe``.

    Raises:
        ConfigError: as `pairs`; or a label that is neither true nor false.
    """
    raw, read = _sides(raw, "safer_response_id", labelled=True)
    labels = ("chosen_safe", "rejected_safe")
    _require(raw, ("chosen", "rejected", *labels))
    column = _prompt_column(raw, config)
    _read_all(raw, config, column, *read)
    return [
        _pair(row, column, source) | {label: truth(_value(row, label), label, row.where) for label in labels} for row in raw
    ]


def _sides(raw: Sequence[RawRow], by: str, *, labelled: bool = False) -> tuple[Sequence[RawRow], tuple[str, ...]]:
    """Rows of two numbered answers as rows with ``chosen`` and ``rejected``, other rows as they are; and the columns that
    are read, beside the prompt. ``by``: the column with the number of the chosen one. ``labelled``: each is safe or not."""
    if not raw or "chosen" in raw[0].columns or not {"response_0", "response_1"} & set(raw[0].columns):
        return raw, ("chosen", "rejected", *(("chosen_safe", "rejected_safe") if labelled else ()))
    answers = ("response_0", "response_1")
    labels = ("is_response_0_safe", "is_response_1_safe") if labelled else ()
    read = (*answers, by, *labels)
    _require(raw, read)
    rows = []
    for row in raw:
        first = str(_value(row, by)).strip().removesuffix(".0")
        if first not in ("0", "1"):
            raise ConfigError(
                f"{row.where}: column {by!r} must be 0 or 1, the number of a response; got {row.columns[by]!r}"
            )
        order = (0, 1) if first == "0" else (1, 0)
        sides = {name: _value(row, answers[i]) for name, i in zip(("chosen", "rejected"), order, strict=True)}
        if labelled:
            verdicts = [truth(_value(row, name), name, row.where) for name in labels]
            sides |= {"chosen_safe": verdicts[order[0]], "rejected_safe": verdicts[order[1]]}
        rows.append(RawRow({**row.columns, **sides}, row.where))
    return rows, read


def judged(raw: Sequence[RawRow], config: DatasetConfig, *, source: str, reward: str | None = None) -> list[Row]:
    """Single completions with a verdict: ``messages`` (the prompt), ``completion`` (messages), ``label`` (bool).

    Formats: ``prompt``, ``completion`` and ``label``; or ranked pairs as in `pairs`, of which each side becomes a row.

    Raises:
        ConfigError: a column is missing, a value of the wrong type, a label that is neither true nor false.
    """
    if raw and "label" not in raw[0].columns and {"chosen", "rejected"} <= set(raw[0].columns):
        return [
            {"messages": row["messages"], "completion": row[side], "label": side == "chosen"} | _common(row)
            for row in pairs(raw, config, source=source)
            for side in ("chosen", "rejected")
        ]
    _require(raw, ("completion", "label"))
    column = _prompt_column(raw, config)
    _read_all(raw, config, column, "completion", "label")
    if raw and column is None:
        raise ConfigError(f"{raw[0].where}: no column for the prompt; looked for {', '.join(PROMPTS)}: set prompt_column")
    return [
        {
            "messages": _prompt(row, str(column)),
            "completion": _completion(row, "completion"),
            "label": truth(_value(row, "label"), "label", row.where),
        }
        | {"source": source, "where": row.where}
        for row in raw
    ]


def steps(raw: Sequence[RawRow], config: DatasetConfig, *, source: str, reward: str | None = None) -> list[Row]:
    """Completions judged step by step: ``messages`` (the prompt), ``steps`` (texts) and ``labels`` (a bool for each).

    Columns: ``prompt``, ``completions`` (a list of texts) and ``labels``.

    Raises:
        ConfigError: a column is missing, a value of the wrong type, or not one label for each step.
    """
    _require(raw, ("completions", "labels"))
    column = _prompt_column(raw, config)
    _read_all(raw, config, column, "completions", "labels")
    if raw and column is None:
        raise ConfigError(f"{raw[0].where}: no column for the prompt; looked for {', '.join(PROMPTS)}: set prompt_column")
    rows = []
    for row in raw:
        texts, labels = _value(row, "completions"), _value(row, "labels")
        if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            raise ConfigError(f"{row.where}: column 'completions' must be a list of texts, the steps; got {texts!r}")
        if not isinstance(labels, list) or len(labels) != len(texts):
            got = f"{len(labels)}" if isinstance(labels, list) else repr(labels)
            raise ConfigError(
                f"{row.where}: column 'labels' must be a list with one label for each of {len(texts)} steps, got {got}"
            )
        verdicts = [truth(label, "labels", row.where) for label in labels]
        rows.append(
            {"messages": _prompt(row, str(column)), "steps": texts, "labels": verdicts, "source": source, "where": row.where}
        )
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


def _common(row: Row) -> Row:
    return {"source": row["source"], "where": row["where"]}


def _imitated(row: RawRow, prompt: list[Message], completion: list[Message], source: str) -> Row:
    return {"messages": [*prompt, *completion], "train_from": len(prompt), "source": source, "where": row.where}


def _pair(row: RawRow, column: str | None, source: str) -> Row:
    sides = [_value(row, side) for side in ("chosen", "rejected")]
    if all(isinstance(side, str) for side in sides):
        if column is None:
            sides = [_dialogue(side, row.where) for side in sides]
            prompt, chosen, rejected = _divided(*sides, row.where)
        else:
            prompt = _prompt(row, column)
            chosen, rejected = ([_reply(side)] for side in sides)
    else:
        chosen, rejected = (_completion(row, side) for side in ("chosen", "rejected"))
        if column is None:
            prompt, chosen, rejected = _divided(chosen, rejected, row.where)
        else:
            prompt = _prompt(row, column)
            chosen, rejected = (_without(prompt, side) for side in (chosen, rejected))
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if side and side[0]["role"] != "assistant":
            raise ConfigError(
                f"{row.where}: what follows the prompt in {name!r} must begin with the assistant, got {side[0]['role']!r}; "
                "both sides need the same prompt"
            )
    margin = row.columns.get("margin")
    if margin is not None:
        margin = _number(margin, row.where)
    return {
        "messages": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "margin": margin,
        "source": source,
        "where": row.where,
    }


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


def _without(prompt: list[Message], side: list[Message]) -> list[Message]:
    """A side that repeats its prompt, without it."""
    return side[len(prompt) :] if side[: len(prompt)] == prompt and len(side) > len(prompt) else side


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


def _require(raw: Sequence[RawRow], names: tuple[str, ...]) -> None:
    for name in names if raw else ():
        if name not in raw[0].columns:
            there = list(raw[0].columns)
            raise ConfigError(
                f"{raw[0].where}: this kind of training needs the columns {', '.join(names)}, and {name!r} is missing; "
                f"{nearest_names(name, there)}. Another name is told by columns.{name}=NAME"
            )


def _read_all(raw: Sequence[RawRow], config: DatasetConfig, prompt: str | None, *others: str) -> None:
    if raw:
        refuse_unread(config, (*([prompt] if prompt else []), *others), raw[0].where)


def _prompt_column(raw: Sequence[RawRow], config: DatasetConfig) -> str | None:
    if not raw:
        return None
    there = raw[0].columns
    if config.prompt_column is not None and config.prompt_column not in there:
        raise ConfigError(
            f"{raw[0].where}: prompt_column={config.prompt_column}, but the row has no such column; "
            f"{nearest_names(config.prompt_column, list(there))}"
        )
    mapped = sorted(PROMPTS, key=lambda name: name not in config.columns)
    return config.prompt_column or next((name for name in mapped if name in there), None)


def _value(row: RawRow, name: str) -> Any:
    if name not in row.columns:
        raise ConfigError(
            f"{row.where}: column {name!r} is missing, other rows have it; columns there: {', '.join(row.columns)}"
        )
    return row.columns[name]


def _prompt(row: RawRow, name: str) -> list[Message]:
    value = _value(row, name)
    if isinstance(value, str) and value.strip():
        return [{"role": "user", "content": value}]
    messages = _messages(value, name, row.where) if isinstance(value, list) else []
    if not messages:
        raise ConfigError(f"{row.where}: column {name!r} must be text or a list of messages, got {value!r}")
    return messages


def _completion(row: RawRow, name: str) -> list[Message]:
    value = _value(row, name)
    if value is None or isinstance(value, str):
        return [_reply(value or "")]
    return _messages(value, name, row.where)


def _reply(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _messages(value: Any, name: str, where: str) -> list[Message]:
    if not isinstance(value, list):
        raise ConfigError(
            f"{where}: column {name!r} must be text or a list of messages, got {type(value).__name__} {value!r}"
        )
    for message in value:
        fine = isinstance(message, Mapping) and message.get("role") in ROLES
        if not fine or not (isinstance(message.get("content"), (str, list)) or message.get("tool_calls")):
            raise ConfigError(
                f"{where}: column {name!r} must be a list of {{role, content}} with a role of {', '.join(ROLES)}; "
                f"got {message!r}"
            )
    return [dict(message) for message in value]


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise ConfigError(f"{where}: column 'margin' must be a number, got {value!r}")
    return number
