"""The summaries recipe: its data, its true preference, and parts that fit together."""

import json
import runpy
from pathlib import Path

import pytest

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import RewardModelConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DATA = runpy.run_path(str(EXAMPLES / "tldr_data.py"))


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tldr_data.py", str(tmp_path)])
    DATA["main"]()
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in tmp_path.iterdir()}


def test_no_thing_is_in_both_parts_and_each_post_says_its_fact_in_one_sentence_and_not_in_its_title(parts):
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 360, "test": 96}
    assert not {row["thing"] for row in parts["train"]} & {row["thing"] for row in parts["test"]}
    for row in (row for rows in parts.values() for row in rows):
        title, post = row["question"].split("TITLE: ")[1].split("POST: ")
        assert sum(row["thing"] in sentence and row["fact"] in sentence for sentence in post.split(". ")) == 1
        assert row["fact"] not in title


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


def test_the_policy_is_rewarded_by_what_the_reward_model_leaves_and_the_true_preference_has_weight_0():
    first = load_config(RewardModelConfig, EXAMPLES / "tldr_reward.yaml").config
    second = load_config(TrainConfig, EXAMPLES / "tldr_grpo.yaml").config
    leaves = f"runs/{first.experiment_name}/{first.trial_name}/checkpoints/step_{first.total_train_steps}"
    assert str(second.reward).startswith(f"model(path={leaves}) + 0*")
    assert first.system_prompt == second.system_prompt
