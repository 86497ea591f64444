"""Whole runs of `workflow=tools`: trained as sampled, resumed to the bit, and asynchronous over weight updates."""

import json
from pathlib import Path

import pytest

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.loop import train
from tests.trainers.calling import calling_model_folder
from tests.trainers.test_resume import SAVED_EACH_STEP, Runs, assert_same, ledger, metrics, plain
from tests.trainers.witness import assert_trained_as_sampled, witnessed_batch

TOOLS = Path(__file__).parent / "calling.py"
OTHERS = [f"gconfig.stop_token_ids={list(range(3, 300, 8))}", "gconfig.max_new_tokens=24", "rollout.batch_size=2"]


@pytest.fixture(scope="module")
def calling_model(tmp_path_factory):
    return calling_model_folder(tmp_path_factory.mktemp("calling"))


@pytest.fixture
def tools(overrides, calling_model):
    mine = [
        *overrides,
        *OTHERS,
        f"actor.path={calling_model}",
        "workflow=tools",
        f"workflow_args.tools=[{TOOLS}:double,{TOOLS}:halve]",
        "workflow_args.max_turns=3",
    ]
    return list({item.partition("=")[0]: item for item in mine}.values())


def tarrying(root):
    """Tools of which one waits for the next step."""
    return f"workflow_args.tools=[{TOOLS}:double,'{TOOLS}:Tarry(root={root})']"


def test_what_is_trained_is_what_the_engine_saw_and_made(tools, calling_model):
    pieces, workflow, told = witnessed_batch(tools)
    assert_trained_as_sampled(pieces, workflow, calling_model)
    assert len(workflow.log) > 8 and told["turns"] > 1.2  # some of the 8 samples went on after a call
    assert told["tools/calls"] > told["tools/wrong_arguments"] > 0


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_whose_tools_dawdle_is_the_same_to_the_bit_again_and_after_kills(zygote, tools, tmp_path):
    runs = Runs(zygote, tmp_path, "rl", [*tools, *SAVED_EACH_STEP])
    for trial in ("whole", "again"):
        runs.go(trial)
    runs.go("killed", "after the optimizer step", 2)
    runs.go("killed", "between prepared and committed weights", 2)
    runs.go("killed")
    whole = runs.folder("whole")
    for other in ("again", "killed"):
        assert_same(whole, runs.folder(other), 3)
        assert ledger(whole) == ledger(runs.folder(other))
    rows = metrics(whole)
    assert len(rows) == 3 and all(row["tools/calls"] > 0 and row["turns"] > 1 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["embedded", "tandem:d1"])
def test_chats_with_slow_tools_go_on_over_weight_updates(tools, tmp_path, backend):
    more = [f"rollout.backend={backend}", "async_training=true", "total_train_steps=5", "rollout.verify.every_steps=1"]
    more += ["rollout.max_head_offpolicyness=2", tarrying(tmp_path)]
    more += ["tracking.trajectories_per_step=1000"]
    folder = train(load_config(TrainConfig, None, list({i.partition("=")[0]: i for i in [*tools, *more]}.values()))).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(row["staleness/max"] for row in rows) >= 1
    assert all(row["gap/verified"] > 0 and row["gap/numeric"] <= 1e-4 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows) and sum(row["tools/calls"] for row in rows) > 5
    lines = [line for file in sorted((folder / "trajectories").iterdir()) for line in file.read_text().split("\n") if line]
    numbers = [{part["version"] for parts in json.loads(line)["versions"] for part in parts} for line in lines]
    assert any(len(of_sample) > 1 for of_sample in numbers)  # begun under one version, ended under another


@pytest.mark.slow
@pytest.mark.invariant
def test_chats_under_way_when_a_run_is_killed_begin_anew_and_are_counted(zygote, tools, tmp_path):
    slow = ["async_training=true", "rollout.max_head_offpolicyness=2", tarrying(tmp_path)]
    runs = Runs(zygote, tmp_path, "rl", [*tools, *slow, "checkpoint.every_steps=1", "total_train_steps=4"])
    runs.go("killed", "after the optimizer step", 3)
    under_way = plain(runs.folder("killed"), 2)["rollout"]["pool"]["again"]
    runs.go("killed")

    rows, found = metrics(runs.folder("killed")), ledger(runs.folder("killed"))
    assert under_way and [row.get("episodes/begun_again", 0) for row in rows] == [0, 0, len(under_way), len(under_way)]
    assert f"{len(under_way)} episodes that were under way" in (runs.folder("killed") / "log.txt").read_text()
    ended = [(epoch, place) for epoch, place, *_ in found]
    assert len(ended) == len(set(ended)) and all(trained or reason for _, _, trained, reason, _ in found)
