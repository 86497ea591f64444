"""A watch over a run from inside: signals that ask it to end, and a thread that sees when nothing is done any more.

Ranks that our launcher has started are watched by it, from outside (`tandem.launch.watch`); this thread is for a process
that nobody watches.
"""

import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

from tandem.api.activity import ACTIVITY, OTHER_RANKS, activity, enter
from tandem.api.failures import RankFailed, Stalled, WorkerDied
from tandem.api.team import Team
from tandem.config.arithmetic import is_save_due, stalled_after_s
from tandem.config.errors import TandemError
from tandem.config.experiment import BaseConfig
from tandem.launch.local import EXIT_FAILED
from tandem.launch.rank import failed_elsewhere, has_launcher, restarts
from tandem.launch.requests import ONCE_S, REQUESTS
from tandem.launch.watch import Told, stalled_text
from tandem.state.existing import checkpoints
from tandem.state.run_folder import RunFolder, run_path, stacks_file

log = logging.getLogger(__name__)

LOOK_S = 0.5
CLOSE_S = 60.0
"""A run that got nowhere may close, and end a save, as long as something is done within each of these; then its process ends
itself."""


class Leaving(KeyboardInterrupt):
    """The run ends because it was asked to, after a step, with all that was to be saved."""

    def _render_traceback_(self) -> list[str]:
        """A notebook shows these lines in place of a traceback, which tells a user nothing."""
        return ["Interrupted after a whole step, which is saved: the same call goes on from there."]


class Oversight:
    """Over one run, from the moment its folder is open; a context manager.

    The first of `REQUESTS` lets the step end, for at most ``recover.grace_s``: `asked` is true then, and the loop saves and
    calls `leave`. The second, or one that arrives when there is no grace, raises KeyboardInterrupt at once. What comes
    within `ONCE_S` of a request is the same one.
    """

    def __init__(self, config: BaseConfig, run: RunFolder | None, team: Team):
        self._config, self._run, self._whole, self._team = config.recover, run, config, team
        self._folder = run_path(config.run.root, config.experiment_name, config.trial_name)
        self._asked: str | None = None
        self._asked_at = -ONCE_S
        self._impatient = False
        self._fault: TandemError | None = None
        self._before: dict[int, Any] = {}
        self._ended, self._left = threading.Event(), threading.Event()
        self.mended = 0
        """Times that this process went on after a worker of the run had died."""

    def go_on(self, error: WorkerDied) -> None:
        """Passes if the run goes on from its newest checkpoint after this.

        Raises:
            WorkerDied: `recover.max_restarts` does not allow it, or the run was asked to end.
        """
        most = self._config.max_restarts
        if self._asked is not None or self.mended + restarts() >= most:
            how = "" if most else "; recover.max_restarts=N lets it do so by itself"
            failure = WorkerDied(f"{error}, and the run with it; the same command goes on from the newest checkpoint{how}")
            failure.may_pass = not self.mended  # else the launcher would count from 0 again
            raise failure from error
        self.mended += 1
        log.warning("%s: going on from the newest checkpoint (%d of recover.max_restarts=%d)", error, self.mended, most)
        if self._run is not None:
            self._run.restarted(self.mended + restarts(), str(error))
        enter("build")

    def asked(self) -> bool:
        """True if the run shall end after this step; the same on all ranks. Collective."""
        return self._team.share(lambda: self._asked is not None)

    def leave(self) -> None:
        """Ends the run as interrupted, after it was saved; what is still being written may end."""
        self._left.set()
        raise Leaving

    def metrics(self) -> dict[str, float]:
        """Metrics of a run that may be started again, or whose saves may fail."""
        metrics = {"recover/restarts": float(restarts() + self.mended)} if self._config.max_restarts else {}
        if self._run is not None and self._run.failed_saves:
            metrics["checkpoint/failed"] = float(self._run.failed_saves)
        return metrics

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in REQUESTS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:  # nohup, or a shell's background: nobody listens there
                    self._before[number] = before
                    signal.signal(number, self._handle)
        limit = stalled_after_s(self._whole)
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
        """The words about a run that leaves after this step: what is kept."""
        if is_save_due(self._whole, ACTIVITY.step, 0, leaving=True):
            return "is saved"
        saved = checkpoints(self._folder / "checkpoints")
        newest = f"the newest checkpoint is {saved[-1]}" if saved else "there is no checkpoint"
        return f"is abandoned, for `checkpoint` asks for no save on leaving: {newest}"

    def _lose_patience(self, number: int) -> None:
        if not self._left.wait(self._config.grace_s):
            self._impatient = True
            if self._team.main:
                words = (
                    f"step {ACTIVITY.step} did not end within {self._config.grace_s:g} s (recover.grace_s), and is not saved"
                )
                _say(f"{words}\n")
            os.kill(os.getpid(), number)

    def _watch(self, limit: float) -> None:
        """On a thread of its own; time counts only between looks close to each other, for a machine may sleep."""
        seen, idle, before = None, 0.0, time.monotonic()
        while not self._ended.wait(LOOK_S):
            now, activity_now = time.monotonic(), (ACTIVITY.count, ACTIVITY.phase)
            idle, before = idle + min(now - before, 2 * LOOK_S), now
            if activity_now != seen or ACTIVITY.waits == OTHER_RANKS:
                seen, idle = activity_now, 0.0
            elif idle > limit:
                self._stalled(idle)
                return

    def _stalled(self, idle: float) -> None:
        text = stalled_text(Told(**activity()), idle)
        with contextlib.suppress(OSError):  # a dead disk may be the cause
            path = stacks_file(self._folder)
            with path.open("w", encoding="utf-8") as file:
                file.write(f"{text}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            text = f"{text}; {path} has where every thread stands"
        self._fault = Stalled(text)
        os.kill(os.getpid(), signal.SIGTERM)
        seen = -1
        while seen != ACTIVITY.count:  # a save that goes on, or a close, is healthy
            seen = ACTIVITY.count
            if self._ended.wait(CLOSE_S):
                return
        # the main thread is in a call that no signal ends
        if self._run is not None:
            with contextlib.suppress(OSError):
                self._run.finish("failed", self._fault)
        _say(f"error: {text}\n")
        os._exit(EXIT_FAILED)


def _say(words: str) -> None:
    """Writes to the terminal, past Python's buffer: a signal may have come in the middle of a print. What cannot be written
    is left out: the signal may mean that the terminal has closed."""
    with contextlib.suppress(OSError):
        os.write(2, words.encode())
