"""Saves checkpoints when they are due, while training waits or beside it."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from tandem.api.activity import waiting, within
from tandem.api.failures import NotWritten, RankFailed, Stalled
from tandem.api.state import State
from tandem.api.team import Team
from tandem.config.arithmetic import is_save_due
from tandem.config.experiment import BaseConfig
from tandem.launch.rank import time_to_save_s
from tandem.lifecycle.oversight import Leaving
from tandem.lifecycle.recovery import Recovery
from tandem.lifecycle.summary import Saveable, save_if_due
from tandem.state.run_folder import RunFolder
from tandem.state.snapshot import Snapshots

log = logging.getLogger(__name__)


class BackgroundSave:
    """Writes a checkpoint while the caller goes on. Not for several threads at once."""

    def __init__(self) -> None:
        self._future: Future[Path | None] | None = None
        self._what = ""
        self._seconds = 0.0

    @property
    def busy(self) -> bool:
        return self._future is not None and not self._future.done()

    def start(self, what: str, work: Callable[[], Path | None]) -> None:
        """Calls ``work`` in the background. ``what`` it writes: for messages. The one before must have been taken."""
        assert self._future is None, "one save at a time"
        future: Future[Path | None] = Future()
        self._future, self._what = future, what

        def run() -> None:
            began = time.perf_counter()
            try:
                path = work()
            except BaseException as error:  # the worker boundary: whoever waits gets it
                self._seconds = time.perf_counter() - began
                future.set_exception(error)
            else:
                self._seconds = time.perf_counter() - began
                future.set_result(path)

        # a daemon: a disk that hangs must not keep the process from ending
        threading.Thread(target=run, name="checkpoint-save", daemon=True).start()

    def wait(self, seconds: float | None) -> bool:
        """Waits for at most so long (None: as long as it takes); whether nothing is being written any more. A large one on a
        slow disk is healthy, and whoever watches over the run sees one that writes nothing any more
        (`recover.stalled_after_s`)."""
        if self._future is not None:
            with waiting(self._what):
                wait([self._future], seconds)
        return not self.busy

    def take(self) -> tuple[Path | None, float] | None:
        """The result of the last `start`, once: the checkpoint, and the seconds that it took; None where nothing was
        started. Waits for it, as long as it takes.

        Raises:
            CheckpointFailed: it failed; or whatever else ``work`` raised.
        """
        future = self._future
        if future is None:
            return None
        self.wait(None)
        self._future = None
        return future.result(), self._seconds


LateWriter = Callable[[Mapping[str, State]], Callable[[Path], None] | None]
"""From a copy of all states to what writes the models that they are of; None where these models cannot be written so."""


@dataclass(frozen=True)
class _Copied:
    """Models as they were when their states were copied."""

    save: Callable[[Path], None]


class Saving:
    """Saves where `checkpoint` asks for it; a context manager, which ends once nothing is being written any more, or at once
    where a run is interrupted that cannot wait.

    With `checkpoint.asynchronous` training waits for a copy of all states, and goes on while a thread writes that: the same
    files, the same rename. One save at a time: a second one waits for the first. What fails in the thread is raised by the
    next `is_due` or `save`, or on leaving. After the last step training waits for the whole save.

    Of several ranks each copies what it has, where rank 0 can read it (`tandem.state.snapshot`); that is all that they
    do together. Rank 0's thread writes, by itself; the ranks hear what came of it where they meet anyway.
    """

    def __init__(
        self,
        config: BaseConfig,
        run: RunFolder | None,
        steps: int,
        models: Saveable,
        save_tokenizer: Callable[[Path], object],
        recovery: Recovery,
        late_writer: LateWriter,
    ):
        """``run``: on rank 0. ``steps``: of the whole run. ``models``: what is saved; ``late_writer``: it from a copy."""
        self.checkpoint: Path | None = None
        """The newest one that this process saved, or goes on from; on rank 0."""
        self._config, self._run, self._steps, self._recovery = config, run, steps, recovery
        self._models, self._save_tokenizer, self._late_writer = models, save_tokenizer, late_writer
        self._team = recovery.team
        self.snapshots, self._background = Snapshots(self._team), BackgroundSave()
        self._seconds: dict[str, float] = {}
        self.beside = config.checkpoint.asynchronous and config.checkpoint.resumable
        """True if saves are written beside training; False from the first that has to be waited for."""

        self._under_way = False  # on all ranks, while what the thread came to has not been heard of

    @property
    def busy(self) -> bool:
        """True if a checkpoint is being written beside training."""
        return self._background.busy

    def is_due(self, step: int, *, leaving: bool = False) -> bool:
        """True if a checkpoint is to be saved after this step. ``leaving``: see `save_if_due`. Collective.

        Raises:
            CheckpointFailed: a save that went on since the last call; the checkpoints before it are as they were.
        """
        self._hear(wait=False)
        return is_save_due(self._config, step, self._steps, leaving)

    def save(self, step: int, metrics: Mapping[str, float], leaving: bool = False) -> None:
        """Saves this step, for which a checkpoint is due. ``metrics``: of this step. ``leaving``: see `save_if_due`.
        Collective.

        Raises:
            CheckpointFailed: this save, or the one before it; the checkpoints before them are as they were.
        """
        began = time.perf_counter()
        if self._hear(wait=True):
            self._count("time/save_wait_s", time.perf_counter() - began)
        if step == self._steps or leaving or not self._began_beside(step, metrics):
            saved = self._save(step, self._models, self._recovery.write, metrics, leaving=leaving)
            self.checkpoint = saved or self.checkpoint

    def persist(self, write: Callable[[], None] | None) -> None:
        """Calls ``write``, which may be called again; None: this rank has nothing to write. Where the disk refuses while a
        checkpoint is being written, and `checkpoint.on_error` lets training go on, waits for that, whose leftovers are
        removed if it fails, and calls it again. Collective: a disk that is full is so for all ranks.

        Raises:
            NotWritten: as ``write``, of any rank.
        """
        try:
            self._together(write)
        except NotWritten as error:
            if self._config.checkpoint.on_error == "stop" or not self._under_way:
                raise
            log.warning("%s. A checkpoint is being written: it is tried again after that", error)
            with within("save"):
                self._hear(wait=True)
            self._together(write)

    def _together(self, write: Callable[[], None] | None) -> None:
        with self._team.together():
            if write is not None:
                write()

    def finish(self) -> Path | None:
        """Waits for what is being written; returns the newest checkpoint, on rank 0. Raises as `save`. Collective."""
        with within("save"):
            self._hear(wait=True)
        return self.checkpoint

    def metrics(self) -> dict[str, float]:
        """Seconds since the last call: of waiting for a save that was under way, and of those that ended beside training."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _began_beside(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Copies the state and lets a thread write it; False where that cannot be done. Collective."""
        if not self.beside:
            return False
        states = self._recovery.states()
        why_not = self.snapshots.why_not(states)
        no_writer = "these models are not written from a copy of their state"
        why_not = self._team.share(lambda: why_not or (no_writer if self._late_writer(states) is None else None))
        if why_not is not None:
            log.info("training waits for each save: %s", why_not)
            self.beside = False
            return False
        try:
            copy = self.snapshots.take(states)
        except NotWritten as error:
            log.warning("training waits for each save: %s", error)
            self.beside, self.snapshots = False, Snapshots(self._team)  # the memory of earlier copies is given back
            return False

        def begin() -> bool:
            writer = self._late_writer(copy)  # here: the model is another one in the middle of a step
            if writer is None:  # what it would read has gone while the state was copied
                return False
            work = partial(self._write_beside, step, _Copied(writer), copy, dict(metrics))
            self._background.start(f"the checkpoint of step {step}", work)
            return True

        self._under_way = self._team.share(begin)
        return self._under_way

    def _write_beside(self, step: int, models: Saveable, copy: State, metrics: Mapping[str, float]) -> Path | None:
        """In the thread, on rank 0."""
        alone = Team.alone()  # a collective call from here would meet those of training
        return self._save(step, models, partial(self._recovery.write, states=copy, team=alone), metrics, team=alone)

    def _save(
        self,
        step: int,
        models: Saveable,
        write_state: Callable[[Path], None],
        metrics: Mapping[str, float],
        *,
        leaving: bool = False,
        team: Team | None = None,
    ) -> Path | None:
        options = {"write_state": write_state, "metrics": metrics, "leaving": leaving}
        return save_if_due(
            team or self._team, self._config, self._run, step, self._steps, models, self._save_tokenizer, **options
        )

    def _hear(self, *, wait: bool) -> bool:
        """True if a save was under way and has ended, or is waited for; every rank hears what it came to. Collective.

        Raises:
            CheckpointFailed: it failed.
        """
        if not self._under_way:
            return False

        def ended() -> bool:
            if self.busy and not wait:
                return False
            self._take()
            return True

        self._under_way = False  # what failed is heard of once
        self._under_way = not self._team.share(ended)
        return not self._under_way

    def _take(self) -> None:
        """On rank 0, waits for the save under way and takes its result. Other ranks have none."""
        outcome = self._background.take()
        if outcome is not None:
            path, seconds = outcome
            self.checkpoint = path or self.checkpoint
            self._count("time/save_background_s", seconds)

    def _count(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.busy:
            asked_twice = isinstance(error, KeyboardInterrupt) and not isinstance(error, Leaving)  # or the grace is over
            if asked_twice or isinstance(error, Stalled):  # what the save does would have counted as progress
                log.warning("the checkpoint that is being written is left unfinished; those before it are as they were")
                return
            log.warning("waiting for the checkpoint that is being written; Ctrl-C leaves it unfinished")
        try:
            with within("save"):
                self._end()
        except RankFailed:  # told by the command, which ends this rank
            if error is None:
                raise
        except Exception as failure:  # the worker boundary: what ends the run is the error that came first
            if error is None:
                raise
            log.warning("the save that was under way failed too: %s", failure)
            log.info("cause", exc_info=failure)  # to log.txt

    def _end(self) -> None:
        """Waits for what is being written. Where the launcher ends this rank, now or while it waits, for as long as it lets
        it: what the other ranks have copied is here, and whole, whatever became of them.

        Raises:
            RankFailed: the launcher ends this rank.
            CheckpointFailed: the save failed.
        """
        failure_elsewhere: RankFailed | None = None
        try:
            ended = self._background.wait(time_to_save_s())
        except RankFailed as failure:  # raised where the launcher's signal finds it
            failure_elsewhere, ended = failure, self._background.wait(time_to_save_s())
        if ended:
            self._take()
        else:
            log.warning("the checkpoint that was being written is left unfinished: the time to end is over")
        if failure_elsewhere is not None:
            raise failure_elsewhere
