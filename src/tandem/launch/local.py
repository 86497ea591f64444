"""Trainer ranks on this machine: started, watched and ended together.

Each rank runs the same command in a process (and a session) of its own, with the variables that torchrun sets too. They meet
in a file, so no port is taken. Rank 0 speaks to the terminal; what the others say is shown when one of them fails.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

RENDEZVOUS, LAUNCHER = "TANDEM_RENDEZVOUS", "TANDEM_LAUNCHER"
"""What a rank is told: the file to meet in, and the process that it must not outlive."""

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130

WATCH_S = 0.05
FAIL_S = 5.0
"""After the first failure the others may end by themselves for so long: often all of them fail, each with its message."""

TERM_S = 10.0
KILL_S = 5.0
INTERRUPT_S = 60.0
"""What an interrupted run may take to close."""

SHOWN_LINES = 25


def is_rank() -> bool:
    """Whether a launcher, ours or torchrun, started this process as one of several."""
    return "WORLD_SIZE" in os.environ


def run_ranks(command: Sequence[str], count: int) -> int:
    """Runs ``command`` on ``count`` ranks and returns the exit status: that of the rank that failed.

    Ctrl-C and SIGTERM (as `KeyboardInterrupt`) are passed on, a second one ends all ranks at once. When this returns, no
    rank is left, and nothing that a rank has started in its own session.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-ranks-") as folder, contextlib.ExitStack() as stack:
        ranks = Ranks(Path(folder))
        stack.callback(ranks.kill)
        try:
            ranks.start(command, count)
            return ranks.watch()
        except KeyboardInterrupt:
            return ranks.interrupt()


class Ranks:
    """The processes of one run."""

    def __init__(self, folder: Path):
        """``folder``: an empty one of their own."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._folder = folder

    def start(self, command: Sequence[str], count: int) -> None:
        """Starts all of them."""
        for rank in range(count):
            with contextlib.ExitStack() as stack:
                said: IO[bytes] | None = None if rank == 0 else stack.enter_context(self._output(rank).open("wb"))
                self.processes.append(
                    subprocess.Popen(
                        list(command),
                        env=os.environ | rank_environment(rank, count, self._folder / "rendezvous"),
                        stdin=None if rank == 0 else subprocess.DEVNULL,
                        stdout=said,
                        stderr=said and subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C reaches them through this process, once
                    )
                )

    def watch(self) -> int:
        """Waits for all; the first that fails ends the others."""
        while not self._failed() and self._alive():
            time.sleep(WATCH_S)
        if not self._failed():
            return 0
        self._wait(FAIL_S)
        failed = {rank: self.processes[rank].returncode for rank in self._failed()}
        self._signal(signal.SIGTERM)
        self._wait(TERM_S)
        self.kill()
        # one that was killed is a cause; what rank 0 says may only be that another one is gone
        cause = min(failed, key=lambda rank: (failed[rank] > 0, rank == 0, rank))
        same = 0 in failed and set(failed.values()) == {EXIT_CONFIG}  # all of them refused, and rank 0 has said so
        if not same and not (cause == 0 and failed[0] > 0):
            self._explain(cause, failed[cause])
        return max(failed[cause], 0) or EXIT_FAILED

    def interrupt(self) -> int:
        """Lets all of them close."""
        with contextlib.suppress(KeyboardInterrupt):
            self._signal(signal.SIGINT)
            self._wait(INTERRUPT_S)
        return EXIT_INTERRUPTED

    def kill(self) -> None:
        """Ends what is left of the ranks and of their sessions; idempotent."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that hangs: the kernel ends it when it can
                process.wait(KILL_S)

    def _explain(self, rank: int, code: int) -> None:
        """Says which rank failed, and shows what it wrote; rank 0 has shown that itself."""
        how = f"with exit status {code}" if code > 0 else f"by signal {signal.Signals(-code).name}"
        print(f"error: rank {rank} of {len(self.processes)} ended {how}, and all with it", file=sys.stderr)
        if -code == signal.SIGKILL:
            print(
                "The system ends a process so when memory runs out: lower actor.max_tokens_per_micro_batch, or spread the "
                "model over more ranks or machines",
                file=sys.stderr,
            )
        if rank:
            lines = self._output(rank).read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            print("\n".join(f"  rank {rank} | {line}" for line in lines), file=sys.stderr)

    def _output(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"

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


def rank_environment(rank: int, count: int, rendezvous: Path) -> dict[str, str]:
    """Variables of one rank."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        RENDEZVOUS: str(rendezvous),
        LAUNCHER: str(os.getpid()),
    }
    # one machine: nothing has to be reached from outside, whatever its host name resolves to
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return variables | {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback)}
