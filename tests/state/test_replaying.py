"""What a replay needs of a run, what it makes of it, and what it compares."""

import fcntl
import json

import pytest
import torch
import yaml

from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config, plain_data, to_yaml
from tandem.state.manifest import STATE, write_manifest
from tandem.state.replaying import ReplayStart, compare_replay, legs, prepare_replay, refuse_replay, start_of, write_leg
from tandem.state.resuming import may_go_on
from tandem.state.run_folder import RunFolder
from tandem.state.weight_digests import append_digests, digests_of, read_digests

CONFIG = {
    "seed": 3,
    "recover": {"grace_s": 5, "max_restarts": 2},
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


def save(folder, step, run="exp/trial/1"):
    """A whole checkpoint."""
    checkpoint = folder / f"checkpoints/step_{step}"
    (checkpoint / STATE).mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    write_manifest(checkpoint, run, step, {})


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "exp" / "trial"
    for step in (1, 2, 3):
        write(folder, step)
    save(folder, 2)
    (folder / "run.json").write_text(json.dumps({"id": "exp/trial/1", "command": "sft", "status": "finished"}))
    (folder / "ledger.sqlite").write_bytes(b"ledger")
    return folder


def test_the_last_line_of_a_step_counts_and_a_torn_one_does_not(run):
    append_digests(run, 2, {"a": "x"})
    with (run / "weights.jsonl").open("a") as file:
        file.write('{"step": 2, "tens')
    assert read_digests(run, 2) == {"a": "x"} and set(read_digests(run, 1)) == {"a", "b"}
    assert read_digests(run, 4) is None and read_digests(run / "nowhere", 1) is None


def test_the_replays_folder_goes_on_from_the_checkpoint_before_and_saves_nothing(run, tmp_path):
    target = tmp_path / "replay/exp/trial"
    start = start_of(run, 3)
    assert (start.step, start.name, start.skipped) == (2, "step_2", ())
    prepare_replay(run, target, start)
    (leg,) = legs(run, start, 3, CONFIG)
    file = write_leg(target, leg, is_last=True)
    assert [path.name for path in (target / "checkpoints").iterdir()] == ["step_2"]
    assert file.read_text() == (target / "config.yaml").read_text()  # the same command goes on
    made = yaml.safe_load(file.read_text())
    assert (
        made["seed"] == 3 and made["run"] == {"root": str(tmp_path / "replay")} and made["checkpoint"] == {"at_end": False}
    )
    assert made["tracking"] == {"trajectories_per_step": 2} and made["recover"] == {"grace_s": 5, "max_restarts": 0}
    assert json.loads((target / "run.json").read_text()) == {"id": "exp/trial/1", "command": "sft", "status": "interrupted"}
    assert (target / "ledger.sqlite").read_bytes() == b"ledger" and (target / "metrics.jsonl").exists()


@pytest.mark.parametrize("step", [1, 2])
def test_a_replay_from_the_beginning_is_a_run_of_its_own(run, tmp_path, step):
    target = tmp_path / "replay/exp/trial"
    start = start_of(run, step)
    assert (start.step, start.name) == (0, "the beginning")
    prepare_replay(run, target, start)
    (leg,) = legs(run, start, step, CONFIG)
    assert yaml.safe_load(write_leg(target, leg, is_last=True).read_text())["seed"] == 3
    assert not target.exists()  # nothing that its command would have to go on with


def test_a_checkpoint_that_is_not_whole_is_skipped_with_the_reason(run):
    for step in (4, 5, 6, 7):
        write(run, step)
    for step, name in ((4, "exp/trial/1"), (5, "exp/other/2"), (6, "exp/trial/1")):
        save(run, step, name)
    (run / "checkpoints/step_6/model.safetensors").write_bytes(b"Weights")
    info = json.loads((run / "run.json").read_text())
    times = [{"from": at, "before": [{"path": ["seed"], "value": at}]} for at in (4, 6)]
    (run / "run.json").write_text(json.dumps(info | {"resumed": times}))
    start = start_of(run, 7)
    assert start.name == "step_4"
    damaged, foreign = start.skipped
    assert damaged.startswith("step_6 is damaged: model.safetensors") and foreign.startswith("step_5 is foreign")
    assert [(leg.last, leg.config["seed"]) for leg in legs(run, start, 7, CONFIG)] == [(6, 6), (7, 3)]
    (run / "checkpoints/step_4/state/manifest.json").unlink()
    (run / "checkpoints/step_2/model.safetensors").unlink()
    start = start_of(run, 7)
    assert start.name == "the beginning" and [text.split()[0] for text in start.skipped] == [
        "step_6",
        "step_5",
        "step_4",
        "step_2",
    ]
    assert [(leg.last, leg.config["seed"]) for leg in legs(run, start, 7, CONFIG)] == [(4, 4), (6, 6), (7, 3)]


def test_equal_steps_are_equal_whatever_the_clock_says(run, tmp_path):
    write(run, 2, **{"recover/restarts": 1.0, "checkpoint/failed": 2.0})  # done again after a restart
    write(tmp_path / "again", 2, time=9.0)
    found = compare_replay(run, tmp_path / "again", ReplayStart(None), 2)
    assert found.differences == () and (found.tensors, found.metrics, found.samples) == (2, 1, 2)
    assert found.describe() == "Step 2, run again from the beginning: the same (2 tensors, 1 metrics, 2 samples)."


def test_what_differs_is_named(run, tmp_path):
    write(tmp_path / "again", 2, 2.0, loss=0.75, lr=0.1)
    found = compare_replay(run, tmp_path / "again", ReplayStart(None), 2)
    assert found.differences == (
        "tensors: 1 of 2 differ: a",
        "metrics: 2 of 1 differ: loss 0.75 (was 0.5), lr 0.1 (was None)",
        "samples: 1 of 2 differ: number 1",
    )
    assert "DIFFERENT" in found.describe()
    with pytest.raises(ConfigError, match="did not reach step 3"):
        compare_replay(run, tmp_path / "again", ReplayStart(None), 3)


def test_a_step_without_a_record_is_refused(run):
    refuse_replay(run, 3, [])
    with pytest.raises(ConfigError, match=r"no record of step 4 .*: steps 1 to 3 are there"):
        refuse_replay(run, 4, [])
    (run / "weights.jsonl").unlink()
    with pytest.raises(ConfigError, match="an older version made it"):
        refuse_replay(run, 1, [])


def test_values_that_were_changed_since_must_be_given_and_free_ones_need_not(run):
    info = json.loads((run / "run.json").read_text())
    times = [
        {"steps": 3, "changed": ["checkpoint.keep_last: 1 → 2"]},
        {"steps": 2, "changed": ["actor.optimizer.lr: 1 → 2"]},
    ]
    (run / "run.json").write_text(json.dumps(info | {"resumed": times}))
    refuse_replay(run, 3, [])  # the change came before it
    with pytest.raises(ConfigError, match=r"changed after step 2: actor\.optimizer\.lr: 1 → 2\. Give the values of then"):
        refuse_replay(run, 2, [])
    refuse_replay(run, 2, [["actor", "optimizer", "lr"]])


def test_each_step_is_run_again_under_the_values_that_it_had(run):
    for step in (4, 5, 6, 7):
        write(run, step)
    lr, keep, most = ["lr"], ["checkpoint", "keep_last"], ["actor", "max"]
    times = [
        {"from": 4, "before": [{"path": lr, "value": 1}, {"path": keep, "value": 3}]},
        {"before": [{"path": lr, "value": 7}]},  # killed before it came into force
        {"from": 4, "before": [{"path": keep, "value": 3}]},  # nobody need be asked
        {"from": 6, "before": {"lr": 2, "actor.max": 8}},  # as it was written at first
    ]
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"resumed": times}))
    now = {"lr": 3, "actor": {"max": 9}, "checkpoint": {"keep_last": 4}}

    def run_under(step, *given):
        refuse_replay(run, step, [])
        return [
            (leg.last, leg.config["lr"], leg.config["actor"]["max"])
            for leg in legs(run, start_of(run, step), step, now, given)
        ]

    assert run_under(3) == [(3, 1, 8)]
    assert run_under(4) == [(4, 1, 8)]
    assert run_under(5) == [(4, 1, 8), (5, 2, 8)]
    assert run_under(7) == [(4, 1, 8), (6, 2, 8), (7, 3, 9)]
    assert run_under(7, lr, most) == run_under(7, lr, ["actor"]) == [(7, 3, 9)]
    save(run, 6)
    assert run_under(7) == [(7, 3, 9)]
    assert now["actor"] == {"max": 9}


def test_columns_that_were_named_since_are_taken_back(tmp_path):
    given = [
        "train_dataset.path=rows.v1.jsonl",
        "valid_dataset.path=rows.v2.jsonl",
        "evaluate.every_steps=1",
        "checkpoint.every_steps=1",
    ]
    columns = ["valid_dataset.columns.prompt=my.question", "valid_dataset.columns.answer=my.answer"]

    def config(*more):
        return load_config(SFTConfig, None, [*given, *more]).config

    for step, now in ((1, config()), (2, config(columns[0])), (3, config(*columns))):
        examine = may_go_on(now, override=True)
        with RunFolder.open(tmp_path, "exp", "trial", config_text=to_yaml(now), command="sft", examine=examine) as folder:
            write(folder.path, step)
            save(folder.path, step, folder.id)
            folder.begin(step - 1)
            folder.finish("interrupted")
    for step in (1, 2):
        (folder.path / f"checkpoints/step_{step}").rename(folder.path / f"{step}")
    wanted = [plain_data(config()), plain_data(config(columns[0])), plain_data(config(*columns))]

    def found():
        return [dict(leg.config) for leg in legs(folder.path, start_of(folder.path, 3), 3, wanted[-1])]

    assert found() == wanted
    info = json.loads((folder.path / "run.json").read_text())
    for time in info["resumed"]:  # as it was written at first: a column that was not named was None
        time["before"] = {".".join(key["path"]): key.get("value") for key in time["before"]}
    assert None in info["resumed"][1]["before"].values()
    (folder.path / "run.json").write_text(json.dumps(info))
    assert found() == wanted


def test_a_run_json_whose_lines_are_none_is_one_that_never_went_on(run):
    info = json.loads((run / "run.json").read_text())
    for lines in (3, [3, None]):
        (run / "run.json").write_text(json.dumps(info | {"resumed": lines}))
        refuse_replay(run, 3, [])
        assert [leg.last for leg in legs(run, start_of(run, 3), 3, CONFIG)] == [3]


def test_a_step_that_the_run_went_back_behind_is_not_promised(run):
    append_digests(run, 4, {"a": "x"})  # and its metrics were cut off again
    with pytest.raises(ConfigError, match=r"no record of step 4 .*: steps 1 to 3 are there"):
        refuse_replay(run, 4, [])


def test_a_run_that_is_being_written_is_left_alone(run):
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is being written by its run"):
            refuse_replay(run, 1, [])
    refuse_replay(run, 1, [])
