"""Real commands on real ranks: one dies, is stopped, or never comes; the run is started again and ends as any other."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.trainers.test_resume import assert_same, ledger
from tests.zygote import gone

pytestmark = [pytest.mark.slow, pytest.mark.invariant]

STEPS = 24


class Command:
    """`tandem` in a process of its own, its ranks below it."""

    def __init__(self, root: Path, kind: str, trial: str, items: list[str]):
        self.folder, self.said = root / "tandem" / trial, root / f"{trial}.txt"
        keys = {item.partition("=")[0]: item for item in [*items, f"run.root={root}", f"trial_name={trial}"]}
        with self.said.open("w") as said:
            command = [sys.executable, "-m", "tandem", kind, *keys.values()]
            self.process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        self.seen: set[int] = set()

    def words(self) -> str:
        return self.said.read_text()

    def ranks(self) -> list[psutil.Process]:
        """By number; and remembers all processes that there ever were."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error, KeyError):  # it has just ended, or has only just been forked
                    found[int(child.environ()["RANK"])] = child
        return [found[number] for number in sorted(found)]

    def until_step(self, step: int) -> None:
        deadline = time.monotonic() + 150
        while last_step(self.folder) < step:
            assert time.monotonic() < deadline and self.process.poll() is None, self.words()
            time.sleep(0.05)

    def end(self, seconds: float) -> int:
        while self.process.poll() is None:
            assert (seconds := seconds - 0.1) > 0, self.words()
            self.ranks()
            time.sleep(0.1)
        return self.process.returncode

    def left(self) -> list[int]:
        """Processes of the run that are still there."""
        return [pid for pid in self.seen if not gone(pid)]

    def close(self) -> None:
        if self.process.poll() is None:
            self.ranks()
            self.process.kill()
        self.process.wait(60)
        for pid in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


def last_step(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


@pytest.fixture(scope="module")
def items(model):
    items = [f"actor.path={model}", "actor.dtype=float32", "actor.optimizer.lr=0.01", "train_dataset.path=addition"]
    items += ["train_dataset.size=60", f"total_train_steps={STEPS}", "batch_size=8", "threads=1", "deterministic=true"]
    return [*items, "checkpoint.every_steps=1", "tracking.plot_every_steps=null"]


@pytest.fixture
def start(items, tmp_path):
    """Starts a command; ended here if the test did not."""
    commands = []

    def run(kind, trial, *more, of=None):
        command = Command(tmp_path, kind, trial, [*(items if of is None else of), *more])
        commands.append(command)
        return command

    yield run
    for command in commands:
        command.close()


TWO = "actor.backend=fsdp:d2"


@pytest.fixture(scope="module")
def whole(items, tmp_path_factory):
    """The folder of a run on two ranks that nobody interrupts, its metrics as after no restart; made once for all tests."""
    command = Command(tmp_path_factory.mktemp("whole"), "sft", "whole", [*items, TWO])
    try:
        assert command.end(150) == 0, command.words()
    finally:
        command.close()
    rows = (command.folder / "metrics.jsonl").read_text().splitlines()
    (command.folder / "metrics.jsonl").write_text("".join(f'{row[:-1]}, "recover/restarts": 0.0}}\n' for row in rows))
    return command.folder


def ended_like_an_uninterrupted_run(whole, command, cause):
    info = json.loads((command.folder / "run.json").read_text())
    assert info["status"] == "finished" and len(info["restarts"]) == 1
    assert cause in info["restarts"][0]["cause"] and cause in (command.folder / "log.txt").read_text()
    assert "restart 1 of 1" in command.words()
    rows = [json.loads(line) for line in (command.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["recover/restarts"] for row in rows} == {0.0, 1.0}
    (command.folder / "metrics.jsonl").write_text(
        (command.folder / "metrics.jsonl").read_text().replace('"recover/restarts": 1.0', '"recover/restarts": 0.0')
    )
    assert_same(whole, command.folder, STEPS)
    assert command.left() == []


def test_a_rank_that_is_killed_is_started_again_and_nothing_is_lost(start, whole):
    command = start("sft", "faulty", TWO, "recover.max_restarts=1")
    command.until_step(2)
    victim = command.ranks()[1]
    victim.kill()
    assert command.end(150) == 0, command.words()
    ended_like_an_uninterrupted_run(whole, command, "rank 1 of 2 ended by signal SIGKILL")


def test_a_rank_that_is_stopped_is_found_and_nothing_is_lost(start, whole):
    command = start("sft", "faulty", TWO, "recover.max_restarts=1")
    command.until_step(2)
    first = command.ranks()
    first[0].suspend()
    began = time.monotonic()
    while first[0].status() != psutil.STATUS_STOPPED:  # the system stops it when it next gets a core
        assert time.monotonic() - began < 60, first[0].status()
        time.sleep(0.01)
    while not all(gone(rank) for rank in first):
        assert time.monotonic() - began < 90, command.words()
        time.sleep(0.1)
    assert command.end(150) == 0, command.words()
    stacks = (command.folder / "stacks-1.txt").read_text()
    assert "--- rank 0" in stacks and "--- rank 1" in stacks and stacks.count("most recent call first") >= 4
    ended_like_an_uninterrupted_run(whole, command, "rank 0 of 2 has not answered")


LOSS = """
import os, time
from pathlib import Path

import torch
from tandem.algorithms.policy_losses import ppo_clip

here, calls = Path(__file__).parent, 0


def never_comes():
    (here / "stuck").write_text(str(time.monotonic()))
    time.sleep(600)


def stuck(policy, proximal, advantages, mask):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == 3 and not (here / "stuck").exists():
        never_comes()
    return ppo_clip(policy, proximal, advantages, mask)


def poisoned(policy, proximal, advantages, mask):
    global calls
    calls += 1
    losses, metrics = ppo_clip(policy, proximal, advantages, mask)
    if os.environ["RANK"] == "1" and calls == 2:
        (here / "poisoned").touch()
        losses = losses * torch.nan
    return losses, metrics
"""


@pytest.fixture
def learning(overrides, tmp_path):
    """Items of a run of reinforcement learning on two ranks, its loss a user's."""
    (tmp_path / "my_loss.py").write_text(LOSS)
    items = [*overrides, TWO, "deterministic=true", "checkpoint.every_steps=1", "tracking.plot_every_steps=null"]
    return [*items, "total_train_steps=4"]


def test_a_rank_that_never_reaches_a_collective_call_is_found_and_nothing_is_lost(start, learning, tmp_path):
    more = [f"algorithm.policy_loss={tmp_path}/my_loss.py:stuck", "recover.max_restarts=1"]
    command = start("train", "faulty", *more, of=learning)
    while not (tmp_path / "stuck").exists():
        assert command.process.poll() is None, command.words()
        time.sleep(0.05)
    first, began = command.ranks(), float((tmp_path / "stuck").read_text())
    while not all(gone(rank) for rank in first):
        assert time.monotonic() - began < 90, command.words()
        time.sleep(0.1)
    assert command.end(200) == 0, command.words()
    assert "in never_comes" in (command.folder / "stacks-1.txt").read_text().partition("--- rank 1")[2]
    info = json.loads((command.folder / "run.json").read_text())
    assert info["status"] == "finished" and "waited for each other" in info["restarts"][0]["cause"]
    assert command.left() == []
    whole = start("train", "whole", *more, of=learning)  # the loss is in order now
    assert whole.end(200) == 0 and "restarts" not in json.loads((whole.folder / "run.json").read_text())
    assert ledger(whole.folder) == ledger(command.folder) and len(ledger(whole.folder)) == 16
    for folder in (whole.folder, command.folder):
        lines = (folder / "metrics.jsonl").read_text().replace('"recover/restarts": 1.0', '"recover/restarts": 0.0')
        (folder / "metrics.jsonl").write_text(lines)
    assert_same(whole.folder, command.folder, 4)


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(start, learning, tmp_path):
    command = start("train", "poisoned", f"algorithm.policy_loss={tmp_path}/my_loss.py:poisoned", of=learning)
    assert command.end(200) == 0, command.words()
    rows = [json.loads(line) for line in (command.folder / "metrics.jsonl").read_text().splitlines()]
    assert (tmp_path / "poisoned").exists() and sum(row["skipped"] for row in rows) >= 1
    assert json.loads((command.folder / "run.json").read_text())["status"] == "finished"


def test_without_restarts_the_run_says_which_rank_failed(start):
    command = start("sft", "killed", TWO, "total_train_steps=100000")
    command.until_step(2)
    command.ranks()[1].send_signal(signal.SIGKILL)
    assert command.end(60) == 1
    info = json.loads((command.folder / "run.json").read_text())
    assert (info["status"], info["error"].partition(",")[0]) == ("failed", "rank 1 of 2 ended by signal SIGKILL")
    assert command.left() == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (5, "exit status 5 and raised no error, last heard of in phase"),
        (0, "exit status 0 after 1 steps, before it was"),
    ],
)
def test_code_that_ends_the_process_is_told_as_the_end_of_a_run(start, overrides, tmp_path, code, said):
    lines = (
        "import os\n\ncalls = 0\n\n\nasync def score(completion):\n    global calls\n    calls += 1\n    if calls > 16:\n"
    )
    (tmp_path / "quits.py").write_text(f"{lines}        os._exit({code})\n    return 1.0\n")
    more = [f"reward={tmp_path}/quits.py:score", "recover.max_restarts=1", "checkpoint.every_steps=5"]
    command = start("train", "quits", *more, of=overrides)
    assert command.end(150) == (code or 1)
    info = json.loads((command.folder / "run.json").read_text())
    assert info["status"] == "failed" and said in info["error"] and said in command.words()


def test_a_single_process_that_may_be_started_again_is_watched_as_any_other(start):
    command = start("sft", "alone", "recover.max_restarts=1", "total_train_steps=100000", "checkpoint.every_steps=5")
    command.until_step(6)
    (rank,) = command.ranks()
    rank.kill()
    deadline = time.monotonic() + 100
    while "restart 1 of 1" not in command.words() or not command.ranks():
        assert time.monotonic() < deadline, command.words()
        time.sleep(0.1)
    before = last_step(command.folder)
    while last_step(command.folder) <= before:
        assert time.monotonic() < deadline, command.words()
        time.sleep(0.1)
    os.kill(command.process.pid, signal.SIGHUP)
    assert command.end(60) == 130 and "is saved" in command.words() and "Traceback" not in command.words()
    info = json.loads((command.folder / "run.json").read_text())
    assert info["status"] == "interrupted" and len(info["restarts"]) == 1
    assert (command.folder / f"checkpoints/step_{info['steps']}").is_dir() and command.left() == []


def test_restarts_are_refused_where_nobody_of_ours_starts_the_ranks(start, model):
    environment = os.environ | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    items = [f"actor.path={model}", "train_dataset.path=addition", "recover.max_restarts=1", "checkpoint.every_steps=1"]
    command = [sys.executable, "-m", "tandem", "sft", *items]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "torchrun --max-restarts" in done.stderr
