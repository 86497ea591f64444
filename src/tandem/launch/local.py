"""Starts trainer ranks on this machine, watches them, ends them together, and restarts them.

Each rank runs the same command in its own process and session, with the environment variables that torchrun also sets. The
ranks find each other through a file, so they need no port. Rank 0 prints to the terminal; the output of another rank is
shown if it fails.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from tandem.launch.place import RENDEZVOUS, RESTARTS, TELL, Place, rank_environment
from tandem.launch.watch import SILENT_S, WEDGED_S, Fault, LaunchEnd, RankReport, Record, Watch, waits_for_disk, work_of
from tandem.workers.process import Child

PREFIX = "tandem-ranks-"

LOCK = "launcher"
"""Name of a file in the launcher's folder. It is locked as long as the launcher or one of its ranks lives."""


@dataclass(frozen=True)
class Meeting:
    """The folder through which a launcher and its ranks communicate, and the descriptor of its lock. Ranks inherit the
    descriptor, so that the lock is held until they have ended too."""

    folder: Path
    lock: int


@contextlib.contextmanager
def meeting_folder() -> Iterator[Meeting]:
    """Creates an empty folder for this launcher, and removes the folder after the block. If this process is killed, a later
    launcher removes the folder when the ranks have ended too."""
    remove_left()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        with (folder / f".{LOCK}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f".{LOCK}").rename(folder / LOCK)  # so that no other launcher sees the file before it is locked
            yield Meeting(folder, lock.fileno())


def remove_left() -> None:
    """Removes folders that earlier launchers of this user left behind. A folder is removed if it has a lock file and no
    process holds that lock, because then the launcher and all its ranks have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process is removing it, or it cannot be read
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and _is_left(folder / LOCK):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(file: Path) -> bool:
    """Returns True if no process holds this lock file. Raises `OSError` if the file cannot be opened."""
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


ONCE_S = 2.0
"""Signals within this time count as one request: a closed terminal makes both the shell and the kernel send one, and a
signal may go to the process group and then to each process."""

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def each_request_once() -> Iterator[None]:
    """Within the block, a request to end raises `KeyboardInterrupt` once, even if several signals deliver it (see `ONCE_S`).
    Ignored signals stay ignored."""
    counted_at = -ONCE_S
    before: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal counted_at
        now = time.monotonic()
        if now - counted_at >= ONCE_S:
            counted_at = now
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in REQUESTS}
    handled = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler or signal.SIG_DFL)


KEPT = "TANDEM_KEPT"
"""The environment variable that passes both ends of the pipe and the folder to rank 0."""

END_S = 20.0
"""Seconds that all servers together may take to end. Each keeper gives its server 8 s between SIGTERM and SIGKILL."""


class KeptServers:
    """Servers of one run that outlive the ranks that started them, so that restarted ranks need not wait for new servers.
    After `close` all of them have ended.

    Each server is the child of a *keeper*, a process that ends the server when a pipe is closed. The keepers have the read
    end of this pipe; only the launcher and rank 0 have the write end. So the servers end when both the launcher and rank 0
    have ended or been killed. For each server that is ready, rank 0 writes a file ``NAME.json`` with the keeper's process id
    into `folder`.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.gettempdir()) / f"tandem-servers-{uuid.uuid4().hex}"
        """Rank 0 creates this folder if it keeps a server."""

        self.pipe = os.pipe()

    def environment(self) -> dict[str, str]:
        """Returns the environment variable `KEPT` for rank 0."""
        return {KEPT: ":".join(map(str, (*self.pipe, self.folder)))}

    def processes(self) -> list[psutil.Process]:
        """Returns the keepers of all kept servers, and all their descendants."""
        return [process for server in self._servers() for process in server.processes()]

    def close(self) -> None:
        """Ends all kept servers: with SIGTERM, and after `END_S` or Ctrl-C with SIGKILL. Removes the folder."""
        servers, everybody = self._servers(), self.processes()
        for end in self.pipe:
            os.close(end)
        try:
            for server in servers:
                server.terminate()
            deadline = time.monotonic() + END_S
            while any(server.alive for server in servers) and time.monotonic() < deadline:
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            pass
        finally:
            for process in everybody:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _servers(self) -> list[Child]:
        found = []
        for file in self.folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found.append(Child.reopen(file)[0])
        return found


FAILED, ERROR, STACKS = "failed", "error-{rank}.json", "stacks-{rank}.txt"
"""Files in the launcher's folder: why all ranks are ended, and by when; the error of a rank; the stacks of a rank."""

STACKS_SIGNAL = signal.SIGUSR2
"""The signal on which a rank writes the stacks of all its threads to a file."""

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130
EXIT_FINAL = 3
"""Exit status by which a rank tells its launcher that it failed and would fail again. The launcher returns `EXIT_FAILED`."""

WATCH_S = 0.05
FAULT_TERM_S = 3.0
"""Seconds that replace `Patience.term_s` if a rank does not answer or makes no progress, because such a group must end
within 30 s in all."""

KILL_S = 5.0
INTERRUPT_S = 60.0
"""Seconds that an interrupted run may take to close, beyond `recover.grace_s`."""

STACKS_S = 2.0
HELD_S = 0.5
"""A silent rank that has used less processor time than this, in seconds, since its last report is idle."""

SHOWN_LINES = 25
FOLLOWERS = ("RankFailed",)
"""Names of the errors that ranks raise because another rank has failed."""


@dataclass(frozen=True)
class Patience:
    """Time limits of a launcher, in seconds."""

    fail_s: float = 5.0
    """Seconds that the other ranks have to end by themselves after the first failure, so that those that fail too can report
    their own errors."""

    term_s: float = 10.0
    """Seconds that all ranks have to end after SIGTERM."""

    left_s: float = 10.0
    """Seconds that servers and workers have to notice that their ranks have ended."""

    restart_s: float = 1.0
    """Seconds between the end of a group and its restart."""

    silent_s: float = SILENT_S
    """`silent_s` and `wedged_s`: see `Watch`."""

    wedged_s: float = WEDGED_S


USUAL = Patience()


def is_rank() -> bool:
    """Returns True if a launcher (Tandem's or torchrun) started this process as a rank."""
    return "WORLD_SIZE" in os.environ


def run_ranks(
    command: Sequence[str],
    count: int,
    *,
    stalled_after_s: float | None = None,
    max_restarts: int = 0,
    grace_s: float = 0.0,
    record: Record = lambda ended, restart: None,
    patience: Patience = USUAL,
    place: Place | None = None,
) -> int:
    """Runs ``command`` on ``count`` ranks and returns the exit status: 0, or that of the rank that failed.

    Ctrl-C and SIGTERM (as `KeyboardInterrupt`) are passed on to the ranks; a second one ends all ranks at once. When this
    returns, all ranks and all processes that they started have ended. Servers that the ranks keep outlive a group of ranks,
    but end before this returns.

    Args:
        command: the command of each rank.
        count: number of ranks on this machine.
        stalled_after_s: see `Watch`.
        max_restarts: how often a failed group is restarted. It is not restarted after a failure that would occur again (an
            invalid configuration, an error in a user's function, a full disk).
        grace_s: seconds that an interrupted rank may take to finish its step.
        record: called with each failure, and with the number of the restart that follows it.
        patience: time limits.
        place: the place of these ranks if the run has other groups of ranks, on this machine or others.
    """
    restarts = 0
    if place is not None:  # a group may wait long for ranks of other groups, which it cannot watch
        patience = replace(patience, wedged_s=math.inf)
    try:
        with each_request_once(), contextlib.closing(KeptServers()) if max_restarts else contextlib.nullcontext() as kept:
            while True:
                waits = {"silent_s": patience.silent_s, "wedged_s": patience.wedged_s}
                first, world = (place.first, place.world) if place else (0, count)
                watch = Watch(count, stalled_after_s, **waits, first=first, world=world)
                with (
                    meeting_folder() as meeting,
                    contextlib.closing(RankProcesses(meeting, watch, kept, patience, place)) as ranks,
                ):
                    try:
                        ranks.start(command, count, restarts)
                        ended = ranks.watch()
                    except KeyboardInterrupt:
                        ended = ranks.interrupt(grace_s)
                again = ended.may_pass and restarts < max_restarts
                restarts += again
                if ended.cause and ended.code != EXIT_INTERRUPTED:
                    record(ended, restarts if again else None)
                if not again:
                    return ended.code
                print(f"starting again from the last checkpoint, restart {restarts} of {max_restarts}", file=sys.stderr)
                time.sleep(patience.restart_s)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class RankProcesses:
    """The rank processes of one group, from their start to their end.

    They are not of the class `Child`: a keeper ends all processes below its own, but servers that rank 0 keeps outlive rank
    0. Instead, each rank ends itself when this process ends (`tandem.launch.rank.follow_launcher`).
    """

    def __init__(
        self,
        meeting: Meeting,
        watch: Watch,
        kept: KeptServers | None = None,
        patience: Patience = USUAL,
        place: Place | None = None,
    ):
        """``kept``: the kept servers, which outlive the group. Methods number the ranks of this group from 0."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._place, self._first = place, place.first if place else 0
        self._meeting, self._watch, self._kept, self._patience = meeting, watch, kept, patience
        self._pipes: list[int] = []
        self._words: dict[int, bytes] = {}

    def start(self, command: Sequence[str], count: int, restarts: int = 0) -> None:
        # if this process is itself a rank, its kept servers and its store are not passed on
        outer = {name: value for name, value in os.environ.items() if name not in (KEPT, "MASTER_ADDR", "MASTER_PORT")}
        for rank in range(count):
            with contextlib.ExitStack() as stack:
                said: IO[bytes] | None = None if rank == 0 else stack.enter_context(self._output(rank).open("wb"))
                read, write = os.pipe()
                stack.callback(os.close, write)
                self._pipes.append(read)
                for end in (read, write):
                    os.set_blocking(end, False)
                variables = rank_environment(rank, count, self._meeting.folder / "rendezvous", self._place)
                kept = None if rank else self._kept
                if kept is not None:
                    variables |= kept.environment()
                self.processes.append(
                    subprocess.Popen(
                        list(command),
                        env=outer | variables | {TELL: str(write), RESTARTS: str(restarts)},
                        stdin=None if rank == 0 else subprocess.DEVNULL,
                        stdout=said,
                        stderr=said and subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C reaches the ranks only through this process, once
                        pass_fds=[write, self._meeting.lock, *(kept.pipe if kept is not None else ())],
                    )
                )

    def watch(self) -> LaunchEnd:
        """Waits until all ranks have ended, and returns how. If a rank fails, does not answer or makes no progress, all are
        ended."""
        while not self._failed() and self._alive():
            time.sleep(WATCH_S)
            self._listen()
            fault = self._watch.look(time.monotonic(), self._is_held)
            if fault is not None and not self._failed():
                return self._end_fault(fault)
        if not self._failed():
            return LaunchEnd(0)
        self._wait(self._patience.fail_s)
        failed = {rank: self.processes[rank].returncode for rank in self._failed()}
        # rank 0 may have reported its error and still be closing
        errors = {rank: self._error(rank) for rank in {0, *failed}}

        def order(rank: int) -> tuple[Any, ...]:
            """Sort key for the cause of the failure: first ranks that a signal killed, last `FOLLOWERS`; among the others
            the earliest error."""
            error = errors[rank]
            return (failed[rank] > 0, error.get("kind") in FOLLOWERS, error.get("at", 0.0), rank == 0, rank)

        cause = min(failed, key=order)
        text = self._explained(cause, failed, errors)
        self._end_all(text)
        code = max(failed[cause], 0) or EXIT_FAILED
        final = code in (EXIT_CONFIG, EXIT_FINAL, EXIT_INTERRUPTED)
        ended = self._ended(EXIT_FAILED if code == EXIT_FINAL else code, text, self._first + cause, may_pass=not final)
        raised = errors[cause].get("at")
        return ended if raised is None else replace(ended, at=time.time() - time.monotonic() + raised)

    def interrupt(self, grace_s: float = 0.0) -> LaunchEnd:
        """Asks all ranks to close, waits up to ``grace_s`` + `INTERRUPT_S` seconds, and kills those that are left."""
        with contextlib.suppress(KeyboardInterrupt):
            self._signal(signal.SIGTERM)  # not SIGINT, which ranks ignore if a shell started the launcher in the background
            self._wait(grace_s + INTERRUPT_S)
        left = self._alive()
        if not left and not self._failed():
            return LaunchEnd(0)  # the run finished its last step
        code = self.processes[0].returncode if self.processes and not left else None
        self.kill()
        if left:
            self._end_left()
        failed = code is not None and code > 0 and code != EXIT_INTERRUPTED  # for example, the last save failed
        return LaunchEnd(EXIT_FAILED if failed else EXIT_INTERRUPTED)

    def close(self) -> None:
        """Kills remaining ranks, and closes the pipes. Idempotent."""
        self.kill()
        while self._pipes:
            os.close(self._pipes.pop())

    def kill(self) -> None:
        """Kills remaining ranks and other processes in their sessions. Idempotent."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # with a disk that hangs, the kernel ends the process later
                process.wait(KILL_S)

    def _end_fault(self, fault: Fault) -> LaunchEnd:
        """Ends a group with a rank that does not answer or makes no progress. The result has the stacks of all ranks."""
        places = self._watch.describe()
        print(f"error: {fault.text}\n{places}", file=sys.stderr)
        for number in (STACKS_SIGNAL, signal.SIGCONT):  # a stopped rank can only write after SIGCONT
            self._signal(number)
        deadline = time.monotonic() + STACKS_S
        while time.monotonic() < deadline and not all(self._stacks(rank) for rank in self._alive()):
            time.sleep(WATCH_S)
        time.sleep(WATCH_S)  # the last rank may still be writing
        ranks = range(len(self.processes))
        stacks = "\n".join(f"--- rank {self._first + rank}\n{self._stacks(rank)}" for rank in ranks)
        self._end_all(fault.text, FAULT_TERM_S)
        stacks = f"{fault.text}\n\n{places}\n\n{stacks}"
        return self._ended(EXIT_FAILED, fault.text, fault.rank, may_pass=True, stacks=stacks)

    def _end_all(self, cause: str, patience_s: float | None = None) -> None:
        """Tells the remaining ranks the cause, lets them close for ``patience_s`` seconds (None: ``term_s``), and then ends
        them and all processes that they started."""
        patience_s = self._patience.term_s if patience_s is None else patience_s
        with contextlib.suppress(OSError):  # on a full disk the ranks learn no cause, and end as after Ctrl-C
            partial = self._meeting.folder / f".{FAILED}"
            words = {"cause": cause, "until": time.monotonic() + patience_s}
            partial.write_text(json.dumps(words), encoding="utf-8")
            partial.rename(self._meeting.folder / FAILED)
        for rank in self._alive():
            if not self._error(rank):  # a rank with an error is closing already
                self.processes[rank].send_signal(signal.SIGTERM)
        self._wait(patience_s)
        self.kill()
        self._end_left()

    def _ended(self, code: int, cause: str, rank: int, *, may_pass: bool, stacks: str = "") -> LaunchEnd:
        watch = self._watch
        return LaunchEnd(code, cause, rank, stacks, may_pass, watch.step, watch.has_folder)

    def _explained(self, rank: int, failed: dict[int, int], errors: dict[int, dict[str, Any]]) -> str:
        """Returns why the group ended, and prints it unless rank 0 has printed it. A rank that ended without an error was
        killed, or a library or a user's code called `os._exit`."""
        code = failed[rank]
        how = f"with exit status {code}" if code > 0 else f"by signal {signal.Signals(-code).name}"
        if not errors[rank]:
            how += f"{' and raised no error' if code > 0 else ''}{self._watch.during(rank)}"
        name = f"rank {self._first + rank} of {self._place.world if self._place else len(self.processes)}"
        text = str(errors[rank].get("text") or f"{name} ended {how}")
        heard = bool(errors[rank]) and (rank == 0 or errors[0].get("text") == errors[rank].get("text"))
        refused = 0 in failed and not errors[0] and set(failed.values()) == {EXIT_CONFIG}
        if (heard and code > 0) or refused:
            return text
        print(f"error: {name} ended {how}, and all other ranks with it", file=sys.stderr)
        if -code == signal.SIGKILL:
            print(
                "The system kills a process when memory runs out: lower actor.max_tokens_per_micro_batch, or spread the "
                "model over more ranks or machines",
                file=sys.stderr,
            )
        if rank:
            lines = self._output(rank).read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            print("".join(f"  rank {self._first + rank} | {line}\n" for line in lines), end="", file=sys.stderr)
        return text

    def _listen(self) -> None:
        """Reads the ranks' new reports and passes the newest of each rank to the watch."""
        for rank, pipe in enumerate(self._pipes):
            with contextlib.suppress(BlockingIOError):
                self._words[rank] = self._words.get(rank, b"") + os.read(pipe, 65536)
            *lines, self._words[rank] = self._words.get(rank, b"").split(b"\n")
            if lines:
                with contextlib.suppress(psutil.Error, ValueError):
                    used = work_of(self.processes[rank].pid, whole=self._watch.stands(rank))
                    self._watch.hear(rank, RankReport.of(json.loads(lines[-1])), used)

    def _is_held(self, rank: int, seconds: float) -> bool:
        """Returns True if a rank's process is stopped, or sleeps and is idle. ``seconds``: its processor time at its last
        report. False for a rank that waits for a slow disk."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.processes[rank].pid)
            stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            idle = work_of(process.pid).seconds - seconds < HELD_S
            return stopped or (idle and process.status() == psutil.STATUS_SLEEPING and not waits_for_disk(process))
        return False

    def _error(self, rank: int) -> dict[str, Any]:
        """Returns the error that a rank has written to its file; empty if there is none."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self._meeting.folder / ERROR.format(rank=self._first + rank)).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    def _stacks(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return (self._meeting.folder / STACKS.format(rank=self._first + rank)).read_text(errors="replace")
        return ""

    def _output(self, rank: int) -> Path:
        return self._meeting.folder / f"rank-{rank}.txt"

    def _alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def _failed(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll()]

    def _signal(self, number: int) -> None:
        for rank in self._alive():
            self.processes[rank].send_signal(number)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._alive() and time.monotonic() < deadline:
            time.sleep(WATCH_S)

    def _end_left(self) -> None:
        """Waits until the servers and workers that the ranks started have ended, and after ``left_s`` kills those that have
        not. Servers that outlive the group (``kept``) go on."""
        left = [process for process in psutil.process_iter() if self._is_ours(process)]
        kept = [] if self._kept is None else self._kept.processes()
        ending = [process for process in left if process not in kept]
        for process in psutil.wait_procs(ending, timeout=self._patience.left_s)[1]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.environ().get(RENDEZVOUS) == str(self._meeting.folder / "rendezvous")
            return ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
        return False
