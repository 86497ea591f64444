"""docs/records.md: its run can be made, its commands and snippets work on it, and what they print looks as the page says."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from tandem.cli.main import main
from tests.tiny import tiny_model_folder

PAGE = (Path(__file__).resolve().parents[2] / "docs/records.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def kinds(text):
    """The beginnings of the lines, without what another machine may compute otherwise."""
    heads = re.findall(r"^(?:== step|-- \w+|token +advantages.*|\(\d+ tokens of context\)|\d+ of \d+ samples)", text, re.M)
    return {re.sub(r"\d+", "N", head) for head in heads}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    model = tiny_model_folder(folder, kind="llama")
    (folder / "my_reward.py").write_text(blocks("py")[0])
    keys = "experiment_name=addition trial_name=grpo actor.optimizer.lr=0.01 actor.dtype=float32 rollout.dtype=float32"
    keys += " rollout.batch_size=4 rollout.engine.kv_cache_gib=0.05 gconfig.n_samples=4 gconfig.max_new_tokens=8 threads=1"
    keys += " train_dataset.path=addition valid_dataset.path=addition evaluate.every_steps=null total_train_steps=12"
    keys += " tracking.plot_every_steps=null algorithm.filter=dynamic_sampling deterministic=true actor.mini_batches=2"
    keys += f" algorithm.kl.coefficient=0.05 run.root={folder}/runs actor.path={model} reward={folder}/my_reward.py:tidy"
    try:
        assert main(["train", *keys.split(), "--json"]) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    return folder


@pytest.mark.parametrize("number", [0, 1])
def test_the_commands_print_what_the_page_shows(folder, monkeypatch, capsys, number):
    monkeypatch.chdir(folder)
    (command,) = blocks("bash")[number].splitlines()
    assert main(shlex.split(command)[1:]) == 0
    said = capsys.readouterr().out
    assert kinds(said) >= kinds(blocks("text")[number]) - {"-- a"}  # whether a sample of this group failed is chance
    assert "tidy: ValueError: an answer with digits cannot be judged (my_reward.py:3 in tidy: raise" in PAGE


def test_the_snippet_runs(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "snippet.py").write_text(blocks("py")[1])
    names = runpy.run_path(str(folder / "snippet.py"))
    assert names["best"].rewards.keys() == {"short", "letters"} and names["reasons"]
    assert "trained tokens of" in capsys.readouterr().out
