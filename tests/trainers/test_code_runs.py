"""Runs that are rewarded for code: on a tiny model, and what is left of one that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.data.dataset import load_dataset
from tandem.sandbox.choose import choose_sandbox
from tandem.trainers.rl import train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def sandbox_works():
    try:
        choose_sandbox().close()
    except ConfigError as error:
        pytest.skip(f"no sandbox works on this machine: {error}")


@pytest.fixture
def code(overrides):
    changed = ("train_dataset.path", "valid_dataset.path", "reward")
    others = [item for item in overrides if not item.startswith(changed)]
    return [*others, "train_dataset.path=functions", "valid_dataset.path=functions", "reward=code(seconds=5)"]


def test_a_run_is_rewarded_for_code_and_counts_why_answers_fail(code):
    summary = train(load_config(TrainConfig, None, [*code, "total_train_steps=2"]))
    text = (summary.folder / "metrics.jsonl").read_text()
    assert '"code/passed_cases": 0.0' in text and '"samples/failed' not in text


@pytest.mark.slow
@pytest.mark.invariant
def test_no_sandbox_outlives_a_run_that_is_killed(code, tmp_path):
    keys = [item for item in code if not item.startswith("total_train_steps")]
    command = [sys.executable, "-m", "tandem", "train", *keys, "total_train_steps=50"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    )
    try:
        deadline = time.monotonic() + 90
        below = []
        while not any("tandem.sandbox" in " ".join(one) or "bwrap" in " ".join(one) for one in below):
            assert process.poll() is None and time.monotonic() < deadline, "no sandbox was begun"
            time.sleep(0.2)
            children = psutil.Process(process.pid).children(recursive=True)
            below = [_command(child) for child in children]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_the_control_gives_each_question_the_tests_of_another():
    real, control = (load_dataset(DatasetConfig(path=name, size=60)).rows for name in ("functions", "functions_shuffled"))
    assert [row["messages"] for row in control] == [row["messages"] for row in real]
    assert sum(one["program_tests"] != row["program_tests"] for one, row in zip(control, real, strict=True)) > 50
    tests = [sorted(str(row["program_tests"]) for row in rows) for rows in (real, control)]
    assert tests[0] == tests[1]
