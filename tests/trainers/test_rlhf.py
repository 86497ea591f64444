"""RLHF on a laptop: the parts of its recipe fit each other, and its script leaves what the command leaves."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.errors import ConfigError
from tandem.config.evaluation import load_evaluation
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import RewardModelConfig
from tandem.trainers import loop, recipes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DATA = runpy.run_path(str(EXAMPLES / "rlhf_data.py"))
SCRIPT = runpy.run_path(str(EXAMPLES / "rlhf.py"))
GOOD, BAD = "A {} is a thing that people keep.", "I like it. It is good"


@pytest.fixture
def recipe(tmp_path, monkeypatch, capsys):
    """The folder after `questions` and `pairs`: forty questions were answered well twice and badly twice."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["rlhf_data.py", *map(str, words)])
        DATA["main"]()

    run("questions", tmp_path)
    rows = DATA["read"](tmp_path / "train.jsonl")[:40]
    answers = [
        (i, text.format(row["thing"]) + end) for i, row in enumerate(rows) for text in (GOOD, BAD) for end in ("", " ")
    ]
    fits = DATA["preferred"]
    lines = [json.dumps({"row": i, "text": text} | fits(text, rows[i]["thing"])) + "\n" for i, text in answers]
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers/samples.jsonl").write_text("".join(lines))
    run("pairs", tmp_path, tmp_path / "answers")
    return tmp_path


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ("A saw is a tool that cuts wood.", 1.0),
        (" It is a saw that cuts very hard wood!\n", 1.0),
        ("A saw cuts.", 0.0),
        ("A hammer is a tool that drives nails.", 0.0),
        ("A saw is a tool that cuts wood", 0.0),
        ("A saw is a tool. It cuts hard wood.", 0.0),
        ("A saw is a tool\nthat cuts hard wood.", 0.0),
        ("A saw " + "is " * 20 + "good.", 0.0),
    ],
)
def test_the_true_preference_is_one_whole_sentence_that_names_the_thing(answer, fits):
    assert DATA["preferred"](answer, "saw") == {"preferred": fits, "accuracy": fits}


def test_no_thing_is_asked_about_in_training_and_in_the_test(recipe):
    things = {split: {row["thing"] for row in DATA["read"](recipe / f"{split}.jsonl")} for split in ("train", "test")}
    assert len(things["train"]) == DATA["TRAINING_THINGS"] and things["test"]
    assert not things["train"] & things["test"]


def test_the_judge_of_the_pairs_errs_in_one_of_ten_and_the_control_tosses_a_coin(recipe):
    shares = {}
    for name in ("pairs", "shuffled"):
        pairs = [row for split in ("train", "test") for row in DATA["read"](recipe / name / f"{split}.jsonl")]
        assert len(pairs) == 40 * DATA["PAIRS_OF_A_QUESTION"]
        shares[name] = sum(pair["chosen"].startswith("A") for pair in pairs) / len(pairs)
    assert 0.8 < shares["pairs"] < 0.98 and 0.35 < shares["shuffled"] < 0.65


def test_some_demonstrations_are_liked_and_none_is_about_a_thing_of_the_test(recipe):
    chats, rows = DATA["read"](recipe / "sft.jsonl"), DATA["read"](recipe / "train.jsonl")[-DATA["DEMONSTRATIONS"] :]
    said = [[turn["content"] for turn in chat["messages"]] for chat in chats]
    assert [question for question, _ in said] == [row["question"] for row in rows]
    liked = [DATA["preferred"](answer, row["thing"])["accuracy"] for (_, answer), row in zip(said, rows, strict=True)]
    assert 0.25 < sum(liked) / len(liked) < 0.5


def test_all_parts_ask_alike_and_each_begins_with_what_the_one_before_leaves():
    shown = load_config(SFTConfig, EXAMPLES / "rlhf_sft.yaml").config
    asked = load_evaluation(EXAMPLES / "rlhf_eval.yaml", ["model=smollm2-135m"]).config
    judge = load_config(RewardModelConfig, EXAMPLES / "rlhf_reward.yaml").config
    policy = load_config(TrainConfig, EXAMPLES / "rlhf_ppo.yaml").config
    taught = f"runs/{shown.experiment_name}/{shown.trial_name}/checkpoints/step_{shown.total_train_steps}"
    assert taught == judge.actor.path == policy.actor.path
    folder = f"runs/{judge.experiment_name}/{judge.trial_name}/checkpoints/step_{judge.total_train_steps}"
    assert f"model(path={folder})" in policy.reward and policy.critic.path == folder
    assert asked.system_prompt == shown.system_prompt == judge.system_prompt == policy.system_prompt
    assert asked.reward == policy.reward.rpartition("0*")[2]


@pytest.mark.slow
@pytest.mark.invariant
def test_script_and_command_give_equal_weights_and_the_true_preference_changes_none(recipe, overrides):
    tiny = {item.partition("=")[0]: item for item in [*overrides, "deterministic=true", "checkpoint.every_steps=null"]}
    shared = (
        "run.root",
        "actor.path",
        "actor.optimizer.lr",
        "actor.dtype",
        "threads",
        "deterministic",
        "checkpoint.every_steps",
    )
    items = [tiny[key] for key in shared]
    keys = [f"train_dataset.path={recipe / 'pairs'}", "total_train_steps=2", "batch_size=4", "evaluate.max_rows=4"]
    judge = recipes.train(load_config(RewardModelConfig, EXAMPLES / "rlhf_reward.yaml", [*items, *keys])).checkpoint
    more = [item for key, item in tiny.items() if key not in {"reward", "train_dataset.path", "valid_dataset.path", *shared}]
    more += [*items, f"train_dataset.path={recipe}", f"critic.path={judge}", "evaluate.max_rows=2"]
    more = list({item.partition("=")[0]: item for item in [*more, "evaluate.every_steps=3", "total_train_steps=2"]}.values())
    scored = f"reward=model(path={judge})"
    measured = f"{scored} + 0*{EXAMPLES / 'rlhf_data.py'}:preferred"

    trainer = loop.train(load_config(TrainConfig, EXAMPLES / "rlhf_ppo.yaml", [*more, measured, "trial_name=trainer"]))
    alone = loop.train(load_config(TrainConfig, EXAMPLES / "rlhf_ppo.yaml", [*more, scored, "trial_name=alone"]))
    SCRIPT["main"]([*more, measured, "trial_name=script"])
    saved = trainer.folder.parent / "script/checkpoints/step_2"
    ours, without, scripts = (
        load_file(path / "model.safetensors") for path in (trainer.checkpoint, alone.checkpoint, saved)
    )
    assert all(torch.equal(ours[key], scripts[key]) and torch.equal(ours[key], without[key]) for key in ours)
    last = json.loads((trainer.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["rewards/preferred"] == 0 and last["eval/accuracy"] == 0 and last["kl/reference"] >= 0


def test_the_script_refuses_to_run_without_the_reference_that_its_loop_asks():
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.coefficient must be above 0"):
        SCRIPT["main"](["algorithm.kl.coefficient=0"])
