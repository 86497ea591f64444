"""Supervises a run from inside: handles signals that ask it to end, and has a thread that detects a stalled run.

Tandem's launcher supervises the ranks that it starts, from outside (`tandem.launch.watch`); the thread is for processes
without this launcher.
"""

import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tandem.api.activity import ACTIVITY, OTHER_RANKS, activity, enter
from tandem.api.failures import RankFailed, Stalled, WorkerDied
from tandem.api.team import Team
from tandem.config.arithmetic import is_save_due
from tandem.config.errors import TandemError
from tandem.config.experiment import CheckpointConfig, RecoverConfig
from tandem.launch.local import EXIT_FAILED, ONCE_S, REQUESTS
from tandem.launch.rank import failed_elsewhere, has_launcher, restarts
from tandem.launch.watch import RankReport, stalled_text
from tandem.state.existing import checkpoints
from tandem.state.run_folder import RunFolder, stacks_file

log = logging.getLogger(__name__)

LOOK_S = 0.5
CLOSE_S = 60.0
"""A stalled run may close and finish a save as long as there is progress within each period of this many seconds. Otherwise
its process ends itself."""


class Leaving(KeyboardInterrupt):
    """The run ends after a step, on request, with everything saved that the configuration asks for."""

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that a notebook shows instead of a traceback."""
        return ["Interrupted after a whole step, which is saved: the same call goes on from there."]


class Oversight:
    """Supervises one run while its folder is open; a context manager.

    The first signal of `REQUESTS` lets the step end within ``recover.grace_s`` seconds: `asked` then returns True, and the
    loop saves and calls `leave`. A second signal, or one while no grace applies, raises KeyboardInterrupt immediately.
    Signals within `ONCE_S` seconds of a request count as the same request.
    """

    def __init__(
        self,
        recover: RecoverConfig,
        rules: CheckpointConfig,
        stalled_after_s: float | None,
        folder: Path,
        run: RunFolder | None,
        team: Team,
    ):
        """``rules``: when checkpoints are saved. ``stalled_after_s``: seconds without activity after which the run counts as
        stalled; None: never. ``folder``: the run folder, which ``run`` opened on rank 0."""
        self._config, self._rules, self._stalled_after_s = recover, rules, stalled_after_s
        self._folder, self._run, self._team = folder, run, team
        self._asked: str | None = None
        self._asked_at = -ONCE_S
        self._impatient = False
        self._fault: TandemError | None = None
        self._before: dict[int, Any] = {}
        self._ended, self._left = threading.Event(), threading.Event()
        self.mended = 0
        """Number of times that this process has continued after the death of a worker."""

    def go_on(self, error: WorkerDied) -> None:
        """Records that the run continues from its newest checkpoint after the death of a worker.

        Raises:
            WorkerDied: `recover.max_restarts` does not allow this, or the run was asked to end.
        """
        most = self._config.max_restarts
        if self._asked is not None or self.mended + restarts() >= most:
            how = "" if most else "; recover.max_restarts=N lets it do so by itself"
            failure = WorkerDied(f"{error}, and the run with it; the same command goes on from the newest checkpoint{how}")
            failure.may_pass = not self.mended  # otherwise the launcher would count restarts from 0 again
            raise failure from error
        self.mended += 1
        log.warning("%s: going on from the newest checkpoint (%d of recover.max_restarts=%d)", error, self.mended, most)
        if self._run is not None:
            self._run.restarted(self.mended + restarts(), str(error))
        enter("build")

    def asked(self) -> bool:
        """Tells whether the run was asked to end after this step; equal on all ranks. Collective."""
        return self._team.share(lambda: self._asked is not None)

    def leave(self) -> None:
        """Ends the run as interrupted, after it was saved, by raising `Leaving`. A save in the background may still end."""
        self._left.set()
        raise Leaving

    def metrics(self) -> dict[str, float]:
        """Returns the number of restarts (if the run may be restarted) and of failed saves (if there are any)."""
        metrics = {"recover/restarts": float(restarts() + self.mended)} if self._config.max_restarts else {}
        if self._run is not None and self._run.failed_saves:
            metrics["checkpoint/failed"] = float(self._run.failed_saves)
        return metrics

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in REQUESTS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:  # under nohup or in a shell's background the signal stays ignored
                    self._before[number] = before
                    signal.signal(number, self._handle)
        limit = self._stalled_after_s
        if limit is not None and not has_launcher():
            threading.Thread(target=self._watch, args=(limit,), name="oversight", daemon=True).start()
        enter("build")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._left.set()
        for number, before in self._before.items():
            signal.signal(number, before or signal.SIG_DFL)
        enter("start", 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._fault is not None:
            raise self._fault
        cause = failed_elsewhere()
        if cause is not None:
            raise RankFailed(cause)
        now = time.monotonic()
        if now - self._asked_at < ONCE_S and not self._impatient:
            return
        self._asked_at, self._impatient = now, False
        if self._asked is not None or self._config.grace_s == 0 or ACTIVITY.phase in ("build", "start"):
            raise KeyboardInterrupt
        self._asked = signal.Signals(number).name
        if self._team.main:
            words = (
                f"\n{self._asked}: the run ends after step {ACTIVITY.step}, within {self._config.grace_s:g} s, and "
                f"{self._what_is_kept()}; once more ends it at once\n"
            )
            _say(words)
        threading.Thread(target=self._lose_patience, args=(number,), name="grace", daemon=True).start()

    def _what_is_kept(self) -> str:
        """Describes what is kept of a run that ends after this step."""
        if is_save_due(self._rules, ACTIVITY.step, 0, leaving=True):
            return "is saved"
        saved = checkpoints(self._folder / "checkpoints")
        newest = f"the newest checkpoint is {saved[-1]}" if saved else "there is no checkpoint"
        return f"is not saved, because `checkpoint` does not ask for a save on leaving: {newest}"

    def _lose_patience(self, number: int) -> None:
        if not self._left.wait(self._config.grace_s):
            self._impatient = True
            if self._team.main:
                grace = f"{self._config.grace_s:g} s (recover.grace_s)"
                words = f"step {ACTIVITY.step} and its save did not end within {grace}, so it is not saved"
                _say(f"{words}\n")
            os.kill(os.getpid(), number)

    def _watch(self, limit: float) -> None:
        """Detects a stalled run, in a thread. A longer gap between two looks counts as 2 × `LOOK_S`, because the machine may
        have been suspended."""
        last_activity, idle, before = None, 0.0, time.monotonic()
        while not self._ended.wait(LOOK_S):
            now, activity_now = time.monotonic(), (ACTIVITY.count, ACTIVITY.phase)
            idle, before = idle + min(now - before, 2 * LOOK_S), now
            if activity_now != last_activity or ACTIVITY.waits == OTHER_RANKS:
                last_activity, idle = activity_now, 0.0
            elif idle > limit:
                self._stalled(idle)
                return

    def _stalled(self, idle: float) -> None:
        text = stalled_text(RankReport(**activity()), idle)
        with contextlib.suppress(OSError):  # a failed disk may be the cause
            path = stacks_file(self._folder)
            with path.open("w", encoding="utf-8") as file:
                file.write(f"{text}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            text = f"{text}; the stacks of all threads are in {path}"
        self._fault = Stalled(text)
        os.kill(os.getpid(), signal.SIGTERM)
        last_count = -1
        while last_count != ACTIVITY.count:  # a save or a close that makes progress may continue
            last_count = ACTIVITY.count
            if self._ended.wait(CLOSE_S):
                return
        # the main thread is in a call that no signal can interrupt
        if self._run is not None:
            with contextlib.suppress(OSError):
                self._run.finish("failed", self._fault)
        _say(f"error: {text}\n")
        os._exit(EXIT_FAILED)


def _say(words: str) -> None:
    """Writes to stderr without Python's buffer, because a signal handler may interrupt a print. Write errors are ignored,
    because the terminal may have closed."""
    with contextlib.suppress(OSError):
        os.write(2, words.encode())
