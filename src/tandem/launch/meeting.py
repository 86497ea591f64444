"""The temporary folder in which the ranks of a launcher meet, and what launchers that were killed have left of theirs."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "tandem-ranks-"

LOCK = "launcher"
"""A file in it that is locked as long as its launcher lives, or a rank."""


@dataclass(frozen=True)
class Meeting:
    """A folder, and the open file that keeps it: it is for those who inherit that, too."""

    folder: Path
    lock: int


@contextlib.contextmanager
def meeting_folder() -> Iterator[Meeting]:
    """An empty folder of this process' own, gone after the block; where this process is killed, with the next launcher,
    once the ranks, which may outlive theirs for a while, are gone too."""
    remove_left()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        with (folder / f".{LOCK}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f".{LOCK}").rename(folder / LOCK)  # nobody sees it before it is locked
            yield Meeting(folder, lock.fileno())


def remove_left() -> None:
    """Removes folders of this user's launchers that are dead, and whose ranks are. One without a lock is left alone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else removes it at this moment, or may not be asked
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and _is_left(folder / LOCK):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(file: Path) -> bool:
    """Raises `OSError` where there is no such lock."""
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
