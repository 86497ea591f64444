"""A run goes on when nobody takes what it prints; a command that is asked for words says that they are lost."""

import os
import pty
import subprocess
import sys
import time

import pytest

from tandem.state.existing import existing_run
from tests.tiny import tiny_model_folder

PRINTS = """
import os, sys
from tandem.cli import main, output
def command(_):
    if sys.argv[1] == "run":
        output.survive_lost_output()
    for word in ("first", "été…", "last"):
        print(word, flush=True)
        print(word, file=sys.stderr)
        if word == "first":
            sys.stdin.readline()
    os.write(int(sys.argv[2]), b"done")
    return 0
import argparse
sys.exit(main.run(command, argparse.Namespace(debug=False)))
"""


def closed_terminal():
    """A pseudo-terminal whose other side is closed after the first line, and what closes it."""
    ours, theirs = pty.openpty()
    return theirs, lambda: (os.read(ours, 5), os.close(ours))


def reader_that_leaves():
    """`head -1`: a pipe that is closed after the first line."""
    ours, theirs = os.pipe()
    return theirs, lambda: (os.read(ours, 5), os.close(ours))


def full_device():
    return os.open("/dev/full", os.O_WRONLY), lambda: None


def go(kind, output):
    """(status, whether the command came to its end, stderr if it is not lost)."""
    theirs, lose = output()
    ended, end = os.pipe()
    stderr = theirs if kind == "run" else subprocess.PIPE
    command = [sys.executable, "-c", PRINTS, kind, str(end)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=theirs, stderr=stderr, pass_fds=[end])
    os.close(theirs), os.close(end)
    lose()
    told = process.communicate(b"\n", timeout=60)[1]
    with os.fdopen(ended, "rb") as file:
        return process.returncode, file.read() == b"done", (told or b"").decode()


@pytest.mark.parametrize("output", [closed_terminal, reader_that_leaves, full_device])
def test_a_run_ends_as_ever_when_its_output_is_lost(output):
    assert go("run", output) == (0, True, "")


def test_other_commands_say_that_their_output_is_lost():
    status, ended, told = go("words", full_device)
    assert (status, ended) == (1, False)
    assert told == "error: the output of this command cannot be written: No space left on device\n"
    assert go("words", reader_that_leaves) == (1, False, "first\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_a_terminal_lacks_are_replaced(encoding, tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    with open(tmp_path / "end", "w") as file:
        command = [sys.executable, "-c", PRINTS, "words", str(file.fileno())]
        found = subprocess.run(command, input=b"\n", capture_output=True, env=environment, pass_fds=[file.fileno()])
    assert found.returncode == 0, found.stderr
    assert found.stdout == "first\nété…\nlast\n".encode(encoding, "replace")


def test_a_line_that_is_printed_is_there_at_once_where_the_user_asks_for_it():
    command = [sys.executable, "-u", "-c", PRINTS.replace(", flush=True", ""), "words", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"first\n"  # it waits for a word of ours before it prints more
        process.communicate(b"\n", timeout=60)


def items_of(tmp_path, steps):
    model = tiny_model_folder(tmp_path, "llama")
    items = [f"actor.path={model}", "train_dataset.path=addition", "train_dataset.size=16", "batch_size=4", "device=cpu"]
    return [*items, f"total_train_steps={steps}", f"run.root={tmp_path}", "experiment_name=a", "trial_name=b"]


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_whose_own_terminal_closes_is_saved_and_ends_as_interrupted(tmp_path):
    """A hang-up comes then, and what its handler says can no longer be written."""
    words = [sys.executable, "-m", "tandem", "sft", *items_of(tmp_path, 100_000)]
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, words)
    log = tmp_path / "a" / "b" / "log.txt"
    until = time.monotonic() + 120
    while not (log.is_file() and "step 2/" in log.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    found = existing_run(tmp_path / "a" / "b")
    assert found.status == "interrupted" and found.checkpoints == (f"step_{found.steps}",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "output", [pytest.param(closed_terminal, marks=pytest.mark.invariant), reader_that_leaves, full_device]
)
def test_training_is_finished_saved_and_told_in_the_log_when_its_terminal_is_lost(output, tmp_path):
    theirs, lose = output()
    command = [sys.executable, "-m", "tandem", "sft", *items_of(tmp_path, 3)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    lose()
    assert process.wait(timeout=120) == 0
    found = existing_run(tmp_path / "a" / "b")
    assert (found.status, found.steps) == ("finished", 3)
    assert "step 3/3" in (tmp_path / "a" / "b" / "log.txt").read_text()
