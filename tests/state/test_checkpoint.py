"""A checkpoint is there whole or not at all, whatever happens on the way."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.api.team import Team
from tandem.config.experiment import CheckpointConfig
from tandem.state.checkpoint import CheckpointFailed, best_of, prune, save_checkpoint
from tandem.state.existing import checkpoints, step_of
from tandem.state.run_folder import RunFolder
from tandem.state.tree import write_tree

ALL = CheckpointConfig(keep_last=None)


@pytest.fixture
def run(tmp_path):
    with RunFolder.open(tmp_path, "exp", "trial", config_text="") as run:
        yield run


def weights(value):
    return lambda folder: save_file({"w": torch.full((8,), float(value))}, folder / "model.safetensors")


def tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def names(run):
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_checkpoint_has_model_and_tokenizer(run):
    path = save_checkpoint(Team(), run, 3, weights(3), tokenizer, ALL)

    assert path == run.checkpoints / "step_3"
    assert load_file(path / "model.safetensors")["w"].tolist() == [3.0] * 8
    assert (path / "tokenizer.json").read_text() == "{}"


def test_only_the_newest_are_kept_by_number_and_not_by_name(run):
    for step in (2, 9, 10, 11):
        save_checkpoint(Team(), run, step, weights(step), tokenizer, CheckpointConfig(keep_last=2))

    assert [path.name for path in checkpoints(run.checkpoints)] == ["step_10", "step_11"]
    assert names(run) == ["step_10", "step_11"]


def test_null_keeps_all(run):
    for step in range(4):
        save_checkpoint(Team(), run, step, weights(step), tokenizer, ALL)

    assert len(names(run)) == 4


def saved(run, **metrics_by_step):
    """Checkpoints with state, and a metric each."""
    for step, value in metrics_by_step.items():
        state = {"write_state": lambda folder: write_tree(Team(), folder, {"a": {}})}
        metrics = {} if value is None else {"eval/accuracy": value}
        save_checkpoint(Team(), run, int(step[1:]), weights(1), tokenizer, ALL, metrics=metrics, **state)
    return run.checkpoints


@pytest.mark.parametrize(
    ("wish", "stays"),
    [
        ((None,), [2, 4, 6, 8, 10]),
        ((1,), [10]),
        ((0,), [10]),
        ((2,), [8, 10]),
        ((1, 4), [4, 8, 10]),
        ((1, None, "eval/accuracy"), [4, 10]),
        ((1, None, "-eval/accuracy"), [2, 10]),
        ((1, 6, "eval/accuracy"), [4, 6, 10]),
        ((1, None, "eval/unknown"), [10]),
    ],
)
def test_the_newest_the_multiples_and_the_best_are_kept(run, wish, stays):
    folder = saved(run, _2=0.1, _4=0.9, _6=0.8, _8=None, _10=0.5)
    prune(folder, CheckpointConfig(None, *wish))
    assert [step_of(path) for path in checkpoints(folder)] == stays


def test_a_checkpoint_whose_manifest_is_torn_is_not_the_best_and_stops_nothing(run):
    folder = saved(run, _2=0.9, _4=0.5, _6=0.1)
    (folder / "step_2" / "state/manifest.json").write_text("{")
    assert best_of(checkpoints(folder), "eval/accuracy") == folder / "step_4"


def test_of_checkpoints_that_are_equally_good_the_latest_is_the_best(run):
    folder = saved(run, _2=0.5, _4=0.9, _6=0.9, _8=0.5, _10=0.7)
    found = checkpoints(folder)
    assert [step_of(best_of(found, metric)) for metric in ("eval/accuracy", "-eval/accuracy")] == [6, 8]


def test_a_removal_that_is_cut_off_leaves_no_half_checkpoint(run, monkeypatch):
    folder = saved(run, _2=0.1, _4=0.2)

    def refuse(path):
        (path / "model.safetensors").unlink()
        raise OSError("it is cut off here")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    prune(folder, CheckpointConfig(keep_last=1))
    assert [step_of(path) for path in checkpoints(folder)] == [4]


def test_a_saved_step_is_not_written_again(run):
    save_checkpoint(Team(), run, 1, weights(1), tokenizer, ALL)
    path = save_checkpoint(Team(), run, 1, weights(2), tokenizer, ALL)

    assert load_file(path / "model.safetensors")["w"][0] == 1


def test_a_disk_error_leaves_the_checkpoint_before_and_nothing_else(run):
    save_checkpoint(Team(), run, 1, weights(1), tokenizer, CheckpointConfig(keep_last=1))

    def refuse(folder):
        weights(2)(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointFailed, match=r"step 2 could not be saved: .*No space left.*step_1.*run\.root"):
        save_checkpoint(Team(), run, 2, refuse, tokenizer, CheckpointConfig(keep_last=1))
    assert names(run) == ["step_1"]


def test_an_error_that_is_not_the_disks_stays_itself_and_leaves_nothing(run):
    def refuse(folder):
        tokenizer(folder)
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        save_checkpoint(Team(), run, 2, weights(2), refuse, CheckpointConfig(keep_last=1))
    assert names(run) == []


LIMITED = """
import json, resource, sys, torch
from safetensors.torch import save_file
from tandem.api.team import Team
from tandem.config.experiment import CheckpointConfig
from tandem.state.checkpoint import CheckpointFailed, save_checkpoint
from tandem.state.run_folder import RunFolder

with RunFolder.open(sys.argv[1], "exp", "limited", config_text="") as run:
    small = lambda folder: save_file({"w": torch.ones(8)}, folder / "model.safetensors")
    large = lambda folder: save_file({"w": torch.ones(100_000)}, folder / "model.safetensors")
    save_checkpoint(Team(), run, 1, small, lambda folder: None, CheckpointConfig(keep_last=1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
    try:
        save_checkpoint(Team(), run, 2, large, lambda folder: None, CheckpointConfig(keep_last=1))
    except CheckpointFailed as error:
        failed = str(error)
    # the run goes on and saves again
    save_checkpoint(Team(), run, 3, small, lambda folder: None, CheckpointConfig(keep_last=2))
print(json.dumps(failed))
"""


@pytest.mark.slow
@pytest.mark.invariant
def test_a_write_that_the_system_refuses_is_a_failed_checkpoint(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert "File too large" in json.loads(done.stdout)  # the system's own word: the fault did happen
    folder = tmp_path / "exp" / "limited" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_3"]
    assert load_file(folder / "step_1" / "model.safetensors")["w"].tolist() == [1.0] * 8


def test_too_little_space_is_seen_before_anything_is_written(run, monkeypatch):
    save_checkpoint(Team(), run, 1, weights(1), tokenizer, ALL)
    usage = shutil.disk_usage(run.checkpoints)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))  # a full disk cannot be had here

    with pytest.raises(CheckpointFailed, match=r"needs about .* GiB and 0.00 GiB are free"):
        save_checkpoint(Team(), run, 2, lambda folder: pytest.fail("it was written"), tokenizer, ALL)
    assert names(run) == ["step_1"]


KILLED = """
import os, sys, pathlib
from tandem.api.team import Team
from tandem.config.experiment import CheckpointConfig
from tandem.state.checkpoint import save_checkpoint
from tandem.state.run_folder import RunFolder

run = RunFolder.open(sys.argv[1], "exp", "killed", config_text="")
def die(folder):
    (folder / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), 9)
save_checkpoint(Team(), run, 5, die, lambda folder: None, CheckpointConfig())
"""


def test_what_a_killed_save_leaves_is_no_checkpoint_and_is_removed_by_the_next(run, tmp_path, zygote):
    done = zygote.run(KILLED, tmp_path, log=tmp_path / "said")
    folder = tmp_path / "exp" / "killed" / "checkpoints"
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in folder.iterdir()] == [".step_5.partial"] and checkpoints(folder) == []

    shutil.copytree(folder, run.checkpoints)
    save_checkpoint(Team(), run, 6, weights(6), tokenizer, ALL)
    assert names(run) == ["step_6"]
