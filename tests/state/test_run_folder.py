"""A run folder says what it holds and is never shared or overwritten."""

import json
import logging
import os
import subprocess
import sys

import pytest

from tandem.config.errors import ConfigError
from tandem.state.existing import RunFolderInUse, existing_run
from tandem.state.machine import memory_available_gib
from tandem.state.resuming import RunFolderTaken
from tandem.state.run_folder import RunFolder, record_failure


def open_run(root, trial="first", **kwargs):
    return RunFolder.open(root, "exp", trial, config_text="seed: 3\n", seed=3, **kwargs)


def info_of(run):
    return json.loads((run.path / "run.json").read_text())


def test_a_finished_run_says_so_and_with_what_it_was_made(tmp_path):
    with open_run(tmp_path) as run:
        assert info_of(run)["status"] == "running"
        (run.path / "metrics.jsonl").write_text('{"step": 4, "reward/mean": 0.5}\n')

    info = info_of(run)
    assert run.path == tmp_path / "exp" / "first"
    assert (run.path / "config.yaml").read_text() == "seed: 3\n"
    assert (info["status"], info["steps"], info["seed"]) == ("finished", 4, 3)
    assert {"python", "torch", "transformers", "tandem-rl"} <= info["versions"].keys()
    assert info["machine"]["cores"] >= 1 and info["machine"]["memory_gib"] > 0
    assert info["seconds"] >= 0 and info["ended"] >= info["started"]


def test_two_runs_of_one_name_have_ids_of_their_own(tmp_path):
    with open_run(tmp_path / "here") as here, open_run(tmp_path / "there") as there:
        assert here.id.startswith("exp/first/") and info_of(here)["id"] == here.id
        assert there.id.startswith("exp/first/") and there.id != here.id


@pytest.mark.parametrize("restarts", [[], [{"number": 1, "step": 0}]])
def test_a_run_that_is_started_again_before_its_first_step_keeps_its_name(tmp_path, restarts):
    with open_run(tmp_path) as run:
        before = info_of(run)
    if restarts:
        (run.path / "run.json").write_text(json.dumps(before | {"restarts": restarts}))
    with open_run(tmp_path, examine=lambda folder: None) as again:
        assert (again.id == before["id"], info_of(again).get("restarts", [])) == (bool(restarts), restarts)


def test_run_json_names_neither_home_nor_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hidden-key-123")
    with open_run(tmp_path) as run:
        text = (run.path / "run.json").read_text()

    assert "hidden-key-123" not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), "interrupted"), (SystemExit(1), "interrupted"), (ValueError("bad"), "failed")],
)
def test_how_a_run_ended_is_recorded(tmp_path, error, status):
    with pytest.raises(type(error)), open_run(tmp_path) as run:
        raise error

    assert info_of(run)["status"] == status
    assert info_of(run).get("error") == ("ValueError: bad" if status == "failed" else None)


def test_the_first_word_on_how_a_run_ended_counts(tmp_path):
    with open_run(tmp_path) as run:
        run.finish("interrupted")
        run.finish("failed", "too late")
    before = info_of(run)
    assert before["status"] == "interrupted" and "error" not in before
    (run.path / "run.json").write_text(json.dumps(before | {"status": "finished"}))
    assert record_failure(run.path, "its supervisor saw it die") is None
    assert info_of(run)["status"] == "finished"


def test_a_run_that_failed_before_its_first_step_is_kept_for_its_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="bad"), open_run(tmp_path):
        raise ValueError("bad")
    open_run(tmp_path).close()  # nothing is lost
    with open_run(tmp_path, "second") as run:
        (run.checkpoints / "step_0").mkdir(parents=True)
        run.finish("failed", "bad")
    with pytest.raises(RunFolderTaken, match="checkpoints: step_0"):
        open_run(tmp_path, "second")


@pytest.mark.parametrize(("limit", "left_mib"), [(64, 48), (16, 0)])
def test_files_that_were_read_do_not_count_against_a_containers_limit(tmp_path, limit, left_mib):
    (tmp_path / "memory.max").write_text(f"{limit * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{48 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {32 * 2**20}\n")
    assert memory_available_gib(tmp_path) * 2**10 == left_mib


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up", "-x", ".hidden", "a b", "a\n", "ä", "x" * 101, "a\\b"])
def test_names_that_are_not_a_folders_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="trial_name must be the name of one folder"):
        open_run(tmp_path, trial=name)
    with pytest.raises(ConfigError, match="experiment_name"):
        RunFolder.open(tmp_path, name, "first", config_text="")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_run_is_refused_with_what_is_there(tmp_path):
    with open_run(tmp_path) as run:
        lines = ['{"step": 1, "reward/mean": 0.1}', '{"step": 7, "reward/mean": 0.25}', '{"step": 8, "rew']
        (run.path / "metrics.jsonl").write_text("\n".join(lines))
        (run.checkpoints / "step_7").mkdir(parents=True)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != ".lock"}

    with pytest.raises(RunFolderTaken, match=r"7 steps done; finished .*reward/mean 0.25; checkpoints: step_7.*trial_name"):
        open_run(tmp_path)
    assert before == {path: path.read_bytes() for path in before}
    open_run(tmp_path, trial="second").close()


def test_a_killed_run_is_recognised_and_its_lock_is_gone(tmp_path):
    code = (
        "import os, sys; from tandem.state.run_folder import RunFolder\n"
        "run = RunFolder.open(sys.argv[1], 'exp', 'first', config_text=''); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == -9

    with pytest.raises(RunFolderTaken, match="was killed before it could end"):
        open_run(tmp_path)


def test_a_folder_that_another_process_holds_is_refused_with_its_holder(tmp_path):
    code = (
        "import sys; from tandem.state.run_folder import RunFolder\n"
        "run = RunFolder.open(sys.argv[1], 'exp', 'first', config_text=''); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunFolderInUse, match=rf"process {holder.pid} on \S+ since 20.*another trial_name"):
            open_run(tmp_path)
        holder.stdin.close()
        assert holder.wait(timeout=30) == 0


def test_one_process_cannot_hold_a_folder_twice(tmp_path):
    with open_run(tmp_path), pytest.raises(RunFolderInUse, match=f"process {os.getpid()} "):
        open_run(tmp_path)


def test_an_empty_folder_is_fine_and_a_root_that_is_a_file_is_not(tmp_path):
    (tmp_path / "exp" / "first").mkdir(parents=True)
    assert existing_run(tmp_path / "exp" / "first") is None
    open_run(tmp_path).close()

    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.root="):
        open_run(tmp_path / "file")


def test_logs_go_to_the_folder_while_it_is_open(tmp_path):
    log = logging.getLogger("tandem.somewhere")
    with open_run(tmp_path) as run:
        log.info("inside %d", 1)
    log.info("outside")

    text = (run.path / "log.txt").read_text()
    assert "INFO tandem.somewhere: inside 1" in text and "outside" not in text
