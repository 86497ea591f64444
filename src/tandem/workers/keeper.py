"""The keeper of one command: ``python keeper.py FD GRACE_S WHOM CPUS OUTPUT KEPT COMMAND…``, started as a separate process.

It starts the command, and ends it with all its descendants as soon as the pipe FD closes, which happens when the owner
closes the pipe or is killed. It adopts orphans, so that it also finds descendants in other sessions.

WHOM is ``all``, or ``command`` for a command that ends its descendants itself: only the command then gets SIGTERM. Whatever
is left after GRACE_S gets SIGKILL.
OUTPUT is the descriptor of the keeper that becomes the command's standard output. If it is 2, standard error, the keeper
prints the command's process id on its own standard output.
KEPT is empty or ``FD2:FILE``. With ``FD2:FILE`` the command is a server that can be kept: the owner writes a message (see
`KEEP`) to the pipe FD, and from then on the server outlives its owner, until the pipe FD2 closes or the keeper gets a
SIGTERM. FILE describes the server to other processes. The keeper writes it again if a cleaner of temporary files removes
it, so that no second server is started, and removes it when the server is to end.
The keeper imports only the standard library, so it needs little memory and starts fast.
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
from collections.abc import Collection

WATCH_S = 0.5
"""Seconds between two checks for events that no descriptor reports: the owner has ended while a process that it forked
still holds the pipe open, and FILE has been removed."""

KEEP, END = b"k", b"\n"
"""First and last byte of the message by which the owner lets its server outlive it. Between them is the content of FILE, one
line."""

ORPHANS_S = 0.5
"""Seconds that the children of a server that ended by itself have to end after SIGTERM, before they are killed."""

KILL_S = 5.0
"""Seconds to wait until a killed process has ended."""

NOT_STARTED = 127
"""Exit status of the keeper of a command that could not be started, as in a shell."""

FREEZE_ROUNDS = 200
"""Maximum rounds of SIGSTOP. Each round stops the processes that were forked during the previous round; few are needed."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    """Calls prctl. Does nothing on systems without it; there, only the command itself is ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants (Linux), so that detached ones are still found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> set[int]:
    """Returns the process ids of a process's children, of all its threads; empty if it has ended."""
    if sys.platform != "linux":
        listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, check=False)
        return set(map(int, listed.stdout.split()))
    children: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children.update(map(int, file.read().split()))
    return children


def descendants(pid: int) -> set[int]:
    """Returns the process ids of all descendants of ``pid``."""
    children = children_of(pid)
    return children.union(*map(descendants, children))


def _signal(pids: Collection[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_below(spare: Collection[int] = ()) -> None:
    """Kills all descendants of this process, which must have called `adopt_orphans`. ``spare``: ids of children that are
    not killed; neither are their descendants.

    All processes are stopped before any is killed: a stopped process cannot fork, and no process is orphaned while others
    are still being looked for.
    """
    stopped: set[int] = set()
    for _ in range(FREEZE_ROUNDS):
        children = children_of(os.getpid()).difference(spare)
        new = children.union(*map(descendants, children)) - stopped
        if not new:
            break
        _signal(new, signal.SIGSTOP)
        stopped |= new
    _signal(stopped, signal.SIGKILL)


def end(main: "subprocess.Popen[bytes]", grace_s: float, whom: str) -> None:
    """Ends the command and its descendants: with SIGTERM for WHOM (unless ``grace_s`` is 0), and after ``grace_s`` seconds
    with SIGKILL."""
    deadline = time.monotonic() + grace_s
    if grace_s:
        main.terminate()
        if whom == "all":
            _signal(descendants(os.getpid()) - {main.pid}, signal.SIGTERM)
    while not _is_alone(main) and time.monotonic() < deadline + KILL_S:
        if late := time.monotonic() >= deadline:
            kill_below()
            main.kill()
        time.sleep(0.002 if late else 0.02)


def _is_alone(main: "subprocess.Popen[bytes]") -> bool:
    """Returns True if all descendants have ended. Reaps orphans that have ended; `Popen` reaps the command."""
    main.poll()
    for pid in children_of(os.getpid()) - {main.pid}:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return main.returncode is not None and not children_of(os.getpid())


def _prepare(cpus: set[int]) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends the command if the keeper itself is killed
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the keeper ignores it, and the command would inherit that
    if cpus:
        os.sched_setaffinity(0, cpus)


def watch(
    main: "subprocess.Popen[bytes]",
    pipe: int,
    woken: int,
    owner: int,
    place: tuple[int, str] | None,
    signals: list[int],
) -> None:
    """Waits until the command has ended or is to end.

    Args:
        main: the command.
        pipe: the pipe from the owner, FD.
        woken: a pipe that becomes readable after a signal.
        owner: process id of the owner.
        place: FD2 and FILE, if the command is a server that can be kept.
        signals: signals received; any signal ends the wait.
    """
    words: bytes | None = None
    while main.poll() is None and not signals:
        ready = _readable(WATCH_S, pipe, woken)
        if woken in ready:
            os.read(woken, 4096)
            _is_alone(main)
        elif ready:  # the pipe was closed, or the owner sent a message
            if words is not None or place is None or (words := hear(pipe)) is None:
                return
            pipe = place[0]
        elif words is None and os.getppid() != owner:  # needed if a process that the owner forked holds the pipe open
            return
        elif place is not None and words is not None and not os.path.exists(place[1]):
            remember(place[1], words)


def _readable(timeout_s: float, *descriptors: int) -> set[int]:
    """Returns the descriptors that have data or were closed at the other end. Uses `poll`, because `select.select` refuses
    descriptors from 1024 on, and the pipe has the same number as in its owner."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}


def hear(pipe: int) -> bytes | None:
    """Reads the owner's message and returns the content for FILE, without `KEEP` and `END`. Returns None if the owner closes
    the pipe before the message is complete, or sends something else."""
    words = b""
    while not words.endswith(END):
        chunk = os.read(pipe, 65536)
        if not chunk:
            return None
        words += chunk
    return words[len(KEEP) : -len(END)] if words.startswith(KEEP) else None


def is_private(folder: str | os.PathLike[str]) -> bool:
    """Returns True if the path is a folder of this user that no other user can read or write. Raises `OSError` if it does
    not exist."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def remember(file: str, words: bytes) -> None:
    """Writes FILE again, readable by this user only. Errors are ignored, because `watch` soon tries again."""
    folder, partial = os.path.dirname(file), f"{file}.again"
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        if not is_private(folder):
            return  # another user has created the folder
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        # O_EXCL and O_NOFOLLOW: in a shared temporary folder another user might have created a link with this name
        with open(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o600), "wb") as new:
            new.write(words)
        os.rename(partial, file)


def forget(file: str, end_of_all: int) -> None:
    """Removes FILE. Removes its folder too if the pipe ``end_of_all`` (FD2) is closed, because then no other process
    will."""
    with contextlib.suppress(OSError):
        os.unlink(file)
    with contextlib.suppress(OSError):
        if _readable(0, end_of_all):
            os.rmdir(os.path.dirname(file))  # fails while the folder has another server's file


def main() -> int:
    """Entry point. Returns the command's exit status in the shell's convention: 128 + n if signal n ended it."""
    pipe, grace_s, whom, output = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], int(sys.argv[5])
    cpus = {int(cpu) for cpu in sys.argv[4].split(",") if cpu}
    end_of_all, _, file = sys.argv[6].partition(":")
    command = sys.argv[7:]
    signals: list[int] = []
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    # Ctrl-C reaches the whole process group; the owner decides when the server ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # orphans of the server become this process's children, so that it can find and end them
    adopt_orphans()
    owner = os.getppid()
    try:
        process = subprocess.Popen(command, stdout=output, preexec_fn=lambda: _prepare(cpus))
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
        return NOT_STARTED
    if output != 1:
        with contextlib.suppress(BrokenPipeError):  # the owner has ended
            os.write(1, f"{process.pid}\n".encode())
    os.closerange(0, 2)  # so that the owner's socket reports its end as soon as the command ends
    watch(process, pipe, woken, owner, (int(end_of_all), file) if file else None, signals)
    if file:
        forget(file, int(end_of_all))
    # After a server that ended by itself, wait only briefly for its children: the owner waits for the keeper's exit.
    end(process, grace_s if process.poll() is None else min(grace_s, ORPHANS_S), whom)
    status = process.returncode
    return 1 if status is None else 128 - status if status < 0 else status


if __name__ == "__main__":
    os._exit(main())  # skips the interpreter's cleanup, because the owner waits
