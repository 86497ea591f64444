"""Trainer ranks on this machine: started, watched, ended together, and started again.

Each rank runs the same command in a process (and a session) of its own, with the variables that torchrun sets too. They meet
in a file, so no port is taken. Rank 0 speaks to the terminal; what the others say is shown when one of them fails.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import psutil

from tandem.config.errors import ConfigError
from tandem.launch.kept_servers import KEPT, KeptServers
from tandem.launch.place import Place, interface_to
from tandem.launch.requests import each_request_once
from tandem.launch.watch import SILENT_S, WEDGED_S, Fault, LaunchEnd, Record, Told, Watch, waits_for_disk, work_of

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


IFNAME = "GLOO_SOCKET_IFNAME"
INTERNET = (socket.AF_INET, socket.AF_INET6)

RENDEZVOUS, LAUNCHER, TELL, RESTARTS = "TANDEM_RENDEZVOUS", "TANDEM_LAUNCHER", "TANDEM_TELL", "TANDEM_RESTARTS"
"""Variables that tell a rank: the file to meet in, the process that it must not outlive, the pipe in which it says what it
does, and how often the ranks were started again."""

FAILED, ERROR, STACKS = "failed", "error-{rank}.json", "stacks-{rank}.txt"
"""Files beside the one to meet in: why all are ended, and when at the latest; the error of a rank; its stacks."""

STACKS_SIGNAL = signal.SIGUSR2
"""On which a rank writes the stacks of all its threads."""

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130
EXIT_FINAL = 3
"""A rank's word to its launcher: it failed, and would fail again. Outside it is `EXIT_FAILED`."""

WATCH_S = 0.05
FAIL_S = 5.0
"""After the first failure the others may end by themselves for so long: often all of them fail, each with its message."""

TERM_S = 10.0
FAULT_TERM_S = 3.0
"""The same for a group in which one does not answer: the whole has to end within 30 s."""

KILL_S = 5.0
INTERRUPT_S = 60.0
"""Seconds that an interrupted run may take to close, beyond `recover.grace_s`."""

STACKS_S = 2.0
HELD_S = 0.5
"""A silent rank that has used less of the processor since is not at work."""

LEFT_S = 10.0
"""Seconds that servers and workers of ranks that are gone may take to notice."""

RESTART_S = 1.0
"""Between the end of a group and its next start."""

SHOWN_LINES = 25
FOLLOWERS = ("RankFailed",)
"""Errors of ranks that only heard of another one's."""


@dataclass(frozen=True)
class Patience:
    """Seconds that a launcher waits for its ranks; see the constants of the same names."""

    fail_s: float = FAIL_S
    term_s: float = TERM_S
    left_s: float = LEFT_S
    restart_s: float = RESTART_S
    silent_s: float = SILENT_S
    wedged_s: float = WEDGED_S


USUAL = Patience()


def is_rank() -> bool:
    """True if a launcher, ours or torchrun, started this process as one of several."""
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
    """Runs ``command`` on ``count`` ranks and returns the exit status: that of the rank that failed.

    Ctrl-C and SIGTERM (as `KeyboardInterrupt`) are passed on, a second one ends all ranks at once. When this returns, no
    rank is left, and nothing that a rank has started. A group that failed is started again, ``max_restarts`` times, unless
    it would fail again (a wrong configuration, a user's function, a full disk). ``stalled_after_s``: see `Watch`.
    ``grace_s``: what a rank may take for its step when it is interrupted. Servers that the ranks keep outlive a group, and
    end before this returns. ``place``: of these ranks, where others are on other machines, or in other groups.
    """
    restarts = 0
    if place is not None:  # a group waits long for ranks that it does not see: only its launcher could judge that
        patience = replace(patience, wedged_s=math.inf)
    try:
        with each_request_once(), KeptServers() if max_restarts else contextlib.nullcontext() as kept:
            while True:
                waits = {"silent_s": patience.silent_s, "wedged_s": patience.wedged_s}
                first, world = (place.first, place.world) if place else (0, count)
                watch = Watch(count, stalled_after_s, **waits, first=first, world=world)
                ended = _run_once(command, count, watch, kept, restarts, grace_s, patience, place)
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


def _outer() -> dict[str, str]:
    """This process' environment; where it is a rank itself, the servers that are kept for it are not for ranks below it, nor
    is the store that others meet in."""
    return {name: value for name, value in os.environ.items() if name not in (KEPT, "MASTER_ADDR", "MASTER_PORT")}


def _run_once(
    command: Sequence[str],
    count: int,
    watch: Watch,
    kept: KeptServers | None,
    restarts: int,
    grace_s: float,
    patience: Patience,
    place: Place | None,
) -> LaunchEnd:
    with meeting_folder() as meeting, contextlib.ExitStack() as stack:
        ranks = RankProcesses(meeting, watch, kept, patience, place)
        stack.callback(ranks.close)
        try:
            ranks.start(command, count, restarts)
            return ranks.watch()
        except KeyboardInterrupt:
            return ranks.interrupt(grace_s)


class RankProcesses:
    """The processes of one run."""

    def __init__(
        self,
        meeting: Meeting,
        watch: Watch,
        kept: KeptServers | None = None,
        patience: Patience = USUAL,
        place: Place | None = None,
    ):
        """``kept``: for servers that need not end with them. Methods count the ranks of this group from 0."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._place, self._first = place, place.first if place else 0
        self._meeting, self._watch, self._kept, self._patience = meeting, watch, kept, patience
        self._pipes: list[int] = []
        self._words: dict[int, bytes] = {}

    def start(self, command: Sequence[str], count: int, restarts: int = 0) -> None:
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
                        env=_outer() | variables | {TELL: str(write), RESTARTS: str(restarts)},
                        stdin=None if rank == 0 else subprocess.DEVNULL,
                        stdout=said,
                        stderr=said and subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C reaches them through this process, once
                        pass_fds=[write, self._meeting.lock, *(kept.pipe if kept is not None else ())],
                    )
                )

    def watch(self) -> LaunchEnd:
        """Waits for all; the first that fails, or gets nowhere, ends the others."""
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
        errors = {rank: self._error(rank) for rank in {0, *failed}}  # rank 0 may have told its error, and be closing

        def order(rank: int) -> tuple[Any, ...]:
            """Who was killed comes first; who only heard of another last; then whose error was first, if they told."""
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
        """Lets all of them close."""
        with contextlib.suppress(KeyboardInterrupt):
            self._signal(signal.SIGTERM)  # a shell's background ignores SIGINT, and so would they
            self._wait(grace_s + INTERRUPT_S)
        left = self._alive()
        if not left and not self._failed():
            return LaunchEnd(0)  # its last step was under way
        code = self.processes[0].returncode if self.processes and not left else None
        self.kill()
        if left:
            self._end_left()
        failed = code is not None and code > 0 and code != EXIT_INTERRUPTED  # the save on leaving, for one
        return LaunchEnd(EXIT_FAILED if failed else EXIT_INTERRUPTED)

    def close(self) -> None:
        """Ends what is left, and forgets the pipes."""
        self.kill()
        while self._pipes:
            os.close(self._pipes.pop())

    def kill(self) -> None:
        """Ends what is left of the ranks and of their sessions; idempotent."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that hangs: the kernel ends it when it can
                process.wait(KILL_S)

    def _end_fault(self, fault: Fault) -> LaunchEnd:
        """Ends a group that gets nowhere; where each thread of each rank stood is kept."""
        places = self._watch.describe()
        print(f"error: {fault.text}\n{places}", file=sys.stderr)
        for number in (STACKS_SIGNAL, signal.SIGCONT):  # one that is stopped writes as soon as it runs again
            self._signal(number)
        deadline = time.monotonic() + STACKS_S
        while time.monotonic() < deadline and not all(self._stacks(rank) for rank in self._alive()):
            time.sleep(WATCH_S)
        time.sleep(WATCH_S)  # the last one may be at it
        ranks = range(len(self.processes))
        stacks = "\n".join(f"--- rank {self._first + rank}\n{self._stacks(rank)}" for rank in ranks)
        self._end_all(fault.text, FAULT_TERM_S)
        stacks = f"{fault.text}\n\n{places}\n\n{stacks}"
        return self._ended(EXIT_FAILED, fault.text, fault.rank, may_pass=True, stacks=stacks)

    def _end_all(self, cause: str, patience_s: float | None = None) -> None:
        """The others hear why, and may close; what they leave is ended too."""
        patience_s = self._patience.term_s if patience_s is None else patience_s
        with contextlib.suppress(OSError):  # a full disk: they end as by Ctrl-C
            partial = self._meeting.folder / f".{FAILED}"
            words = {"cause": cause, "until": time.monotonic() + patience_s}
            partial.write_text(json.dumps(words), encoding="utf-8")
            partial.rename(self._meeting.folder / FAILED)
        for rank in self._alive():
            if not self._error(rank):  # who has one is closing already
                self.processes[rank].send_signal(signal.SIGTERM)
        self._wait(patience_s)
        self.kill()
        self._end_left()

    def _ended(self, code: int, cause: str, rank: int, *, may_pass: bool, stacks: str = "") -> LaunchEnd:
        watch = self._watch
        return LaunchEnd(code, cause, rank, stacks, may_pass, watch.step, watch.has_folder)

    def _explained(self, rank: int, failed: dict[int, int], errors: dict[int, dict[str, Any]]) -> str:
        """Why the group ended; told here unless rank 0 has. A rank that raised nothing did not end as it should: a library
        or a user's code called `os._exit`, or somebody killed it."""
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
        print(f"error: {name} ended {how}, and all with it", file=sys.stderr)
        if -code == signal.SIGKILL:
            print(
                "The system ends a process so when memory runs out: lower actor.max_tokens_per_micro_batch, or spread the "
                "model over more ranks or machines",
                file=sys.stderr,
            )
        if rank:
            lines = self._output(rank).read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            print("".join(f"  rank {self._first + rank} | {line}\n" for line in lines), end="", file=sys.stderr)
        return text

    def _listen(self) -> None:
        """Takes in what the ranks have said since the last time."""
        for rank, pipe in enumerate(self._pipes):
            with contextlib.suppress(BlockingIOError):
                self._words[rank] = self._words.get(rank, b"") + os.read(pipe, 65536)
            *lines, self._words[rank] = self._words.get(rank, b"").split(b"\n")
            if lines:
                with contextlib.suppress(psutil.Error, ValueError):
                    used = work_of(self.processes[rank].pid, whole=self._watch.stands(rank))
                    self._watch.hear(rank, Told.of(json.loads(lines[-1])), used)

    def _is_held(self, rank: int, seconds: float) -> bool:
        """One that writes to a slow disk is neither stopped nor asleep."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.processes[rank].pid)
            stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            idle = work_of(process.pid).seconds - seconds < HELD_S
            return stopped or (idle and process.status() == psutil.STATUS_SLEEPING and not waits_for_disk(process))
        return False

    def _error(self, rank: int) -> dict[str, Any]:
        """A rank's own words about its error; empty if it could not write them."""
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
        """Servers and workers that ranks have started in sessions of their own: they notice by themselves, or are ended, but
        for servers that are kept."""
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


def rank_environment(rank: int, count: int, rendezvous: Path, place: Place | None = None) -> dict[str, str]:
    """``rank``, of ``count`` ranks of a group: without a ``place`` there is no other group."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    own = own if place is None else place.environment(rank)
    variables = own | {RENDEZVOUS: str(rendezvous), LAUNCHER: str(os.getpid())}
    # one machine: nothing has to be reached from outside, whatever its host name resolves to
    name = _interface() if place is None else os.environ.get(IFNAME) or interface_to(place.address, place.port)
    quiet = {} if place is None else {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}  # of its stores
    return variables | quiet | ({IFNAME: name} if name else {})


def _interface() -> str:
    """The network interface over which the ranks of one machine exchange tensors on CPUs."""
    return os.environ.get(IFNAME) or ("lo" if sys.platform == "linux" else "lo0")


def check_interface() -> None:
    """Passes if ranks can meet. Raises `ConfigError`."""
    reachable = [name for name, found in psutil.net_if_addrs().items() if any(one.family in INTERNET for one in found)]
    if not set(_interface().split(",")) & set(reachable):
        raise ConfigError(
            f"ranks exchange tensors over the network interface {_interface()}, which has no address here (there are: "
            f"{', '.join(reachable) or 'none'}). In a container without a network `ip link set lo up` gives lo one; "
            f"{IFNAME} names another interface; one rank (actor.backend=fsdp:d1) needs none"
        )
