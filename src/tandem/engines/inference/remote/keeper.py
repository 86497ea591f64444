"""Keeps one server: ``python keeper.py FD GRACE_S CPUS KEPT COMMAND…``, run by `launch.py` in a process of its own.

It starts the command and ends it, with everything that descends from it, as soon as the pipe FD closes: that is when its
owner closes it, and also when the owner was killed. It adopts orphans, so a grandchild in another session is found too.

KEPT is empty, or ``FD2:FILE``. Then the owner may write its word (`KEEP`) to its pipe: from then on the server outlives it,
until the pipe FD2 closes or the keeper gets a SIGTERM. FILE, which tells others of the server, is written again if a cleaner
of temporary files removes it, so that nobody starts a second one beside it, and removed as soon as the server is to end.
Only the standard library is imported: a keeper costs little memory and starts at once.
"""

import contextlib
import ctypes
import os
import select
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

WATCH_S = 0.1
KEEP, END = b"k", b"\n"
"""The owner's word that its server is to outlive it: what FILE holds, one line, between these."""

ORPHANS_S = 0.5
"""Seconds for which the children of a server that ended by itself are asked to end."""

KILL_S = 5.0
"""Seconds that a killed process may take to vanish."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    """Does nothing where there is no such call; the process group is then all that is ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``, its children first."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += [int(word) for word in file.read_text().split()]
    return children + [grandchild for child in children for grandchild in descendants(child)]


def end(main: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Ends the command and its descendants: first kindly, and after ``grace_s`` all that is left."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
        for pid in dict.fromkeys([main.pid, *descendants(os.getpid())]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            main.poll()
            _reap(main.pid)
            if main.returncode is not None and not descendants(os.getpid()):
                return
            time.sleep(0.02)


def _reap(main: int) -> None:
    """Collects orphans that were adopted; the command itself is left to its `Popen`."""
    for pid in descendants(os.getpid()):
        if pid != main:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _prepare(cpus: set[int]) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the keeper itself be killed
    if cpus:
        os.sched_setaffinity(0, cpus)


def watch(
    main: "subprocess.Popen[bytes]", pipe: int, owner: int, place: "tuple[int, Path] | None", signals: list[int]
) -> None:
    """Returns when the command has ended or is to end. ``place``: FD2 and FILE."""
    words: bytes | None = None
    while main.poll() is None and not signals:
        if select.select([pipe], [], [], WATCH_S)[0]:  # closed, unless the owner said a word
            if words is not None or place is None or (words := hear(pipe)) is None:
                return
            pipe = place[0]
        elif words is None and os.getppid() != owner:  # what it forked may hold the pipe open
            return
        elif place is not None and words is not None and not os.path.exists(place[1]):
            remember(place[1], words)


def hear(pipe: int) -> bytes | None:
    """The owner's word, without `KEEP`; None where it closes the pipe before the end of it."""
    words = b""
    while not words.endswith(END):
        chunk = os.read(pipe, 65536)
        if not chunk:
            return None
        words += chunk
    return words[len(KEEP) : -len(END)] if words.startswith(KEEP) else None


def is_private(folder: Path) -> bool:
    """True if it is a folder of this user's into which nobody else can look or write. Raises `OSError` where nothing is."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def remember(file: Path, words: bytes) -> None:
    """Writes the word of a server again, for this user alone; where that cannot be done now, it is tried again soon."""
    partial = file.with_suffix(".again")
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            file.parent.mkdir(mode=0o700)
        if not is_private(file.parent):
            return  # somebody else has made it since
        partial.unlink(missing_ok=True)
        # O_EXCL and O_NOFOLLOW: in a shared temporary folder somebody else might have put a link there
        with open(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o600), "wb") as new:
            new.write(words)
        partial.rename(file)


def forget(file: Path, end_of_all: int) -> None:
    """Removes the word of a server, and the folder where nobody is left to do it."""
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)
        if select.select([end_of_all], [], [], 0)[0]:
            file.parent.rmdir()  # refused while another one has its file there


def main() -> int:
    """Entry point; the exit status is the command's, as a shell would give it."""
    pipe, grace_s, cpus = int(sys.argv[1]), float(sys.argv[2]), {int(cpu) for cpu in sys.argv[3].split(",") if cpu}
    end_of_all, _, file = sys.argv[4].partition(":")
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    # Ctrl-C reaches the whole group; the owner decides when the server ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # orphans of the server become this process's children, so that it can find and end them
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    owner = os.getppid()
    process = subprocess.Popen(sys.argv[5:], stdout=sys.stderr.fileno(), preexec_fn=lambda: _prepare(cpus))
    os.write(1, f"{process.pid}\n".encode())
    os.close(1)
    watch(process, pipe, owner, (int(end_of_all), Path(file)) if file else None, signals)
    if file:
        forget(Path(file), int(end_of_all))
    # A server that ended by itself has no use for patience, and its owner waits to hear of it.
    end(process, grace_s if process.poll() is None else min(grace_s, ORPHANS_S))
    status = process.returncode
    return 1 if status is None else 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
