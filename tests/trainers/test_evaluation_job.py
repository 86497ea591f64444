"""`evaluate.where=job`: another process evaluates the checkpoints of a run, and finds what the run would have found."""

import fcntl
import json
import os
import shutil
import threading

import pytest

from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.evaluation import validation
from tandem.view.runs import curves
from tests.trainers.test_rl import rows, run

EVERY = ["evaluate.every_steps=1", "evaluate.max_rows=6", "checkpoint.every_steps=1", "checkpoint.keep_last=null"]
ITEMS = ["deterministic=true", "total_train_steps=2", *EVERY]


def figures(row):
    return {name: value for name, value in row.items() if name.startswith("eval/")}


@pytest.mark.parametrize("samples", [1, 3])
def test_a_job_measures_what_the_run_itself_would(overrides, samples, capsys):
    items = [*ITEMS, f"evaluate.n_samples={samples}"]
    inside = run(overrides, *items, "trial_name=inside")
    outside = run(overrides, *items, "trial_name=outside", "evaluate.where=job")
    assert not any(figures(row) for row in rows(outside)), "the run itself measures nothing"
    assert main(["eval", "--follow", str(outside.folder), "threads=1"]) == 0
    found = {row["step"]: figures(row) for row in validation.rows_of(outside.folder / validation.FIGURES)}
    whole = [json.loads(line) for line in (inside.folder / "metrics.jsonl").read_text().splitlines()]
    assert found == {row["step"]: figures(row) for row in whole} and sorted(found) == [0, 1, 2]
    assert "step 2: reward" in capsys.readouterr().out

    assert list(validation.follow(str(outside.folder))) == [], "what is measured is not measured again"
    shown, of_the_run = curves(outside.folder, 0, ""), curves(inside.folder, 0, "")
    assert (shown["step"], shown["values"]["eval/reward"]) == (of_the_run["step"], of_the_run["values"]["eval/reward"])


def test_a_job_waits_for_checkpoints_of_a_run_that_goes_on(overrides):
    folder = run(overrides, *ITEMS, "evaluate.where=job").folder
    last, later, info = folder / "checkpoints/step_2", folder / "later", folder / "run.json"
    shutil.move(last, later)
    finished = info.read_text()
    info.write_text(json.dumps(json.loads(finished) | {"status": "running"}))
    measured = []
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the process of a run holds it

        def end():
            shutil.move(later, last)
            info.write_text(finished)
            fcntl.flock(lock, fcntl.LOCK_UN)

        for row in validation.follow(str(folder), ["threads=1"], look_s=0.05):
            measured.append(row["step"])
            if row["step"] == 1:
                threading.Timer(0.5, end).start()
    assert measured == [0, 1, 2]


def test_a_second_job_is_told_which_process_follows_the_run(overrides, capsys):
    folder = run(overrides, *ITEMS, "evaluate.where=job").folder
    first = validation.follow(str(folder), ["threads=1"])
    assert next(first)["step"] == 0
    capsys.readouterr()
    assert main(["eval", "--follow", str(folder), "threads=1"]) != 0
    said = capsys.readouterr().err
    assert f"process {os.getpid()} on" in said and "stop it first" in said and "label" not in said
    assert [row["step"] for row in first] == [1, 2]


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["evaluate.where=job"], "not used because nothing is evaluated"),
        (["evaluate.where=job", "evaluate.every_steps=4"], "set checkpoint.every_steps=4"),
        (["evaluate.where=job", "evaluate.every_steps=4", "checkpoint.every_steps=3"], "set checkpoint.every_steps=4"),
        (["evaluate.where=job", *EVERY[:3], "checkpoint.keep_best=eval/reward"], "needs figures of the run itself"),
    ],
)
def test_what_a_job_could_not_do_is_refused(items, words):
    with pytest.raises(ConfigError, match=words):
        load_config(TrainConfig, None, ["train_dataset.path=addition", *items])


def test_the_run_decides_what_is_asked(overrides, capsys):
    folder = run(overrides, *ITEMS, "evaluate.where=job").folder
    assert main(["eval", "--follow", str(folder), "gconfig.max_new_tokens=3"]) == 2
    assert "gconfig.max_new_tokens is taken from the run" in capsys.readouterr().err
    for words in (["--dry-run"], ["--data", "svamp"], ["model=other"], ["other.yaml"]):
        assert main(["eval", "--follow", str(folder), *words]) == 2, words
    assert main(["eval", "--follow", f"{folder}@1"]) == 2
    assert not (folder / validation.FIGURES).exists()
