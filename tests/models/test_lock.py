"""Two first runs: the second waits for the first, says for whom, and not for ever."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tandem.api.failures import WaitTimeout
from tandem.api.shared_files import locked, make_once

HOLDS = """
import os, sys, time
from pathlib import Path
from tandem.api.shared_files import locked
with locked(Path(sys.argv[1]), "it"):
    if sys.argv[3] == "forks" and os.fork() == 0:
        os.write(1, f"{os.getpid()}\\n".encode())  # whole lines: two processes write them
        time.sleep(60)
        os._exit(0)
    os.write(1, b"held\\n")
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds ``tmp_path/model.lock``; returns it and the lines that it said."""
    started = []

    def start(seconds, forks=False):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(tmp_path / "model.lock"), str(seconds), "forks" if forks else "alone"],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        lines = {process.stdout.readline().strip() for _ in range(1 + forks)}
        assert "held" in lines
        return process, lines - {"held"}

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_second_waits_and_says_for_what_and_for_whom(tmp_path, holder, capsys):
    process, _ = holder(1.5)
    with locked(tmp_path / "model.lock", "the model", say_every_s=0.3):
        assert process.wait(60) == 0
    said = capsys.readouterr().err
    assert f"Waiting for the model: process {process.pid} on " in said
    assert said.count("Waiting for the model") >= 2


def test_a_holder_that_does_not_end_is_waited_for_so_long_and_named_with_the_remedy(tmp_path, holder):
    process, _ = holder(60)
    began = time.monotonic()
    expected = rf"the model.*process {process.pid} .*end it.*remove .*model\.lock"
    with pytest.raises(WaitTimeout, match=expected), locked(tmp_path / "model.lock", "the model", patience_s=0.5):
        pytest.fail("two hold it")
    assert time.monotonic() - began < 40


@pytest.mark.parametrize("forks", [False, True])
def test_a_lock_whose_holder_was_killed_blocks_nobody(tmp_path, holder, forks):
    process, children = holder(60, forks)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    try:
        began = time.monotonic()
        make_once(tmp_path / "model", lambda partial: (partial / "file").write_text("whole"))
        assert time.monotonic() - began < 40
        assert (tmp_path / "model" / "file").read_text() == "whole"
        for child in children:
            os.kill(int(child), 0)  # the one that it had forked still has the file open
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)
