"""A run that is asked to end is saved and goes on; one that gets nowhere says where it stands. In processes of their own."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.trainers.test_resume import assert_same


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def sft(zygote, model, tmp_path):
    """Runs `tandem sft`; gives exit status, what was said, and the run folder."""
    items = [f"actor.path={model}", "actor.dtype=float32", "actor.optimizer.lr=0.01", "train_dataset.path=addition"]
    items += ["train_dataset.size=20", "total_train_steps=4", "batch_size=8", "threads=1", "deterministic=true"]
    items += [f"run.root={tmp_path}", "tracking.plot_every_steps=null"]

    def go(trial, instant=None, fault="", nth=1, *more):
        log, out = tmp_path / "log", tmp_path / "status"
        out.unlink(missing_ok=True)
        call = [["sft", *items, f"trial_name={trial}", *more], instant, fault, nth, str(out)]
        status = zygote.call("tests.trainers.supervising:command", call, log)
        return int(out.read_text()) if out.exists() else status, log.read_text(), tmp_path / "tandem" / trial

    return go


def seconds_since_the_fault(folder: Path) -> float:
    return time.monotonic() - float((folder.parents[1] / "at").read_text())


def info(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("name", ["SIGTERM", slow("SIGHUP"), slow("SIGINT")])
def test_a_run_asked_to_end_finishes_its_step_is_saved_and_goes_on_to_the_same_end(sft, name):
    status, said, folder = sft("asked", "before the optimizer step", name, 2)
    assert status == 130, said
    assert f"{name}: the run ends after step 2, within 30 s, and is saved" in said and "Interrupted." in said
    assert "Traceback" not in said and said.rstrip().splitlines()[-1] == f"Go on: tandem continue {folder}"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_2"]  # nothing else would have been saved
    assert info(folder)["status"] == "interrupted" and info(folder)["steps"] == 2
    assert sft("asked")[0] == 0 and sft("whole")[0] == 0
    assert_same(folder.with_name("whole"), folder, 4)


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize(
    ("fault", "more"),
    [("twice", ()), slow("in vain", ("recover.grace_s=1",)), slow("SIGTERM", ("recover.grace_s=0",))],
)
def test_a_second_request_or_the_end_of_the_grace_ends_it_at_once(sft, fault, more):
    status, said, folder = sft("asked", "before the optimizer step", fault, 2, *more)
    assert seconds_since_the_fault(folder) < 25
    assert ("step 2 and its save did not end within 1 s (recover.grace_s), so it is not saved" in said) == (
        fault == "in vain"
    )
    assert status == 130 and not (folder / "checkpoints").exists(), said
    assert info(folder)["status"] == "interrupted" and info(folder)["steps"] == 1


@pytest.mark.slow
@pytest.mark.invariant
def test_a_request_that_is_delivered_twice_is_one(sft):
    status, said, folder = sft("asked", "before the optimizer step", "delivered twice", 2)
    assert status == 130 and "the run ends after step 2, within 30 s, and is saved" in said
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_2"]


@pytest.mark.slow
def test_in_its_last_step_a_run_that_is_asked_to_end_just_ends(sft):
    status, said, folder = sft("last", "before the optimizer step", "SIGTERM", 4)
    assert status == 0 and info(folder)["status"] == "finished", said


@pytest.mark.slow
def test_a_run_that_saves_nothing_is_not_saved_on_leaving(sft):
    status, said, folder = sft("asked", "before the optimizer step", "SIGTERM", 2, "checkpoint.at_end=false")
    assert "is not saved, because" in said and "there is no checkpoint" in said
    assert status == 130 and not (folder / "checkpoints").exists()


@pytest.mark.parametrize("fault", ["stuck", slow("stuck for good")])
def test_a_run_that_gets_nowhere_says_what_it_is_at_and_where_each_thread_stands(sft, fault):
    more = ("recover.stalled_after_s=2", "checkpoint.every_steps=1")
    status, said, folder = sft("stuck", "before the optimizer step", fault, 3, *more)
    assert status == 1 and seconds_since_the_fault(folder) < 60
    assert "error: no progress for 2 s (recover.stalled_after_s) in phase 'train' of step 3" in said
    stacks = (folder / "stacks-1.txt").read_text()
    assert f"in {fault.replace(' ', '_')}" in stacks and "oversight" in stacks
    assert info(folder)["status"] == "failed" and "no progress for 2 s" in info(folder)["error"]
    if fault == "stuck":
        return
    assert sft("stuck", None, "", 1, "checkpoint.every_steps=1")[0] == 0
    assert sft("whole", None, "", 1, "checkpoint.every_steps=1")[0] == 0
    assert_same(folder.with_name("whole"), folder, 4)


@pytest.mark.slow
def test_a_save_that_hangs_is_found_by_its_phase(sft):
    more = ("recover.stalled_after_s=2", "checkpoint.every_steps=1", "checkpoint.asynchronous=false")
    status, said, folder = sft("stuck", "between manifest and rename", "stuck", 2, *more)
    assert status == 1 and "in phase 'save' of step" in said
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_1"]


@pytest.mark.slow
def test_a_save_beside_training_that_hangs_is_found_and_not_waited_for_again(sft):
    more = ("recover.stalled_after_s=2", "checkpoint.every_steps=1")
    status, said, folder = sft("stuck", "between manifest and rename", "stuck", 2, *more)
    assert status == 1 and "in phase 'save' of step" in said
    assert seconds_since_the_fault(folder) < 60
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert {name for name in names if not name.startswith(".")} == {"step_1"}
    assert len(names) == 2  # what was written beside training is left where it was, under a name that nobody reads
    assert sft("stuck", None, "", 1, "checkpoint.every_steps=1")[0] == 0
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"step_4"}
    assert not [path for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", folder], capture_output=True).returncode
    ):
        pytest.skip("only root can mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("wish", ["stop", slow("continue")])
def test_a_full_disk_leaves_the_last_checkpoint_and_ends_the_run_or_not(sft, tmp_path, small_disk, wish):
    checkpoints = tmp_path / "tandem/full/checkpoints"
    checkpoints.parent.mkdir(parents=True)
    checkpoints.symlink_to(small_disk)  # as where run.root is large and a quota is not
    more = ("checkpoint.every_steps=1", f"checkpoint.on_error={wish}", "checkpoint.keep_last=null")
    status, said, folder = sft("full", None, "", 1, *more)
    kept = sorted(path.name for path in checkpoints.iterdir())
    assert kept and "step_4" not in kept and not any(name.startswith(".") for name in kept)
    assert "No space left" in said or "are free" in said
    assert status == 1  # the last checkpoint of a run is always needed
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] in ((4,) if wish == "continue" else (len(kept) + 1, len(kept) + 2))
    assert ("checkpoint/failed" in lines[-1]) == (wish == "continue")
    assert info(folder)["status"] == "failed" and "could not be saved" in info(folder)["error"]
    if wish == "stop":
        return
    assert "training goes on (checkpoint.on_error=continue)" in said
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    assert sft("full", None, "", 1, *more)[0] == 0 and sft("whole", None, "", 1, *more)[0] == 0
    assert_same(folder.with_name("whole"), folder, 4)
