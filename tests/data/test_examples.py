"""The field's row formats become one shape; what is wrong with a row is said with its number."""

import json

import pytest

from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.data.dataset import load_dataset
from tandem.data.examples import conversations, judged, pairs, safety, steps, truth

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "2 + 2?"), ("assistant", "4"), ("assistant", "5"))
)


def read(tmp_path, reader, *rows, **config):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset(DatasetConfig(path=str(file), **config), reader=reader).rows


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, GOOD]},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": [USER], "completion": [GOOD]},
        {"question": "2 + 2?", "answer": "4"},
        {"question": "2 + 2?", "answer": 4},
    ],
)
def test_a_conversation_may_be_written_in_many_ways(tmp_path, row):
    (found,) = read(tmp_path, conversations, row)
    assert found["messages"] == [USER, GOOD]
    assert found["train_from"] == (0 if "messages" in row else 1)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2 + 2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5"},
    ],
)
def test_a_pair_may_be_written_in_many_ways(tmp_path, row):
    (found,) = read(tmp_path, pairs, row)
    assert (found["messages"], found["chosen"], found["rejected"]) == ([USER], [GOOD], [BAD])
    assert found["margin"] is None


SAFER = {
    "prompt": "2 + 2?",
    "response_0": "5",
    "response_1": "4",
    "is_response_0_safe": True,
    "is_response_1_safe": False,
    "better_response_id": 1,
    "safer_response_id": 0,
}
"""A row of PKU-SafeRLHF: the better answer is not the safer one."""


def test_two_numbered_answers_are_ranked_by_help_or_by_safety(tmp_path):
    (helpful,), (safe,) = read(tmp_path, pairs, SAFER), read(tmp_path, safety, SAFER)
    assert (helpful["messages"], helpful["chosen"], helpful["rejected"]) == ([USER], [GOOD], [BAD])
    assert (safe["chosen"], safe["rejected"], safe["chosen_safe"], safe["rejected_safe"]) == ([BAD], [GOOD], True, False)
    mapped = {"safest" if name == "safer_response_id" else name: value for name, value in SAFER.items()}
    assert read(tmp_path, safety, mapped, columns={"safer_response_id": "safest"})[0]["chosen"] == [BAD]
    (safe,) = read(
        tmp_path, safety, SAFER | {"safer_response_id": 1, "is_response_0_safe": False, "is_response_1_safe": True}
    )
    assert (safe["chosen"], safe["chosen_safe"], safe["rejected_safe"]) == ([GOOD], True, False)
    sides = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "chosen_safe": 1, "rejected_safe": "no"}
    (named,) = read(tmp_path, safety, sides)
    assert (named["chosen"], named["chosen_safe"], named["rejected_safe"]) == ([GOOD], True, False)


def test_what_both_sides_of_a_conversation_share_is_the_prompt(tmp_path):
    more = {"role": "user", "content": "And 3 + 3?"}
    (found,) = read(tmp_path, pairs, {"chosen": [USER, GOOD, more, GOOD], "rejected": [USER, GOOD, more, BAD], "margin": 2})
    assert found["messages"] == [USER, GOOD, more]
    assert (found["chosen"], found["rejected"], found["margin"]) == ([GOOD], [BAD], 2.0)


def test_equal_sides_are_left_to_the_encoder_with_their_last_message(tmp_path):
    (found,) = read(tmp_path, pairs, {"chosen": [USER, GOOD], "rejected": [USER, GOOD]})
    assert (found["messages"], found["chosen"], found["rejected"]) == ([USER], [GOOD], [GOOD])


def test_a_judged_completion_and_a_pair_both_give_labels(tmp_path):
    (one,) = read(tmp_path, judged, {"prompt": "2 + 2?", "completion": "5", "label": False})
    assert (one["messages"], one["completion"], one["label"]) == ([USER], [BAD], False)
    two = read(tmp_path, judged, {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})
    assert [(row["completion"], row["label"]) for row in two] == [([GOOD], True), ([BAD], False)]


def test_judged_steps_have_one_label_each(tmp_path):
    (found,) = read(tmp_path, steps, {"prompt": "2 + 2?", "completions": ["Two and two", "make 5"], "labels": [1, "false"]})
    assert (found["steps"], found["labels"]) == (["Two and two", "make 5"], [True, False])


def test_columns_of_other_names_are_mapped(tmp_path):
    row = {"ask": "2 + 2?", "winner": "4", "loser": "5", "chosen": "not this"}
    (found,) = read(tmp_path, pairs, row, columns={"prompt": "ask", "chosen": "winner", "rejected": "loser"})
    assert (found["messages"], found["chosen"], found["rejected"]) == ([USER], [GOOD], [BAD])


def test_no_column_is_suggested_whose_name_is_not_near(tmp_path):
    with pytest.raises(ConfigError, match=r"'chosen' is missing; there are: loser, prompt, winner\. If it has another name"):
        read(tmp_path, pairs, {"prompt": "2 + 2?", "winner": "4", "loser": "5"})


@pytest.mark.parametrize(("value", "expected"), [(True, True), ("False", False), (1, True), (0.0, False), ("yes", True)])
def test_a_label_is_told_in_several_ways(value, expected):
    assert truth(value, "label", "rows.jsonl:1") is expected


FINE = {
    "prompt": "?",
    "completion": "!",
    "label": True,
    "chosen": "a",
    "rejected": "b",
    "completions": ["a"],
    "labels": [True],
}


@pytest.mark.parametrize(
    ("reader", "change", "said"),
    [
        (judged, {"label": "maybe"}, "'label' must be true or false (or 1 or 0), got 'maybe'"),
        (judged, {"label": None}, "'label' must be true or false"),
        (judged, {"label": 0.5}, "'label' must be true or false"),
        (judged, {"completion": 7}, "'completion' must be text or a list of messages, got int 7"),
        (judged, {"prompt": ""}, "'prompt' must be text or a list of messages"),
        (pairs, {"chosen": [{"role": "robot", "content": "x"}]}, "with a role of system, user, assistant, tool"),
        (pairs, {"margin": "wide"}, "'margin' must be a number, got 'wide'"),
        (pairs, {"margin": float("nan")}, "'margin' must be a number"),
        (pairs, {"chosen": [USER], "rejected": [BAD]}, "must begin with the assistant, got 'user'"),
        (steps, {"labels": [True, True]}, "one label for each of 1 steps, got 2"),
        (steps, {"completions": "a"}, "must be a list of texts"),
        (conversations, {"completion": True}, "'completion' must be text"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_number(tmp_path, reader, change, said):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, reader, FINE, FINE | change)
    assert "rows.jsonl:2: " in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("reader", "row", "said"),
    [
        (pairs, {"prompt": "?", "chosen": "a"}, "needs the columns chosen, rejected, and 'rejected' is missing"),
        (pairs, {"chosen": "a", "rejected": "b"}, "there is no prompt"),
        (pairs, {"chosen": [GOOD], "rejected": [BAD]}, "begin with different messages"),
        (judged, {"completion": "a", "label": True}, "no column for the question among completion, label"),
        (steps, {"prompt": "?", "completions": ["a"]}, "'labels' is missing"),
        (safety, {"prompt": "?", "chosen": "a", "rejected": "b", "chosen_safe": 1}, "'rejected_safe' is missing"),
        (safety, {n: v for n, v in SAFER.items() if n != "is_response_0_safe"}, "'is_response_0_safe' is missing"),
        (pairs, {n: v for n, v in SAFER.items() if n != "better_response_id"}, "did you mean 'safer_response_id'?"),
        (pairs, SAFER | {"better_response_id": 2}, "'better_response_id' must be 0 or 1, the number of a response; got 2"),
        (safety, SAFER | {"is_response_1_safe": "maybe"}, "'is_response_1_safe' must be true or false"),
    ],
)
def test_a_missing_column_is_named(tmp_path, reader, row, said):
    with pytest.raises(ConfigError, match=r"rows.jsonl:1") as error:
        read(tmp_path, reader, row)
    assert said in str(error.value)


def test_a_mapped_column_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"columns\.chosen=winer, but the row has no such column; did you mean .?winner"):
        read(tmp_path, pairs, {"prompt": "?", "winner": "a", "rejected": "b"}, columns={"chosen": "winer"})


@pytest.mark.parametrize(
    ("reader", "row", "columns", "said"),
    [
        (
            pairs,
            FINE,
            {"label": "label"},
            r"columns\.label=label would change nothing: .* chosen, rejected, prompt are read",
        ),
        (steps, FINE, {"answer": "label"}, "of these rows only completions, labels, prompt are read"),
        (judged, FINE, {"chosen": "chosen"}, "of these rows only completion, label, prompt are read"),
        (
            conversations,
            {"messages": [USER, GOOD], "t": "!"},
            {"completion": "t"},
            "columns messages and completion both fit what is learnt, and differ here: set answer_column",
        ),
        (conversations, FINE, {"margin": "label"}, "of these rows only prompt, completion are read"),
        (
            pairs,
            FINE | {"q": "?"},
            {"question": "q", "prompt": "prompt"},
            r"columns\.question=q .* columns\.prompt=q\?",
        ),
    ],
)
def test_a_mapped_column_that_the_format_never_reads_is_refused(tmp_path, reader, row, columns, said):
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:1: .*{said}"):
        read(tmp_path, reader, row, columns=columns)


def test_a_column_that_was_given_the_name_of_a_prompt_is_the_prompt(tmp_path):
    row = {"ask": "2 + 2?", "prompt": "not this", "chosen": "4", "rejected": "5"}
    (found,) = read(tmp_path, pairs, row, columns={"question": "ask"})
    assert found["messages"] == [USER]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": [USER], "completion": [GOOD]},
        {"question": "2 + 2?", "answer": 4},
    ],
)
def test_a_suffix_stands_behind_the_question_of_rows_that_have_one(tmp_path, row):
    (found,) = read(tmp_path, conversations, row, prompt_suffix=" Just the number.")
    assert found["messages"] == [USER | {"content": "2 + 2? Just the number."}, GOOD]


def test_a_suffix_is_refused_for_whole_conversations_which_have_no_one_question(tmp_path):
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: prompt_suffix=' !' is appended to a row's question, and"):
        read(tmp_path, conversations, {"messages": [USER, GOOD, USER, GOOD]}, prompt_suffix=" !")


def test_generated_pairs_rank_the_right_sum_above_a_wrong_one():
    rows = load_dataset(DatasetConfig(path="addition_pairs", size=30), reader=pairs).rows
    held_out = load_dataset(DatasetConfig(path="addition_pairs", split="test"), reader=pairs).rows
    for row in [*rows, *held_out]:
        x, y = (int(word.strip("?")) for word in row["messages"][0]["content"].split() if word.strip("?").isdigit())
        assert row["chosen"][0]["content"] == str(x + y) != row["rejected"][0]["content"]
    asked = {row["messages"][0]["content"] for row in rows}
    assert len(rows) == 30
    assert asked.isdisjoint(row["messages"][0]["content"] for row in held_out)


def test_rows_without_any_answer_are_refused_and_not_dropped_one_by_one(tmp_path):
    with pytest.raises(
        ConfigError, match="no row has an answer to learn; columns there: question, rating; looked for answer"
    ):
        read(tmp_path, conversations, {"question": "2 + 2?", "rating": 3})
    found = read(tmp_path, conversations, {"question": "2 + 2?", "answer": None}, {"question": "2 + 2?", "answer": "4"})
    assert [row["messages"][-1]["content"] for row in found] == ["", "4"]  # the encoder drops and counts the first
