"""What a replay needs of a run, what it makes of it, and what it compares."""

import fcntl
import json

import pytest
import torch
import yaml

from tandem.config.errors import ConfigError
from tandem.state.replaying import compare_replay, legs, prepare_replay, refuse_replay, write_leg
from tandem.state.weight_digests import append_digests, digests_of, read_digests

CONFIG = {
    "seed": 3,
    "run": {"root": "runs"},
    "checkpoint": {"every_steps": 1, "keep_last": 4},
    "tracking": {"trajectories_per_step": 2, "sinks": ["wandb"], "project": "mine"},
}


def write(folder, step, value=1.0, **metrics):
    """A step that was done."""
    folder.mkdir(parents=True, exist_ok=True)
    append_digests(folder, step, digests_of([("a", torch.full((3,), value)), ("b", torch.tensor(float(step)))]))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": 1.0 + value, "time/step_s": value, "loss": 0.5} | metrics) + "\n")
    (folder / "trajectories").mkdir(exist_ok=True)
    (folder / f"trajectories/step_{step}.jsonl").write_text(f'{{"tokens": {value}}}\n{{"tokens": 0}}\n')


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "exp" / "trial"
    for step in (1, 2, 3):
        write(folder, step)
    (folder / "checkpoints/step_2").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"id": "exp/trial/1", "command": "sft", "status": "finished"}))
    (folder / "ledger.sqlite").write_bytes(b"ledger")
    return folder


def test_the_last_line_of_a_step_counts_and_a_torn_one_does_not(run):
    append_digests(run, 2, {"a": "x"})
    with (run / "weights.jsonl").open("a") as file:
        file.write('{"step": 2, "tens')
    assert read_digests(run, 2) == {"a": "x"} and set(read_digests(run, 1)) == {"a", "b"}
    assert read_digests(run, 4) is None and read_digests(run / "nowhere", 1) is None


@pytest.mark.parametrize(("step", "begun"), [(1, "the beginning"), (2, "the beginning"), (3, "step_2")])
def test_the_replays_folder_goes_on_from_the_checkpoint_before_and_saves_nothing(run, tmp_path, step, begun):
    target = tmp_path / "replay/exp/trial"
    assert prepare_replay(run, target, step) == begun
    (leg,) = legs(run, step, CONFIG)
    write_leg(target, leg, is_last=True)
    assert [path.name for path in (target / "checkpoints").iterdir()] == ([begun] if begun == "step_2" else [])
    made = yaml.safe_load((target / "config.yaml").read_text())
    assert (
        made["seed"] == 3 and made["run"] == {"root": str(tmp_path / "replay")} and made["checkpoint"] == {"at_end": False}
    )
    assert made["tracking"] == {"trajectories_per_step": 2}
    assert json.loads((target / "run.json").read_text()) == {"id": "exp/trial/1", "command": "sft", "status": "interrupted"}
    assert (target / "ledger.sqlite").read_bytes() == b"ledger"
    assert (target / "metrics.jsonl").exists() == (begun == "step_2")


def test_equal_steps_are_equal_whatever_the_clock_says(run, tmp_path):
    write(run, 2, **{"recover/restarts": 1.0, "checkpoint/failed": 2.0})  # done again after a restart
    write(tmp_path / "again", 2, time=9.0)
    found = compare_replay(run, tmp_path / "again", 2)
    assert found.differences == () and (found.tensors, found.metrics, found.samples) == (2, 1, 2)
    assert found.describe() == "Step 2, run again from the beginning: the same (2 tensors, 1 metrics, 2 samples)."


def test_what_differs_is_named(run, tmp_path):
    write(tmp_path / "again", 2, 2.0, loss=0.75, lr=0.1)
    found = compare_replay(run, tmp_path / "again", 2)
    assert found.differences == (
        "tensors: 1 of 2 differ: a",
        "metrics: 2 of 1 differ: loss 0.75 (was 0.5), lr 0.1 (was None)",
        "samples: 1 of 2 differ: number 1",
    )
    assert "DIFFERENT" in found.describe()
    with pytest.raises(ConfigError, match="did not reach step 3"):
        compare_replay(run, tmp_path / "again", 3)


def test_a_step_without_a_record_is_refused(run):
    refuse_replay(run, 3, {})
    with pytest.raises(ConfigError, match=r"no record of step 4 .*: steps 1 to 3 are there"):
        refuse_replay(run, 4, {})
    (run / "weights.jsonl").unlink()
    with pytest.raises(ConfigError, match="an older version made it"):
        refuse_replay(run, 1, {})


def test_values_that_were_changed_since_must_be_given_and_free_ones_need_not(run):
    info = json.loads((run / "run.json").read_text())
    times = [
        {"steps": 3, "changed": ["checkpoint.keep_last: 1 → 2"]},
        {"steps": 2, "changed": ["actor.optimizer.lr: 1 → 2"]},
    ]
    (run / "run.json").write_text(json.dumps(info | {"resumed": times}))
    refuse_replay(run, 3, {})  # the change came before it
    with pytest.raises(ConfigError, match=r"changed after step 2: actor\.optimizer\.lr: 1 → 2\. Give the values of then"):
        refuse_replay(run, 2, {})
    refuse_replay(run, 2, {"actor.optimizer.lr": "actor.optimizer.lr=1"})


def test_each_step_is_run_again_under_the_values_that_it_had(run):
    for step in (4, 5, 6, 7):
        write(run, step)
    times = [
        {"from": 4, "changed": [], "before": {"lr": 1, "checkpoint.keep_last": 3}},
        {"changed": [], "before": {"lr": 7}},  # killed before it came into force
        {"from": 4, "changed": [], "before": {"checkpoint.keep_last": 3}},  # nobody need be asked
        {"from": 6, "changed": [], "before": {"lr": 2, "actor.max": 8}},
    ]
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"resumed": times}))
    now = {"lr": 3, "actor": {"max": 9}, "checkpoint": {"keep_last": 4}}

    def run_under(step, *given):
        refuse_replay(run, step, {})
        return [(leg.last, leg.config["lr"], leg.config["actor"]["max"]) for leg in legs(run, step, now, given)]

    assert run_under(3) == [(3, 1, 8)]
    assert run_under(4) == [(4, 1, 8)]
    assert run_under(5) == [(4, 1, 8), (5, 2, 8)]
    assert run_under(7) == [(4, 1, 8), (6, 2, 8), (7, 3, 9)]
    assert run_under(7, "lr", "actor.max") == [(7, 3, 9)]
    (run / "checkpoints/step_6").mkdir()
    assert run_under(7) == [(7, 3, 9)]
    assert now["actor"] == {"max": 9}


def test_a_run_that_is_being_written_is_left_alone(run):
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is being written by its run"):
            refuse_replay(run, 1, {})
    refuse_replay(run, 1, {})
