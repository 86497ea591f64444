"""The summaries recipe: its data, its true preference, and parts that fit together."""

import json
import runpy
from pathlib import Path

import pytest

from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import RewardModelConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DATA = runpy.run_path(str(EXAMPLES / "tldr_data.py"))


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tldr_data.py", str(tmp_path)])
    DATA["main"]()
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in tmp_path.iterdir()}


def test_no_thing_is_in_both_parts_and_each_post_says_its_fact_once_not_in_its_title(parts):
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 360, "test": 96, "sft": 64}
    assert not {row["thing"] for row in parts["train"]} & {row["thing"] for row in parts["test"]}
    for row in [*parts["train"], *parts["test"]]:
        title, post = row["question"].split("TITLE: ")[1].split("POST: ")
        assert sum(row["thing"] in sentence and row["fact"] in sentence for sentence in post.split(". ")) == 1
        assert row["fact"] not in title


def test_a_summary_to_be_imitated_is_liked_and_belongs_to_a_training_post(parts):
    asked = {row["question"]: row for row in parts["train"]}
    for question, summary in ([message["content"] for message in row["messages"]] for row in parts["sft"]):
        assert DATA["kept"](summary, asked[question]["thing"], asked[question]["fact"])["kept"] == 1


@pytest.mark.parametrize(
    ("summary", "liked"),
    [
        ("The piano is rusty.", 1.0),
        (" My new piano began to RUST after a week.\n", 1.0),
        ("The piano is old.", 0.0),
        ("It is all rusty.", 0.0),
        ("Piano:\nrusty", 0.0),
        ("My piano is rusty " + "and I do not know " * 3, 0.0),
        ("", 0.0),
    ],
)
def test_a_summary_is_liked_if_it_is_short_and_keeps_the_fact(summary, liked):
    assert DATA["kept"](summary, "piano", "rust") == {"kept": liked, "accuracy": liked}


def test_each_part_begins_with_what_the_part_before_leaves():
    shown = load_config(SFTConfig, EXAMPLES / "tldr_sft.yaml").config
    first = load_config(RewardModelConfig, EXAMPLES / "tldr_reward.yaml").config
    second = load_config(TrainConfig, EXAMPLES / "tldr_grpo.yaml").config
    leaves = f"runs/{first.experiment_name}/{first.trial_name}/checkpoints/step_{first.total_train_steps}"
    assert str(second.reward).startswith(f"model(path={leaves}) + 0*")
    assert shown.system_prompt == first.system_prompt == second.system_prompt
    start = f"runs/{shown.experiment_name}/{shown.trial_name}/checkpoints/step_{shown.total_train_steps}"
    assert first.actor.path == second.actor.path == start
