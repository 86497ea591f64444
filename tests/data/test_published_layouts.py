"""Published data sets are read as published, and every column is read or named as not read."""

import json
from decimal import Decimal

import pytest

from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.data.dataset import load_dataset
from tandem.data.encoding import ChatEncoder
from tandem.data.examples import conversations, pairs
from tandem.data.files import without_nulls
from tandem.data.rows import answer_text, normalise
from tests.data.layouts import LAYOUTS, WEATHER, call, filled, reply, system, user
from tests.tiny import tiny_tokenizer


def written(folder, *rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(folder, reader, *rows, **config):
    return load_dataset(DatasetConfig(path=str(written(folder, *rows)), **config), reader=reader, section="train_dataset.")


def error_of(folder, reader, *rows, **config):
    with pytest.raises(ConfigError) as error:
        read(folder, reader, *rows, **config)
    return str(error.value)


def meaning(row):
    """(prompt, what is learnt or compared with) of a row in our shape."""
    if "train_from" in row:
        replies = [message for message in row["messages"] if message["role"] == "assistant"]
        learnt = [{k: v for k, v in one.items() if k != "weight"} for one in replies if one.get("weight", 1)]
        return [message for message in row["messages"] if message["role"] != "assistant"], learnt
    if "chosen" in row:
        return row["messages"], [*row["chosen"], *row["rejected"]]
    return row["messages"], row.get("completion") or row.get("steps") or [row["answer"]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_is_read_as_published(tmp_path, name):
    layout = LAYOUTS[name]
    data = read(tmp_path, layout.reader, *(filled(layout.row, n) for n in range(5)))
    assert [meaning(row) for row in data.rows] == [(filled(layout.asked, n), filled(layout.learnt, n)) for n in range(5)]
    assert data.readings[0].describe() == layout.reads


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.reader is conversations])
def test_what_is_learnt_are_the_published_replies_and_nothing_else(tmp_path, name):
    layout, tokenizer = LAYOUTS[name], tiny_tokenizer()
    for n, row in enumerate(read(tmp_path, conversations, *(filled(layout.row, n) for n in range(5))).rows):
        (encoded,) = ChatEncoder(tokenizer, max_length=999).conversation(row["messages"], row["train_from"])
        learnt = tokenizer.decode([token for token, mask in zip(encoded.ids, encoded.mask, strict=True) if mask])
        assert learnt == "".join(f"{message['content']}<|im_end|>" for message in filled(layout.learnt, n))


@pytest.mark.parametrize(
    ("reader", "row", "said"),
    [
        (
            normalise,
            {"messages": [user("2?")], "prompt": "3?", "answer": 1},
            "columns messages and prompt both fit the prompt",
        ),
        (normalise, {"question": "2?", "input": "a text", "answer": 1}, "set train_dataset.prompt_column=question or"),
        (conversations, {"prompt": "2?", "messages": [user("3?"), reply("4")]}, "messages and prompt both fit the prompt"),
        (conversations, {"messages": [user("3?"), reply("4")], "response": "5"}, "messages and response both fit what is"),
        (
            conversations,
            {"problem": "2?", "answer": "4", "solution": "It is 4."},
            "set train_dataset.answer_column=answer or",
        ),
        (pairs, {"prompt": "2?", "question": "3?", "chosen": "a", "rejected": "b"}, "prompt and question both fit"),
    ],
)
def test_two_columns_that_fit_and_differ_are_refused_with_the_key(tmp_path, reader, row, said):
    text = error_of(tmp_path, reader, row)
    assert "rows.jsonl:1: " in text and "and differ here" in text and said in text


def test_the_key_of_such_a_refusal_leads_to_something_that_works(tmp_path):
    row = {"messages": [user("3?"), reply("4")], "response": "5", "problem": "3?", "answer": "4", "solution": "It is 4."}
    whole = read(tmp_path, conversations, row, answer_column="messages").rows[0]
    assert (whole["messages"], whole["train_from"]) == ([user("3?"), reply("4")], 0)
    for column in ("response", "solution"):
        learnt = read(tmp_path, conversations, row, answer_column=column).rows[0]
        assert learnt["messages"] == [user("3?"), reply(row[column])]
    assert read(tmp_path, normalise, row, prompt_column="problem").rows[0]["answer"] == "4"


def test_an_answer_within_a_column_is_named_with_a_dot(tmp_path):
    row = {"prompt": "1 + 1?", "gold": {"value": "2", "style": "rule"}}
    assert read(tmp_path, normalise, row, answer_column="gold.value").rows[0]["answer"] == "2"
    assert read(tmp_path, normalise, row, columns={"answer": "gold.value"}).rows[0]["answer"] == "2"
    assert "did you mean 'gold.value'?" in error_of(tmp_path, normalise, row, answer_column="gold.valeu")
    assert "name a value within it with a dot: gold.value, gold.style" in error_of(
        tmp_path, normalise, row, answer_column="gold"
    )


def test_a_column_that_another_one_replaces_is_told(tmp_path):
    row = {"prompt": "P", "question": "Q", "answer": "1"}
    (reading,) = read(tmp_path, normalise, row, columns={"prompt": "question"}).readings
    assert reading.describe() == "reads: prompt=question, answer; not read: prompt (replaced)"


def test_the_first_row_may_be_the_odd_one(tmp_path):
    text = error_of(tmp_path, normalise, {"question": "1?"}, *({"question": "2?", "answer": 2} for _ in range(4)))
    assert "rows.jsonl:1: column 'answer' is missing, other rows have it; columns there: question" in text


def test_a_number_keeps_the_form_in_which_it_is_written(tmp_path):
    numbers = ("1e-05", "0.10", "3.0", "12", "1E6")
    lines = ['{"question": "?", "level": 0.50, "answer": ' + text + "}\n" for text in numbers]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    rows = load_dataset(DatasetConfig(path=str(tmp_path / "rows.jsonl"))).rows
    assert [row["answer"] for row in rows] == ["1e-05", "0.10", "3", "12", "1E6"]
    assert type(rows[0]["level"]) is float


def test_a_number_that_no_file_has_written_is_told_without_an_exponent():
    numbers = (1e-05, 2e22, 3.0, 7, Decimal("0.50"))
    told = ["0.00001", "20000000000000000000000", "3", "7", "0.50"]
    assert [answer_text(number, "answer", "row 1") for number in numbers] == told


def test_columns_that_differ_only_far_behind_are_refused_too(tmp_path):
    rows = [{"prompt": f"{n}?", "question": f"{n + (n > 100)}?", "answer": n} for n in range(200)]
    assert "prompt and question both fit the prompt, and differ here" in error_of(tmp_path, normalise, *rows)


def test_columns_of_the_users_stay_beside_tandems_own(tmp_path):
    row = {"question": "?", "answer": "1", "source": "olympiads", "index": 700, "where": "here"}
    (found,) = read(tmp_path, normalise, row).rows
    assert {name: found[name] for name in row} == row
    assert (found["tandem.source"], found["tandem.where"]) == ("rows", f"{tmp_path / 'rows.jsonl'}:1")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"from": "robot", "value": "x"}, "with a role of system, user, assistant, tool"),
        (user(None), "with a role of system, user, assistant, tool"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_with_its_line(tmp_path, message, said):
    assert said in error_of(tmp_path, conversations, {"messages": [message, reply("x")]}, answer_column="messages")


def test_tools_as_json_text_are_the_tools(tmp_path):
    row = {"messages": [user("?"), reply("", tool_calls=[call("{}")])], "tools": json.dumps([WEATHER])}
    assert read(tmp_path, conversations, row).rows[0]["tools"] == [WEATHER]
    assert "column 'tools' is not JSON" in error_of(tmp_path, conversations, row | {"tools": "[{"})


def test_a_system_column_does_not_replace_the_system_message_of_a_conversation(tmp_path):
    row = {"messages": [system("a"), user("?"), reply("!")], "system": "b"}
    assert read(tmp_path, conversations, row).rows[0]["messages"][0] == system("a")


def test_a_conversation_in_json_text_as_a_csv_has_it_is_a_conversation(tmp_path):
    asked, learnt = [user("2 + 2?")], [user("2 + 2?"), reply("4")]
    (found,) = read(tmp_path, conversations, {"messages": json.dumps(learnt)}).rows
    assert found["messages"] == learnt
    row = {"prompt": json.dumps(asked), "answer": "4", "history": json.dumps(learnt)}
    (found,) = read(tmp_path, normalise, row).rows
    assert found["messages"] == asked
    assert found["history"] == row["history"]  # a reward reads it as it stands


def test_a_conversation_that_ends_with_the_user_is_answered_by_the_answer(tmp_path):
    started = [user("1 + 1?"), reply("2"), user("2 + 2?")]
    (found,) = read(tmp_path, conversations, {"messages": started, "answer": "4"}).rows
    assert (found["messages"], found["train_from"]) == ([*started, reply("4")], 3)
    rows = [{"messages": started, "answer": "4"}, {"messages": started[:2], "answer": "2"}]
    assert "columns messages and answer both fit what is learnt" in error_of(tmp_path, conversations, *rows)


def test_a_prompt_of_several_turns_stands_beside_its_sides(tmp_path):
    asked, sides = [user("1 + 1?"), reply("2"), user("2 + 2?")], {"chosen": [reply("4")], "rejected": [reply("5")]}
    (found,) = read(tmp_path, pairs, {"prompt": asked, **sides}).rows
    assert (found["messages"], found["chosen"], found["rejected"]) == (asked, [reply("4")], [reply("5")])


def test_sides_with_a_prompt_of_their_own_get_the_system_message_of_the_row(tmp_path):
    whole = {"chosen": [user("2 + 2?"), reply("4")], "rejected": [user("2 + 2?"), reply("5")]}
    (found,) = read(tmp_path, pairs, {"system": "Be brief.", "prompt": "2 + 2? ", **whole}).rows
    assert (found["messages"], found["chosen"]) == ([system("Be brief."), user("2 + 2?")], [reply("4")])
    assert "a question other than the prompt column's" in error_of(tmp_path, pairs, {"prompt": "3 + 3?", **whole})


def test_a_name_of_tandems_own_is_refused_and_input_may_be_missing(tmp_path):
    assert "'tandem.index' has a name that Tandem reserves" in error_of(
        tmp_path, normalise, {"prompt": "?", "tandem.index": 1}
    )
    rows = [{"instruction": "Count.", "input": "to 2", "output": "1, 2"}, {"instruction": "Sing.", "output": "la"}]
    found = read(tmp_path, conversations, *rows).rows
    assert [row["messages"][0]["content"] for row in found] == ["Count.\n\nto 2", "Sing."]


def test_nulls_that_arrow_adds_to_calls_and_tools_are_left_out():
    call_of = {"function": {"name": "w", "arguments": {"city": "P", "stock": None}}}
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call_of]}], "level": None}
    cleaned = without_nulls(row)
    assert cleaned["messages"][0]["tool_calls"] == [{"function": {"name": "w", "arguments": {"city": "P"}}}]
    assert cleaned["messages"][0]["content"] is None and cleaned["level"] is None


@pytest.mark.parametrize("calls", [[None], [{"function": "w"}], "w()"])
def test_calls_of_another_shape_are_refused_with_their_line(tmp_path, calls):
    row = {"messages": [user("?"), reply("", tool_calls=calls)]}
    assert "rows.jsonl:1: tool_calls in 'messages' must be a list of {function" in error_of(tmp_path, conversations, row)
