"""Supervised fine-tuning: the loss stands on the answer, and it falls."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.api.failures import DataFailure
from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config
from tandem.config.preference import PreferenceConfig, RewardModelConfig
from tandem.models.tokenizer import load_tokenizer
from tandem.trainers import recipes
from tandem.trainers.recipes import ConversationEncoder, train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def items(model, tmp_path):
    return [
        f"run.root={tmp_path}",
        f"actor.path={model}",
        "actor.dtype=float32",
        "actor.optimizer.lr=0.01",
        "train_dataset.path=addition",
        "total_train_steps=12",
        "tracking.plot_every_steps=null",
        "batch_size=8",
        "threads=1",
    ]


def test_only_the_tokens_of_the_answer_are_trained_on(model):
    tokenizer = load_tokenizer(model)
    encoder = ConversationEncoder(tokenizer, SFTConfig())
    turns = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]
    (encoded,) = encoder.encode({"messages": turns, "train_from": 1})

    assert tokenizer.decode(encoded["input_ids"][encoded["loss_mask"]]) == "5<|im_end|>"
    assert tokenizer.decode(encoded["input_ids"][~encoded["loss_mask"]]).endswith("<|im_start|>assistant\n\n")


@pytest.mark.parametrize(("answer", "reason"), [("", "empty_completion"), ("7 " * 2000, "too_long")])
def test_a_row_that_cannot_be_trained_on_says_why(model, answer, reason):
    encoder = ConversationEncoder(load_tokenizer(model), SFTConfig())
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    with pytest.raises(DataFailure, match=reason):
        encoder.encode({"messages": turns, "train_from": 1})


def test_the_loss_falls_on_training_and_held_out_rows(items):
    summary = train(load_config(SFTConfig, None, [*items, "evaluate.every_steps=6", "valid_dataset.path=addition"]))
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]

    assert rows[-1]["loss"] < 0.8 * rows[1]["loss"]
    evaluated = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    assert list(evaluated) == [0, 6, 12]
    assert evaluated[12] < evaluated[6] < evaluated[0]
    assert (summary.checkpoint / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.invariant
def test_the_script_and_the_trainer_give_the_same_weights(items):
    config = ROOT / "examples/gsm8k_sft.yaml"
    more = [*items, "total_train_steps=3", "system_prompt=null", "deterministic=true"]
    more = list({item.partition("=")[0]: item for item in more}.values())
    summary = train(load_config(SFTConfig, config, [*more, "trial_name=trainer"]))
    command = [sys.executable, str(ROOT / "examples/gsm8k_sft.py"), *more, "trial_name=script"]
    subprocess.run(command, check=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"})

    ours = load_file(summary.checkpoint / "model.safetensors")
    scripts = load_file(summary.folder.parent / "script/checkpoints/step_3/model.safetensors")
    assert all(torch.equal(ours[name], scripts[name]) for name in ours)


def test_conversations_of_several_turns_are_learnt_whole(items, tmp_path):
    turns = [{"role": role, "content": text} for role, text in (("user", "2 + 2?"), ("assistant", "4"))]
    rows = [{"messages": turns + turns}, {"messages": turns[:1]}, {"messages": turns}]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = [*items, f"train_dataset.path={file}", "batch_size=2", "total_train_steps=2"]
    summary = train(load_config(SFTConfig, None, list({item.partition("=")[0]: item for item in more}.values())))
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["rows/dropped/no_answer"] >= 1
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_the_preference_and_reward_scripts_leave_what_their_trainers_leave(items):
    for name, kind, trainer in (("preference", PreferenceConfig, recipes), ("reward", RewardModelConfig, recipes)):
        config = ROOT / f"examples/addition_{name}.yaml"
        more = [*items, "total_train_steps=2", "train_dataset.path=addition_pairs", "deterministic=true"]
        more += ["evaluate.every_steps=1", "evaluate.max_rows=4", "valid_dataset.path=addition_pairs"]
        more = list({item.partition("=")[0]: item for item in more}.values())
        summary = trainer.train(load_config(kind, config, [*more, f"trial_name={name}-trainer"]))
        runpy.run_path(str(ROOT / f"examples/addition_{name}.py"))["main"]([*more, f"trial_name={name}-script"])
        script = summary.folder.parent / f"{name}-script"
        saved = script / "checkpoints/step_2"
        ours, scripts = (load_file(folder / "model.safetensors") for folder in (summary.checkpoint, saved))
        assert all(torch.equal(ours[key], scripts[key]) for key in ours)
        words = [(folder / "tokenizer_config.json").read_text() for folder in (summary.checkpoint, saved)]
        assert words[0] == words[1]  # a classifier's row ends with the token that it was trained to pad with
        assert evaluations(script) == evaluations(summary.folder) and len(evaluations(script)) == 3


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    """Step → figures of the validation rows."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: {name: row[name] for name in row if name.startswith("eval/")} for row in rows if "eval/loss" in row}
