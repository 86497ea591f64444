"""Supervised fine-tuning: the loss stands on the answer, and it falls."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.api.failures import DataFailure
from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config
from tandem.models.tokenizer import load_tokenizer
from tandem.trainers.sft import Encoder, train

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
        "batch_size=8",
        "threads=1",
    ]


def test_only_the_tokens_of_the_answer_are_trained_on(model):
    tokenizer = load_tokenizer(model)
    encoder = Encoder(tokenizer, SFTConfig())
    row = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}
    encoded = encoder.encode(row)

    assert tokenizer.decode(encoded["input_ids"][encoded["loss_mask"]]) == "5<|im_end|>\n"
    assert tokenizer.decode(encoded["input_ids"][~encoded["loss_mask"]]).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(("answer", "reason"), [(None, "no_answer"), ("7 " * 2000, "too_long")])
def test_a_row_that_cannot_be_trained_on_says_why(model, answer, reason):
    encoder = Encoder(load_tokenizer(model), SFTConfig())
    with pytest.raises(DataFailure, match=reason):
        encoder.encode({"messages": [{"role": "user", "content": "?"}], "answer": answer, "index": 3})


def test_the_loss_falls_on_training_and_held_out_rows(items):
    summary = train(load_config(SFTConfig, None, [*items, "evaluate.every_steps=6", "valid_dataset.path=addition"]))
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]

    evaluated = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    assert rows[-1]["loss"] < 0.8 * rows[1]["loss"]
    assert list(evaluated) == [0, 6, 12]
    assert evaluated[12] < evaluated[6] < evaluated[0]
    assert (summary.checkpoint / "tokenizer.json").exists()


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
