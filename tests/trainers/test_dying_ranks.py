"""A real run on several ranks: one of them dies, or the command does."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.zygote import gone

pytestmark = [pytest.mark.slow, pytest.mark.invariant]


@pytest.fixture
def run(model, tmp_path):
    """A run of fine-tuning on two ranks that has made its first step; the process and those of the ranks, in order."""
    items = [f"run.root={tmp_path}", f"actor.path={model}", "train_dataset.path=addition", "batch_size=4", "threads=1"]
    items += ["actor.backend=fsdp:d2", "actor.dtype=float32", "total_train_steps=100000", "trial_name=dying"]
    said = (tmp_path / "said.txt").open("w+")
    process = subprocess.Popen([sys.executable, "-m", "tandem", "sft", *items], stdout=said, stderr=said)
    process.said = said
    try:
        metrics = tmp_path / "tandem/dying/metrics.jsonl"
        deadline = time.monotonic() + 200
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "said.txt").read_text()
            time.sleep(0.1)
        ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: int(child.environ()["RANK"]))
        yield process, ranks
    finally:
        process.kill()
        process.wait(60)
        said.close()


def words(process) -> str:
    process.said.seek(0)
    return process.said.read()


def test_a_rank_that_is_killed_ends_the_run_within_seconds_and_is_named(run):
    process, ranks = run
    began = time.monotonic()
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert process.wait(100) == 1
    assert time.monotonic() - began < 60
    assert "rank 1 of 2 ended by signal SIGKILL" in words(process)
    assert all(gone(rank) for rank in ranks)


def test_ctrl_c_ends_all_ranks_and_says_where_the_files_are(run):
    process, ranks = run
    process.send_signal(signal.SIGINT)
    assert process.wait(100) == 130
    assert "Interrupted." in words(process) and "Traceback" not in words(process)
    assert all(gone(rank) for rank in ranks)


def test_ranks_do_not_outlive_the_command(run):
    process, ranks = run
    process.kill()
    ended, alive = psutil.wait_procs(ranks, timeout=45)
    assert len(ended) == 2 and not alive
