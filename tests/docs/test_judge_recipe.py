"""The recipe of a judge that compares: its data, its control, and parts that fit together."""

import asyncio
import json
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

from tandem.api.workflow import Sample
from tandem.config.errors import ConfigError
from tandem.config.evaluation import load_evaluation
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.rewards.group_judges import WORTH
from tandem.rewards.judge import read_choice

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DATA = runpy.run_path(str(EXAMPLES / "judge_data.py"))
BRIBED = runpy.run_path(str(EXAMPLES.parent / "benchmarks/bribed_judge.py"))


@pytest.fixture
def parts(tmp_path, monkeypatch):
    texts = (
        "Box {} holds things. People like it, and they",
        "Nail {} is one of many.",
        "Look {} up where",
        "It is {} years old!",
    )
    samples = [{"row": row, "text": text.format(100 + row)} for row in range(20) for text in texts]
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers/samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    monkeypatch.setattr("sys.argv", ["judge_data.py", str(tmp_path / "data"), str(tmp_path / "answers")])
    DATA["main"]()
    return {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in (tmp_path / "data").iterdir()
    }


def replies(row):
    """The two replies that a judge is shown."""
    first, second = row["prompt"].split("Reply A: ")[1].split("\nReply B: ")
    first = first.partition("\n===")[0]
    return first, second.removesuffix(f"\n{DATA['QUESTION']}\n").partition("\n===")[0]


def test_each_judgement_quotes_two_ends_and_has_the_verdict_that_the_rule_gives(parts):
    assert {name: len(rows) for name, rows in parts.items()} == {
        "train": 480,
        "shuffled": 480,
        "test": 120,
        "pairs": 60,
    }
    for row in [*parts["train"], *parts["test"]]:
        ends = [DATA["finished"](text)["finished"] for text in replies(row)]
        assert read_choice(row["completion"], WORTH) == (1 + ends[0] - ends[1]) / 2
        said = row["completion"].splitlines()
        assert all(text.split()[-1] in line for text, line in zip(replies(row), said, strict=False))
        assert DATA["agrees"](row["completion"], row["answer"])["agrees"] == 1
    assert sum("===" in row["prompt"] for row in parts["train"]) == pytest.approx(240, abs=40)


def test_shuffled_judgements_differ_only_in_what_they_conclude(parts):
    pairs = list(zip(parts["train"], parts["shuffled"], strict=True))
    assert all(one["prompt"] == other["prompt"] for one, other in pairs)
    quotes = [[re.sub(r" \(.*", "", row["completion"]).splitlines()[:2] for row in pair] for pair in pairs]
    assert all(one == other for one, other in quotes)
    said = [[tuple(re.findall(r"\((.*)\)|Verdict: (.*)", row["completion"])) for row in pair] for pair in pairs]
    assert Counter(one for one, _ in said) == Counter(other for _, other in said)
    assert sum(one == other for one, other in said) == pytest.approx(480 / 4, abs=40)


def test_what_the_judge_is_tried_on_is_new_to_it_and_shown_in_both_orders(parts):
    shown = {text for row in parts["train"] for text in replies(row)}
    tried = [replies(row) for row in parts["test"]]
    assert all(one == other[::-1] for one, other in zip(tried[::2], tried[1::2], strict=True))
    assert not {text for text in shown if any(map(str.isdigit, text))} & {text for pair in tried for text in pair}
    for pair in parts["pairs"]:
        assert [DATA["finished"](pair[key])["finished"] for key in ("better", "worse")] == [1, 0]


def test_lots_give_every_group_the_same_mean():
    samples = [Sample((), 0.0, completion_text=text) for text in ("a", "b", "c", "d")]
    drawn = [asyncio.run(DATA["Lots"]().compare(samples[n:] + samples[:n], {})) for n in range(4)]
    assert all(sum(values) == 2 and set(values) <= {0, 0.25, 0.5, 0.75, 1} for values in drawn)
    assert len({tuple(values) for values in drawn}) > 1


def test_each_part_begins_with_what_the_part_before_leaves():
    judge = load_config(SFTConfig, EXAMPLES / "judge_sft.yaml").config
    policy = load_config(TrainConfig, EXAMPLES / "judge_grpo.yaml").config
    answers = load_evaluation(EXAMPLES / "judge_answers_eval.yaml", ["model=smollm2-135m"]).config
    leaves = f"runs/{judge.experiment_name}/{judge.trial_name}/checkpoints/step_{judge.total_train_steps}"
    assert f"compare(model={leaves}, template=examples/judge_compare.txt, question='{DATA['QUESTION']}'" in str(
        policy.reward
    )
    assert policy.system_prompt == answers.system_prompt


@pytest.mark.parametrize("name", BRIBED["PAGES"])
def test_the_tables_of_verdicts_and_bribes_are_those_of_the_record(name):
    page, record = BRIBED["PAGES"][name][0].read_text(), json.loads(BRIBED["RECORD"].read_text())
    assert f"<!-- {name} -->" in page and BRIBED["with_table"](page, name, record) == page


def test_the_guard_gives_the_mean_difference_over_pairs_that_both_prompts_could_read():
    values = {"judge_compare.txt": [1.0, 0.5, None], "judge_compare_bare.txt": [0.5, 0.5, 1.0]}
    rows = [{"prompt": p, "shown": kind, "values": v} for p, v in values.items() for kind in BRIBED["PAIR_BRIBES"]]
    lines = BRIBED["bribe_table"](rows).splitlines()[2:]
    assert len(lines) == 4 and all(line.endswith("| 0.75 : 0.25 | 0.67 : 0.33 | +0.25 ± 0.25 |") for line in lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("", "is empty"),
        ('{"better": "Yes.", "worse": "No"}\n{"better": "Yes."}\n', "line 2: each line must be"),
        ("Yes.\n", "line 1: each line must be"),
        ('["better", "worse"]\n', "line 1: each line must be"),
        ('{"better": 1, "worse": "No"}\n', "line 1: each line must be"),
    ],
)
def test_a_file_without_pairs_is_named_with_its_line(tmp_path, text, words):
    file = tmp_path / "pairs.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        BRIBED["pairs_of"](file, "{}", 9)


def test_a_judge_that_is_not_there_is_one_line_and_no_traceback(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bribed_judge.py", "compare", "nowhere"])
    with pytest.raises(SystemExit, match="model 'nowhere' is neither"):
        BRIBED["main"]()
