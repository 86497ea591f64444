"""The recipe of a judge that compares: its data, its control, and parts that fit together."""

import asyncio
import json
import runpy
from pathlib import Path

import pytest

from tandem.api.samples import Sample
from tandem.config.evaluation import load_evaluation
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.rewards.compare import WORTH
from tandem.rewards.verdicts import read_choice

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DATA = runpy.run_path(str(EXAMPLES / "judge_data.py"))


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
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 480, "test": 120, "pairs": 60}
    for row in [*parts["train"], *parts["test"]]:
        ends = [DATA["finished"](text)["finished"] for text in replies(row)]
        assert read_choice(row["completion"], WORTH) == (1 + ends[0] - ends[1]) / 2
        said = row["completion"].splitlines()
        assert all(text.split()[-1] in line for text, line in zip(replies(row), said, strict=False))
        assert DATA["agrees"](row["completion"], row["answer"])["agrees"] == 1
    assert sum("===" in row["prompt"] for row in parts["train"]) == pytest.approx(240, abs=40)


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
