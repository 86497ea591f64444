"""Rows from everywhere come in one shape; what is wrong with them is said with file and line."""

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.config.data import DatasetConfig, SourceConfig
from tandem.config.errors import ConfigError
from tandem.data.dataset import Dataset, load_dataset, with_progress
from tandem.data.procedural import HELD_OUT, PAIRS

GSM8K = Path(__file__).parents[1] / "data_files" / "gsm8k"
ROWS = [{"question": f"What is {i}?", "answer": str(i), "level": i} for i in range(5)]


def jsonl(folder, rows, name="train.jsonl"):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return file


def load(path, default="train", **config):
    return load_dataset(DatasetConfig(path=str(path), **config), default_split=default)


def error_of(path, default="train", **config):
    with pytest.raises(ConfigError) as error:
        load(path, default, **config)
    return str(error.value)


def test_gsm8k_keeps_its_columns_and_gains_messages_answer_and_source():
    train, test = load(GSM8K), load(GSM8K, "test")
    assert (len(train), len(test)) == (20, 20)
    row = train[0]
    assert row["messages"] == [{"role": "user", "content": row["question"]}]
    assert row["answer"].endswith("#### 72")
    assert row["tandem.source"] == "gsm8k" and row["tandem.reward"] is None
    assert not {r["question"] for r in train} & {r["question"] for r in test}


def test_every_file_format_gives_the_same_rows(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet needs the optional library")
    table = pytest.importorskip("pyarrow").Table.from_pylist(ROWS)
    files = [tmp_path / f"rows.{ending}" for ending in ("jsonl", "json", "csv", "parquet")]
    jsonl(tmp_path, ROWS, "rows.jsonl")
    files[1].write_text(json.dumps(ROWS))
    with files[2].open("w", newline="") as out:
        writer = csv.DictWriter(out, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    parquet.write_table(table, files[3])
    parts = [[(r["messages"], r["answer"], int(r["level"])) for r in load(file)] for file in files]
    assert parts[0] == parts[1] == parts[2] == parts[3]


def test_a_folder_has_splits_also_in_several_files_and_in_its_data_folder(tmp_path):
    jsonl(tmp_path, ROWS[:2], "data/train-00000-of-00002.jsonl")
    jsonl(tmp_path, ROWS[2:], "data/train-00001-of-00002.jsonl")
    jsonl(tmp_path, ROWS[:1], "data/test.jsonl")
    jsonl(tmp_path, ROWS[:1], "data/trainees.jsonl")  # of another split, whose name begins alike
    assert [r["level"] for r in load(tmp_path)] == [0, 1, 2, 3, 4]
    assert len(load(tmp_path, "test")) == 1
    assert len(load(tmp_path, "test", split="train")) == 5


def test_one_file_of_any_name_is_the_training_split_and_no_other(tmp_path):
    jsonl(tmp_path, ROWS, "questions.jsonl")
    assert len(load(tmp_path)) == 5
    assert "no split 'test'; there are questions" in error_of(tmp_path, "test")


def test_svamp_s_story_and_question_belong_together(tmp_path):
    file = jsonl(tmp_path, [{"Body": "Ann has 3 nuts", "Question": "How many?", "Answer": 3.0}])
    row = load(file)[0]
    assert row["messages"][0]["content"] == "Ann has 3 nuts. How many?"
    assert row["answer"] == "3" and row["Answer"] == 3.0


def test_columns_can_be_named_and_the_suffix_stands_behind_the_question(tmp_path):
    file = jsonl(tmp_path, [{"q": "1 + 1?", "a": 2, "question": "other"}])
    row = load(file, prompt_column="q", answer_column="a", prompt_suffix="\nJust the number.")[0]
    assert row["messages"] == [{"role": "user", "content": "1 + 1?\nJust the number."}]
    assert row["answer"] == "2"


@pytest.mark.parametrize(("column", "words"), [("answer", "answer (empty"), ("gold", "gold (the answer, empty")])
def test_empty_answers_are_told_with_column_number_and_first_row(tmp_path, column, words):
    file = jsonl(tmp_path, [{"question": "x", column: answer} for answer in ("1", None, "3", " ")])
    (reading,) = load(file, answer_column=column).readings
    assert f"{words} in 2 of 4 rows, first {file}:2)" in reading.describe()


def test_a_mapped_column_is_read_before_others_and_refused_where_it_would_not_be(tmp_path):
    file = jsonl(tmp_path, [{"q": "1 + 1?", "gold": "2", "prompt": "other", "answer": "3"}])
    row = load(file, columns={"question": "q", "answer": "gold"})[0]
    assert (row["messages"][0]["content"], row["answer"]) == ("1 + 1?", "2")
    with pytest.raises(ConfigError, match=r"label=gold would change nothing: of .* rows only prompt, answer are read"):
        load(file, columns={"label": "gold"})
    with pytest.raises(ConfigError, match=r"did you mean columns\.answer=gold\? Leave it out: the column keeps .* 'gold'"):
        load(file, columns={"completion": "gold"}, answer_column="answer")
    with pytest.raises(ConfigError, match=r"columns\.question=q would change nothing"):
        load(file, columns={"question": "q"}, prompt_column="prompt")


def test_messages_are_taken_as_they_are_and_the_assistants_last_one_is_the_answer(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = load(jsonl(tmp_path, [{"messages": messages}]))[0]
    assert row["messages"] == messages[:2] and row["answer"] == "a"
    row = load(jsonl(tmp_path, [{"messages": messages, "answer": "b"}]), prompt_suffix=" Now.")[0]
    assert row["messages"] == [messages[0], {"role": "user", "content": "q Now."}]
    assert row["answer"] == "b"  # the column says it


def test_addition_has_16_held_out_pairs_that_are_never_trained_on():
    train, test = load("addition", size=3000), load("addition", "test")
    asked = {r["question"] for r in train}
    assert len(train) == 3000 and len(asked) == 65
    assert len(test) == len(HELD_OUT) == 16
    assert not asked & {r["question"] for r in test}
    assert len({r["answer"] for r in test}) >= 8
    assert train[0]["messages"][0]["content"].startswith("What is ") and len(PAIRS) == 81


def test_addition_follows_the_seed():
    questions = [[r["question"] for r in load_dataset(DatasetConfig("addition", size=50), seed=s)] for s in (0, 0, 1)]
    assert questions[0] == questions[1] != questions[2]


def test_reasoning_gym_has_separate_splits_and_keeps_what_its_scorer_needs():
    gym = pytest.importorskip("reasoning_gym", reason="the optional library is not installed")
    train, test = (load("reasoning_gym:chain_sum", split, size=40) for split in ("train", "test"))
    assert len(train) == len(test) == 40
    assert not {r["question"] for r in train} & {r["question"] for r in test}
    row = train[0]
    assert gym.get_score_answer_fn(row["metadata"]["source_dataset"])(row["answer"], row) == 1.0


def test_max_rows_keeps_the_first():
    assert [r["question"] for r in load(GSM8K, max_rows=3)] == [r["question"] for r in load(GSM8K)[:3]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["is empty"]),
        ([ROWS[0], '{"question": \n'], ["train.jsonl:2", "not valid JSON"]),
        ([ROWS[0], "[1]\n"], ["train.jsonl:2", "must be an object of columns, got list"]),
        ([{"text": "x", "label": 1}], ["train.jsonl:1", "text, label", "set prompt_column"]),
        ([ROWS[0], {"question": "x"}], ["train.jsonl:2", "column 'answer' is missing", "columns there: question"]),
        ([{"question": 5, "answer": "x"}], ["train.jsonl:1", "'question' must be text or a list of messages, got int 5"]),
        ([{"question": "", "answer": "x"}], ["train.jsonl:1", "got nothing"]),
        ([{"question": "x", "answer": ["y"]}], ["train.jsonl:1", "'answer' must be text or a number, got list"]),
        ([{"messages": [{"role": "robot", "content": "x"}]}], ["train.jsonl:1", "role of system, user"]),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], ["train.jsonl:1", "add the user's question"]),
        ([{"messages": [{"role": "user", "content": 5}]}], ["train.jsonl:1", "must be a list of {role, content}"]),
        (['{"question": "x", "answer": NaN}\n'], ["train.jsonl:1", "'answer' must be text or a number, got float nan"]),
        (['{"question": "x", "answer": -Infinity}\n'], ["train.jsonl:1", "must be text or a number"]),
        ([ROWS[0], '{"answer": ' + "9" * 5000 + "}\n"], ["train.jsonl:2", "mend or remove the line"]),
        ([ROWS[0], r'{"question": "\ud83d", "answer": "x"}' + "\n"], ["train.jsonl:2", r"half a character, '\ud83d'"]),
        (
            [ROWS[0], '{"question": "x", "answer": 1, "answer": "2"}\n'],
            ["train.jsonl:2", "'answer' comes twice", "1 and with '2'"],
        ),
        (
            ['{"messages": [{"role": "user", "role": "x", "content": ""}]}\n'],
            ["train.jsonl:1", "the key 'role' comes twice"],
        ),
    ],
)
def test_bad_rows_are_refused_with_file_and_line(tmp_path, rows, words):
    text = error_of(jsonl(tmp_path, rows))
    for word in words:
        assert word in text


def test_a_wished_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    text = error_of(jsonl(tmp_path, ROWS), prompt_column="questoin")
    assert "prompt_column=questoin" in text and "did you mean 'question'?" in text and "level" in text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("./nowhere", ["./nowhere does not exist"]),
        ("nowhere.jsonl", ["nowhere.jsonl does not exist"]),
        pytest.param(
            "reasoning_gym:chain_sun",
            ["did you mean 'chain_sum'?"],
            marks=pytest.mark.skipif(
                find_spec("reasoning_gym") is None, reason="optional library reasoning-gym is not installed"
            ),
        ),
    ],
)
def test_a_missing_data_set_says_where_it_was_looked_for(path, words):
    assert all(word in error_of(path) for word in words)


def test_an_empty_folder_a_strange_file_and_a_split_of_a_file_are_refused(tmp_path):
    assert "has no files ending in .jsonl" in error_of(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    assert "not a data file" in error_of(tmp_path / "a.txt")
    assert "leave split out" in error_of(jsonl(tmp_path, ROWS), split="train")
    (tmp_path / "b.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert "call it .jsonl" in error_of(tmp_path / "b.json")
    (tmp_path / "c.csv").write_text("question,answer\nx\n")
    assert "c.csv:2" in error_of(tmp_path / "c.csv")
    (tmp_path / "e.csv").write_text("question,answer,answer\nx,1,2\n")
    assert "e.csv:1: two columns are called 'answer'" in error_of(tmp_path / "e.csv")
    (tmp_path / "f.csv").write_text("question;answer\nx;1\n")
    assert "f.csv:1: the columns are separated by ';'" in error_of(tmp_path / "f.csv")
    (tmp_path / "h.csv").write_text("prompt,answer\n\"[{'content': 'x', 'role': 'user'}]\",1\n")
    assert "h.csv:2: column 'prompt' has a conversation as Python prints it" in error_of(tmp_path / "h.csv")
    (tmp_path / "d.csv").write_text("question,answer\n" + "x" * 200_000 + ",1\n")
    assert "d.csv, after line 1: not valid csv: field larger than field limit" in error_of(tmp_path / "d.csv")
    (tmp_path / "g.csv").write_text('question,answer\n1,"2\n3,4\n')
    assert "g.csv, after line 1: not valid csv: unexpected end of data" in error_of(tmp_path / "g.csv")
    (tmp_path / "e.json").write_text('[{"question": "\\ud83d", "answer": "x"}]')
    assert "e.json, row 1: holds half a character" in error_of(tmp_path / "e.json")
    (tmp_path / "f.json").write_text(f'[{{"question": {"9" * 5000}}}]')
    assert "f.json" in error_of(tmp_path / "f.json")
    (tmp_path / "i.json").write_text('[{"question": "x", "question": "y"}]')
    assert "i.json: the key 'question' comes twice in one object, with 'x' and with 'y'" in error_of(tmp_path / "i.json")


def test_characters_of_two_halves_are_fine(tmp_path):
    file = jsonl(tmp_path, [r'{"question": "\ud83d\ude00?", "answer": "é"}' + "\n"])
    assert load(file).rows[0]["question"] == "😀?"


def test_a_mixture_keeps_the_weights_repeats_nothing_and_names_source_and_reward(tmp_path):
    big, small = jsonl(tmp_path, ROWS * 20, "big.jsonl"), jsonl(tmp_path, ROWS * 2, "small.jsonl")
    sources = (SourceConfig(str(big), 3.0), SourceConfig(str(small), 1.0, "exact_number", "tiny"))
    mixed = load_dataset(DatasetConfig(sources=sources))
    assert len(mixed) == 40 and len(mixed.rows) == 110
    order = mixed.order(0, seed=1, shuffle=True)
    assert len(set(order)) == 40 and {i for i in order if i < 100} != set(range(30))  # any rows, not the first ones
    assert sum(mixed.rows[i]["tandem.source"] == "tiny" for i in order) == 10
    assert {(r["tandem.source"], r["tandem.reward"]) for r in mixed} == {("big", None), ("tiny", "exact_number")}
    seen = {i for epoch in range(4) for i in mixed.order(epoch, seed=1, shuffle=True)}
    assert len(seen) == 110  # a large source goes on where it stopped


def test_a_source_of_the_smallest_weight_has_a_row_in_every_epoch():
    mixed = Dataset([[{"n": n} for n in range(50)], [{"n": 50}, {"n": 51}]], [1.0, 0.001])
    assert [[i for i in mixed.order(epoch, seed=0, shuffle=False) if i >= 50] for epoch in range(3)] == [[50], [51], [50]]


def test_functions_have_separate_splits_and_tests_that_their_references_pass():
    train, test = (load("functions", split, size=400) for split in ("train", "test"))
    questions = [{row["question"] for row in rows} for rows in (train, test)]
    assert not questions[0] & questions[1] and len(questions[1]) == len(test) > 15
    for row in (*train[:40], *test):
        assert row["program_tests"]["names"] == ["f"] and len(row["program_tests"]["cases"]) == 5
        program = row["answer"].removeprefix("```python\n").removesuffix("```")
        exec("\n".join([program, *row["program_tests"]["cases"]]), {})


def test_rows_come_from_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def rows():\n    yield {'question': '1+1?', 'answer': '2'}\nlisted = list(rows())\nwrong = [1]\n"
        "def broken():\n    yield from listed\n    1 / 0\n"
    )
    made, listed = load(f"{file}:rows"), load(f"{file}:listed")
    assert [row["messages"][0]["content"] for row in made] == ["1+1?"] == [row["question"] for row in listed]
    assert "a row must be a dict of columns, got 1" in error_of(f"{file}:wrong")
    assert "ZeroDivisionError" in (said := error_of(f"{file}:broken")) and "mine.py:7 in broken" in said
    assert "did you mean 'rows'?" in error_of(f"{file}:row")
    assert "mine.py:listed, row 1" in error_of(f"{file}:listed", answer_column="gold")


def test_rows_that_take_long_to_compute_say_how_many_there_are(capsys):
    assert list(with_progress([{"a": 1}, {"a": 2}], "mine", every_s=0.0)) == [{"a": 1}, {"a": 2}]
    assert capsys.readouterr().err.splitlines() == ["mine: 1 rows …", "mine: 2 rows …"]
