"""The kernels that a run began with, and a machine that has others."""

import json
from dataclasses import replace

import pytest

from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.flow.process import Process, keep_kernels
from tandem.state.run_folder import RunFolder


@pytest.mark.parametrize(
    ("before", "now", "remedy"), [("torch", "compiled", "TANDEM_KERNELS=0"), ("compiled", "torch", "install g")]
)
def test_a_run_goes_on_with_the_kernels_it_began_with(tmp_path, monkeypatch, caplog, before, now, remedy):
    process = Process("cpu", threads=1)
    config = load_config(TrainConfig, None, ["train_dataset.path=addition", "rollout.backend=embedded"]).config
    monkeypatch.setattr("tandem.flow.process.kernels_here", lambda *_: found)
    found = before
    with RunFolder.open(tmp_path, "one", "run", config_text="") as folder:
        keep_kernels(config, process, folder)
        keep_kernels(replace(config, deterministic=True), process, folder)
        found = now
        with caplog.at_level("WARNING"):
            keep_kernels(config, process, folder)
        assert remedy in caplog.text and json.loads((folder.path / "run.json").read_text())["kernels"] == before
        with pytest.raises(ConfigError, match=remedy):
            keep_kernels(replace(config, deterministic=True), process, folder)


def test_a_run_of_sft_goes_on_with_the_kernels_that_it_trained_with(tmp_path, monkeypatch):
    config = load_config(SFTConfig, None, ["train_dataset.path=addition", "deterministic=true"]).config
    monkeypatch.setattr("tandem.flow.process.training_kernels_here", lambda *_: found)
    with RunFolder.open(tmp_path, "one", "run", config_text="") as folder:
        found = "compiled"
        keep_kernels(config, Process("cpu", threads=1), folder)
        keep_kernels(config, Process("cpu", threads=1), folder)
        found = "torch"
        with pytest.raises(ConfigError, match=r"has trained with the compiled kernels so far.*install g"):
            keep_kernels(config, Process("cpu", threads=1), folder)


def test_a_run_that_began_before_float32_had_kernels_is_told_of_the_change(tmp_path, monkeypatch):
    config = load_config(TrainConfig, None, ["train_dataset.path=addition", "deterministic=true"]).config
    monkeypatch.setattr("tandem.flow.process.kernels_here", lambda *_: "compiled")
    monkeypatch.setattr("tandem.flow.process.training_kernels_here", lambda *_: None)
    with RunFolder.open(tmp_path, "one", "run", config_text="") as folder:
        (folder.checkpoints / "step_1").mkdir(parents=True)
        folder.info["resumed"] = [{"was": "interrupted"}]
        with pytest.raises(ConfigError, match=r"has generated with torch's operators so far.*set TANDEM_KERNELS=0"):
            keep_kernels(config, Process("cpu", threads=1), folder)
