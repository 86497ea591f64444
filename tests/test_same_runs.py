"""The script that says whether a change left results the same to the bit: `scripts/same_runs.py`."""

import copy
import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts/same_runs.py"
SAME_RUNS = runpy.run_path(str(SCRIPT))
RUN = "reward/steps"


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), *map(str, arguments), "--only", RUN]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The record of one real run."""
    path = tmp_path_factory.mktemp("records") / "before.json"
    recorded = call("record", path)
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    return path


@pytest.fixture
def outcomes(file):
    """The same run twice, each to be changed by a test."""
    data = json.loads(file.read_text())["runs"][RUN]
    return tuple(SAME_RUNS["Outcome"](**copy.deepcopy(data)) for _ in range(2))


@pytest.mark.slow
def test_a_run_made_again_is_the_same_and_a_changed_record_is_not(file, tmp_path):
    again = call("compare", file)
    assert again.returncode == 0 and "1 of 1 runs are the same" in again.stdout, again.stdout + again.stderr

    record = json.loads(file.read_text())
    row = record["runs"][RUN]["metrics"]["2"]
    row["loss"] = math.nextafter(row["loss"], 1.0)
    (tmp_path / "other.json").write_text(json.dumps(record))
    other = call("compare", tmp_path / "other.json")
    assert other.returncode == 1 and "0 of 1 runs are the same" in other.stdout
    assert "DIFFERENT  step 2 loss: " in other.stdout and "; in all 1 metrics, 0 tensors" in other.stdout


@pytest.mark.slow
def test_a_record_has_every_metric_that_measures_no_machine_and_every_tensor(outcomes):
    metrics, tensors = outcomes[0].metrics, outcomes[0].tensors
    assert list(metrics) == ["1", "2", "3"]
    assert {"loss", "grad_norm", "lr", "accuracy"} <= set(metrics["3"])
    assert not [name for name in metrics["3"] if "time" in name or "per_s" in name or "memory" in name]
    assert "model.safetensors:model.embed_tokens.weight" in tensors and "model.safetensors:score.weight" in tensors


@pytest.mark.slow
def test_what_differs_first_is_named_with_its_step_and_what_came_or_went_is_apart(outcomes):
    before, after = outcomes
    for step in "123":
        del before.metrics[step]["lr"], after.metrics[step]["accuracy"]
    after.metrics["3"]["loss"] += 0.5
    after.metrics["2"]["grad_norm"] += 0.25
    difference = SAME_RUNS["compare"](before, after)

    assert [text.split(":")[0] for text in difference.changed] == ["step 2 grad_norm", "step 3 loss"]
    assert difference.changed[0].endswith(", by 0.25")
    assert (difference.removed, difference.added) == (["accuracy"], ["lr"])
    assert "in all 2 metrics (grad_norm, loss), 0 tensors" in SAME_RUNS["verdict"](difference)


@pytest.mark.slow
def test_an_added_metric_makes_no_run_different_and_a_removed_one_does(outcomes):
    before, after = outcomes
    after.metrics["1"]["new"] = 1.0
    assert SAME_RUNS["verdict"](SAME_RUNS["compare"](before, after)) == "same"
    assert SAME_RUNS["verdict"](SAME_RUNS["compare"](after, before)).startswith("DIFFERENT  no metric new any more")


@pytest.mark.slow
def test_a_run_that_fails_now_is_different_and_says_how(outcomes):
    broken = SAME_RUNS["Outcome"](outcomes[0].command, 0.1, error="exit code 1: error: no such key")
    difference = SAME_RUNS["compare"](outcomes[0], broken)
    assert difference.changed == ["before: it ran; now: exit code 1: error: no such key"]
    assert not SAME_RUNS["compare"](broken, broken).changed


def test_a_tensor_that_moved_is_named_with_about_the_distance_that_it_moved():
    tensor = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    step = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    step *= 0.01 / step.norm()
    outcome, describe = SAME_RUNS["Outcome"], SAME_RUNS["describe"]
    before, after = (outcome([], 0.0, tensors={"w": describe(t)}) for t in (tensor, tensor + step))
    (said,) = SAME_RUNS["compare"](before, after).changed
    assert said.startswith("tensor w: moved by about ")
    assert 0.003 < float(said.split()[5].rstrip(",")) < 0.03
    assert not SAME_RUNS["compare"](before, before).changed
    assert describe(tensor)["digest"] != describe(tensor.view(8, 64))["digest"]


def test_a_run_is_chosen_by_its_name_what_is_below_it_or_a_pattern():
    chosen, names = SAME_RUNS["chosen"], ["preset/ppo", "ppo/critic", "ppo/shared", "sft", "sft/lora"]
    assert chosen(names, []) == names
    assert chosen(names, ["sft"]) == ["sft", "sft/lora"]
    assert chosen(names, ["ppo/*"]) == ["ppo/critic", "ppo/shared"]
    assert chosen(names, ["preset/ppo"]) == ["preset/ppo"]
