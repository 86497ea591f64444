"""Real runs whose ranks die: their servers go on, get weights, and serve the ranks that are started again."""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.fleet.fleets import rows
from tests.trainers.test_resume import ledger
from tests.trainers.test_supervision import Command, last_step
from tests.zygote import gone

pytestmark = pytest.mark.slow

STEPS = 5


@pytest.fixture
def start(overrides, tmp_path, monkeypatch):
    """Starts a run on a server of its own; ended here if the test did not."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    commands = []
    items = [*overrides, "rollout.backend=tandem:d1", "rollout.engine.threads=1", "recover.max_restarts=1"]
    items += ["checkpoint.every_steps=1", f"total_train_steps={STEPS}", "tracking.trajectories_per_step=16"]
    items += ["tracking.plot_every_steps=null"]

    def run(trial, *more):
        commands.append(Command(tmp_path / "runs", "train", trial, [*items, *more]))
        return commands[-1]

    (tmp_path / "runs").mkdir()
    yield run
    for command in commands:
        command.close()


def server(tmp_path):
    """The one that is kept: its process, by the file that says so."""
    (file,) = (tmp_path / "temporary").glob("tandem-servers-*/tandem-0.json")
    return psutil.Process(json.loads(file.read_text())["pid"])


def nothing_is_left(command, tmp_path):
    assert command.left() == []
    assert not list((tmp_path / "temporary").glob("tandem-server*"))


def answers(folder):
    """Step, text, reward and versions of each sample, by the server's own word; of a step that was made twice the last."""
    files = sorted((folder / "trajectories").iterdir())
    return [
        (file.stem, row["completion"], row["reward"], {run["version"] for runs in row["versions"] for run in runs})
        for file in files
        for row in rows(file)
    ]


def difference(one, other):
    a, b = (load_file(folder / f"checkpoints/step_{STEPS}/model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.invariant
def test_a_server_outlives_a_rank_that_is_killed_and_the_run_ends_as_if_nobody_had(start, tmp_path):
    command = start("faulty")
    command.until_step(2)
    (rank,), before = command.ranks(), server(tmp_path)
    rank.kill()
    command.until_step(last_step(command.folder) + 1)
    assert command.process.poll() is None and server(tmp_path) == before and not gone(before)
    assert command.end(150) == 0, command.words()

    log = (command.folder / "log.txt").read_text()
    assert log.count(f"tandem-0 (process {before.pid}) is kept") == 1 == log.count("is kept")
    assert log.count(f"tandem-0 (process {before.pid}) is taken over") == 1
    assert (command.folder / "servers-logs" / "tandem-0.log").read_text().count("serving") == 1
    way = [(row["to"], row["why"]) for row in rows(command.folder / "fleet.jsonl")]  # of the second group of ranks
    assert way[1:3] == [("stale", "it was taken over from an earlier process"), ("healthy", "current weights, empty cache")]
    assert "restart 1 of 1" in command.words() and gone(before)
    nothing_is_left(command, tmp_path)

    whole = start("whole", "rollout.backend=embedded", "recover.max_restarts=0")
    assert whole.end(150) == 0, whole.words()
    assert answers(whole.folder) == answers(command.folder) and len(answers(whole.folder)) == STEPS * 16
    assert all(versions == {int(step.removeprefix("step_")) - 1} for step, _, _, versions in answers(command.folder))
    assert difference(whole.folder, command.folder) <= 1e-4  # arrival decides what the server computes together
    assert ledger(whole.folder) == ledger(command.folder)


def test_it_outlives_ranks_that_close_in_order_because_another_one_died(start, tmp_path):
    command = start("faulty", "actor.backend=fsdp:d2")
    command.until_step(2)
    (_, victim), before = command.ranks(), server(tmp_path)
    victim.kill()
    assert command.end(200) == 0, command.words()
    log = (command.folder / "log.txt").read_text()
    assert log.count("is kept") == 1 == log.count(f"tandem-0 (process {before.pid}) is taken over")
    info = json.loads((command.folder / "run.json").read_text())
    assert info["status"] == "finished" and "rank 1 of 2" in info["restarts"][0]["cause"]
    nothing_is_left(command, tmp_path)


def test_one_that_dies_with_its_rank_is_started_anew_and_ends_with_a_killed_command(start, tmp_path):
    command = start("faulty", "total_train_steps=100000")
    command.until_step(2)
    (rank,), before = command.ranks(), server(tmp_path)
    os.kill(before.pid, signal.SIGKILL)
    rank.kill()
    command.until_step(last_step(command.folder) + 1)
    after = server(tmp_path)
    assert after.pid != before.pid and not gone(after) and command.ranks()
    log = (command.folder / "log.txt").read_text()
    assert "tandem-0 is started anew: no server of that name runs any more" in log and "taken over" not in log

    command.process.kill()
    began = time.monotonic()
    command.process.wait()
    while command.left() or not gone(after):
        assert time.monotonic() - began < 45, command.words()
        time.sleep(0.1)
    nothing_is_left(command, tmp_path)
    assert Path(command.folder / "run.json").is_file()
