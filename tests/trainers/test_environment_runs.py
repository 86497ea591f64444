"""Whole runs with an environment: repeated to the bit, also after a kill; failures are counted, and nothing is left."""

import json
from pathlib import Path

import psutil
import pytest

from tandem.cli.main import main
from tandem.config.recipes import Change
from tandem.state.control import FOLDER, ask
from tests.trainers.test_resume import SAVED_EACH_STEP, Runs, assert_same, ledger, metrics

WORLDS = Path(__file__).parent / "dawdling_world.py"


def items(overrides, world, *more):
    fresh = [
        *(item for item in overrides if not item.startswith("reward=")),
        "train_dataset.path=seeds",
        "train_dataset.size=40",
        "valid_dataset.path=null",
        "workflow=environment",
        f"environment={WORLDS}:{world}",
        "algorithm.advantage=reinforce",
        "algorithm.whitening=group",
        "gconfig.n_samples=3",
        "rollout.batch_size=3",
        "gconfig.stop_token_ids=[3,5,7,9,11,13,17,19,23,29,31,37,41,43,47]",
        *more,
    ]
    return list({item.partition("=")[0]: item for item in fresh}.values())


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_of_slow_environments_is_the_same_to_the_bit_again_and_after_kills(zygote, overrides, tmp_path):
    runs = Runs(zygote, tmp_path, "rl", items(overrides, "Dawdles", *SAVED_EACH_STEP, "workflow_args.turn_discount=0.9"))
    for trial in ("whole", "again"):
        runs.go(trial)
    runs.go("killed", "after the optimizer step", 2)
    runs.go("killed", "between prepared and committed weights", 2)
    runs.go("killed")
    whole = runs.folder("whole")
    for other in ("again", "killed"):
        assert_same(whole, runs.folder(other), 3)
        assert ledger(whole) == ledger(runs.folder(other))
    turns = [row["turns"] for row in metrics(whole)]
    assert len(turns) == 3 and 1 < sum(turns) / 3 < 3


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("more", [[], ["async_training=true"]], ids=["in turns", "asynchronous"])
def test_what_environments_do_wrong_is_counted_and_the_run_goes_on(overrides, tmp_path, more):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    knobs = ["workflow_args.same_start=false", "workflow_args.max_turns=3", "rollout.min_group_size=1"]
    assert main(["train", *items(overrides, "Fails", *knobs, "gconfig.n_samples=6", *more)]) == 0
    (path,) = tmp_path.glob("*/*/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    failed = {name for row in rows for name, count in row.items() if name.startswith("samples/failed/") and count}
    assert failed and failed <= {
        f"samples/failed/environment_{why}" for why in ("raised", "died", "not_finite", "wrong_type")
    }
    assert len(rows) == 3 and all(0 < row["turns"] <= 3 for row in rows)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_rows_need_no_answer_where_the_environment_judges(overrides, tmp_path, capsys):
    world = items(overrides, "Dawdles", "reward=math")
    assert main(["train", *world, "--dry-run"]) == 0
    assert main(["train", *world, "reward=exact_number", "--dry-run"]) == 2
    assert "reward is set, but workflow=environment has no argument 'reward'" in capsys.readouterr().err
    source = "train_dataset.sources=[{path: seeds, reward: exact_number}]"
    assert main(["train", *(item for item in world if "train_dataset" not in item), source, "--dry-run"]) == 2
    assert "reward=exact_number of a source is set, but workflow=environment" in capsys.readouterr().err


def test_fewer_places_than_a_deterministic_step_has_samples_are_refused(overrides, capsys):
    world = items(overrides, "Dawdles", "deterministic=true", "workflow_args.workers=8")
    assert main(["train", *world, "--dry-run"]) == 2
    assert "workflow_args.workers=8 lets only so many samples run at once" in capsys.readouterr().err
    assert main(["train", *world, "workflow_args.workers=9", "--dry-run"]) == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_an_evaluation_plays_too_and_not_more_at_once_than_there_are_workers(model, tmp_path, monkeypatch, workers):
    monkeypatch.chdir(tmp_path)
    words = [f"model={model}", "data=seeds", "workflow=environment", f"environment={WORLDS}:Dawdles", "max_rows=4"]
    more = [f"workflow_args.workers={workers}", "episode_timeout_s=60"]
    assert main(["eval", *words, *more, "gconfig.max_new_tokens=6", "device=cpu", "threads=1"]) == 0
    (results,) = tmp_path.glob("evaluations/*/results.json")
    assert json.loads(results.read_text())["data"]["seeds"]["failed"] == {}


def test_a_run_whose_environment_gives_the_reward_has_none_to_change(overrides, tmp_path):
    folder = tmp_path / "worlds" / "one"
    folder.mkdir(parents=True)
    name = ask(folder, Change("reward.weight", "math=2"))
    world = items(overrides, "Dawdles", "reward=math", "experiment_name=worlds", "trial_name=one", "total_train_steps=1")
    assert main(["train", *world]) == 0
    refused = json.loads((folder / FOLDER / f"{name}.answer").read_text())["refused"]
    assert "workflow=environment has no argument 'reward'" in refused


def test_a_vote_does_not_replace_what_the_environment_says(overrides, capsys):
    assert main(["train", *items(overrides, "Dawdles", "reward=math", "algorithm={preset: grpo, labels: majority}")]) != 0
    assert "majority judges by a vote, and workflow EnvironmentWorkflow gives a reward of its own" in capsys.readouterr().err


def test_an_evaluation_refuses_a_reward_that_would_judge_nothing(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [f"model={model}", "data=seeds", "workflow=environment", f"environment={WORLDS}:Dawdles", "max_rows=4"]
    assert main(["eval", *words, "reward=exact_number", "device=cpu"]) == 2
    assert "reward is set, but workflow=environment has no argument 'reward'" in capsys.readouterr().err
