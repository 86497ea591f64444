"""The folder in which ranks meet is gone with its launcher, or with the next one."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tandem.launch.local import LOCK, PREFIX, meeting_folder, remove_left, run_ranks
from tests.zygote import gone

LAUNCHER = """
import sys
from tandem.launch.local import run_ranks
run_ranks([sys.executable, "-c", "import time; time.sleep(60)"], 1)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def launch(temporary):
    """Starts a launcher; (its process, its folder)."""
    started = []

    def start():
        there = set(temporary.iterdir())
        started.append(subprocess.Popen([sys.executable, "-c", LAUNCHER], start_new_session=True))
        until(lambda: any((path / LOCK).exists() for path in set(temporary.iterdir()) - there))
        (folder,) = set(temporary.iterdir()) - there
        return started[-1], folder

    yield start
    for process in started:
        process.terminate()
        process.wait(30)


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_what_a_killed_launcher_left_is_removed_by_the_next_and_nothing_that_lives(launch, temporary, tmp_path):
    (killed, left), (_, lives) = launch(), launch()
    until(lambda: psutil.Process(killed.pid).children())
    (rank,) = psutil.Process(killed.pid).children()
    killed.kill()
    killed.wait()
    remove_left()
    assert rank.is_running() and (left / LOCK).exists()  # its rank may still need it
    rank.kill()
    until(lambda: gone(rank))
    for folder in (temporary / f"{PREFIX}without", tmp_path / "mine"):
        folder.mkdir()
    (tmp_path / "mine" / LOCK).touch()
    (temporary / f"{PREFIX}link").symlink_to(tmp_path / "mine")
    (temporary / "mine").symlink_to(tmp_path / "mine")
    (temporary / f"{PREFIX}file").touch()
    kept = set(temporary.iterdir()) - {left}

    assert run_ranks([sys.executable, "-c", "pass"], 1) == 0
    assert set(temporary.iterdir()) == kept and lives in kept and (lives / LOCK).exists()
    assert (tmp_path / "mine" / LOCK).exists()


def test_a_lock_that_is_none_holds_nobody_up(temporary):
    folder = temporary / f"{PREFIX}odd"
    folder.mkdir()
    os.mkfifo(folder / LOCK)  # opening it must not wait for a writer
    Path(temporary / f"{PREFIX}loop").mkdir()
    Path(temporary / f"{PREFIX}loop" / LOCK).symlink_to(LOCK)
    remove_left()
    assert (temporary / f"{PREFIX}loop").exists()


def test_the_folder_is_there_for_the_block_only_and_for_its_owner_alone(temporary):
    with meeting_folder() as meeting:
        remove_left()
        assert [path.name for path in meeting.folder.iterdir()] == [LOCK]
        assert meeting.folder.stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []
