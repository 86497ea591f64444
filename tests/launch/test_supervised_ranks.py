"""Groups that fail, get nowhere, and are started again; each rank a few lines of Python."""

import os
import sys
import time

import pytest

from tandem.launch import rank
from tandem.launch.local import Patience, run_ranks
from tandem.launch.place import RENDEZVOUS
from tests.zygote import gone

TRIES = """
import os, sys, time, pathlib, signal, subprocess
from tandem.launch.rank import follow_launcher, telling_errors, failed_elsewhere, restarts
from tandem.config.errors import TandemError
here, rank = pathlib.Path({folder!r}), os.environ["RANK"]
said = {{"count": 1, "phase": "train", "step": 2, "waits": "" if rank == "1" else "the other ranks"}}
follow_launcher(lambda: said)
time.sleep(0.7)  # it is heard of in that step
said |= {{"step": 3, "count": 2}}
(here / f"{{restarts()}}-{{rank}}").write_text(str(os.getpid()))
"""


@pytest.fixture
def ranks(tmp_path):
    """Runs lines on two ranks; what was recorded is kept in ``ranks.records``."""

    def run(lines: str, count: int = 2, left_s: float = Patience.left_s, **options) -> int:
        code = TRIES.format(folder=str(tmp_path)) + lines
        record = lambda ended, restart: run.records.append((ended, restart))  # noqa: E731
        patience = Patience(fail_s=0.5, left_s=left_s, restart_s=0.0, silent_s=2.0, wedged_s=3.0)
        options = {"stalled_after_s": 60.0} | options
        return run_ranks([sys.executable, "-c", code], count, record=record, patience=patience, **options)

    run.records = []
    return run


def pids(folder, attempt=0):
    return [int((folder / f"{attempt}-{rank}").read_text()) for rank in range(2)]


def test_a_rank_that_is_stopped_is_found_and_the_stacks_of_all_are_kept(ranks, tmp_path, capfd):
    began = time.monotonic()
    assert ranks("if rank == '1': time.sleep(1.0); os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)") == 1
    assert time.monotonic() - began < 60
    ((ended, restart),) = ranks.records
    assert restart is None and ended.rank == 1 and ended.may_pass and ended.step == 3 and ended.has_folder
    assert "error: rank 1 of 2 has not answered for" in capfd.readouterr().err
    assert ended.stacks.count("most recent call first") >= 2  # Python's own word, once for each thread
    assert "--- rank 0" in ended.stacks and "--- rank 1" in ended.stacks and "in _follow" in ended.stacks
    assert all(gone(pid) for pid in pids(tmp_path))


def test_ranks_that_wait_for_one_that_stands_still_are_ended_with_what_it_was_at(ranks, tmp_path):
    lines = "def never_comes():\n    time.sleep(600)\nif rank == '1': never_comes()\ntime.sleep(600)"
    assert ranks(lines) == 1
    ((ended, _),) = ranks.records
    assert ended.rank == 1 and "rank 1 makes no progress (step 3, train" in ended.cause
    assert "in never_comes" in ended.stacks.partition("--- rank 1")[2]
    assert all(gone(pid) for pid in pids(tmp_path))


@pytest.mark.slow
@pytest.mark.invariant
def test_a_group_is_started_again_so_often_and_no_more(ranks, tmp_path, capfd):
    assert ranks("if rank == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)", max_restarts=2) == 1
    assert [restart for _, restart in ranks.records] == [1, 2, None]
    assert {ended.cause.partition(",")[0] for ended, _ in ranks.records} == {"rank 1 of 2 ended by signal SIGKILL"}
    assert "restart 2 of 2" in capfd.readouterr().err
    assert all(gone(pid) for attempt in range(3) for pid in pids(tmp_path, attempt))


def test_a_rank_that_dies_soon_after_its_folder_was_open_has_said_so():
    code = """
import os, signal, time
from tandem.launch.rank import follow_launcher
said = {"count": 1, "phase": "start", "step": 0, "waits": ""}
follow_launcher(lambda: said)
time.sleep(0.1)  # a look every half second would come at once, and too late
said |= {"phase": "build"}
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    records = []
    assert run_ranks([sys.executable, "-c", code], 1, record=lambda ended, _: records.append(ended)) == 1
    said = "rank 0 of 1 ended by signal SIGKILL, last heard of in phase 'build' of step 0"
    assert [(ended.cause, ended.has_folder) for ended in records] == [(said, True)]


def test_a_group_that_comes_through_the_second_time_has_not_failed(ranks, capfd):
    assert ranks("if rank == '1' and restarts() == 0: os.kill(os.getpid(), signal.SIGKILL)", max_restarts=5) == 0
    assert [restart for _, restart in ranks.records] == [1]


@pytest.mark.parametrize("status", [2, 3, 130])
def test_what_would_fail_again_is_not_started_again(ranks, status):
    assert ranks(f"sys.exit({status})", max_restarts=5) == (1 if status == 3 else status)
    assert [restart for _, restart in ranks.records] == ([] if status == 130 else [None])


def test_an_error_that_all_ranks_share_is_said_once_and_nobody_is_blamed(ranks, capfd):
    lines = """
try:
    with telling_errors():
        raise TandemError("loss.py failed")
except TandemError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(3)
"""
    assert ranks(lines) == 1
    assert capfd.readouterr().err == "error: loss.py failed\n"
    assert ranks.records[0][0].cause == "loss.py failed"


def test_the_rank_whose_error_was_first_is_to_blame_not_one_that_heard_of_it(ranks, capfd):
    lines = """
from tandem.api.failures import RankFailed
with telling_errors():
    if rank == "0":
        (here / "raised").touch()
        raise ValueError("the third gradient is missing")
    while not (here / "raised").exists():
        time.sleep(0.02)
    time.sleep(0.2)
    raise RankFailed("rank 0 failed: ValueError: the third gradient is missing")
"""
    assert ranks(lines) == 1
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1 and "rank 1" not in said
    assert ranks.records[0][0].cause == "ValueError: the third gradient is missing" and ranks.records[0][0].rank == 0


def test_ranks_hear_why_they_are_ended(ranks, tmp_path):
    lines = """
def ended(*_):
    (here / "heard").write_text(str(failed_elsewhere()))
    sys.exit(1)
signal.signal(signal.SIGTERM, ended)
if rank == "1": time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    assert ranks(lines) == 1
    assert (tmp_path / "heard").read_text().partition(",")[0] == "rank 1 of 2 ended by signal SIGKILL"


def test_what_a_rank_started_in_a_session_of_its_own_does_not_outlive_the_group(ranks, tmp_path):
    lines = """
if rank == "1":
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (here / "server").write_text(str(server.pid))
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    assert ranks(lines, left_s=0.5) == 1
    deadline = time.monotonic() + 60
    while not gone(int((tmp_path / "server").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.invariant
def test_one_rank_is_watched_and_started_again_too(ranks):
    lines = "if restarts() == 0: time.sleep(1); os.kill(os.getpid(), signal.SIGSTOP)"
    assert ranks(lines, count=1, max_restarts=1) == 0
    assert [(ended.rank, restart) for ended, restart in ranks.records] == [(0, 1)]


def test_the_variables_of_a_launcher_that_is_not_ours_mean_nothing(monkeypatch):
    monkeypatch.setenv("TANDEM_LAUNCHER", str(os.getppid() + 1))
    monkeypatch.setenv(RENDEZVOUS, "/nowhere/rendezvous")
    assert rank.failed_elsewhere() is None and rank.restarts() == 0
    with pytest.raises(KeyError), rank.telling_errors():
        raise KeyError("mine")


def test_a_rank_that_is_closing_is_left_to_it_and_its_word_is_not_said_twice(ranks, tmp_path, capfd):
    lines = """
try:
    with telling_errors():
        raise TandemError("loss.py failed")
except TandemError as error:
    if rank == "0":
        time.sleep(1.5)  # longer than the others are waited for
        (here / "closed").touch()
    print(f"error: {error}", file=sys.stderr)
    sys.exit(3)
"""
    assert ranks(lines) == 1
    assert (tmp_path / "closed").exists() and capfd.readouterr().err == "error: loss.py failed\n"
