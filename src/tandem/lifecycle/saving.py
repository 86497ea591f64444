"""Saves checkpoints when they are due, while training waits or in the background."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from tandem.api.activity import waiting, within
from tandem.api.failures import NotWritten, RankFailed, Stalled
from tandem.api.state import State
from tandem.api.team import Team
from tandem.config.arithmetic import is_save_due
from tandem.config.experiment import CheckpointConfig
from tandem.launch.rank import time_to_save_s
from tandem.lifecycle.oversight import Leaving
from tandem.lifecycle.recovery import Recovery
from tandem.state.checkpoint import CheckpointFailed, save_checkpoint
from tandem.state.run_folder import RunFolder
from tandem.state.snapshot import Snapshots

log = logging.getLogger(__name__)


class BackgroundSave:
    """Writes a checkpoint in a thread. Its methods must not be called from several threads at the same time."""

    def __init__(self) -> None:
        self._future: Future[tuple[Path | None, float]] | None = None
        self._what = ""

    @property
    def busy(self) -> bool:
        return self._future is not None and not self._future.done()

    def start(self, what: str, work: Callable[[], Path | None]) -> None:
        """Calls ``work`` in a thread. ``what``: name of what it writes, for messages. The result of an earlier `start` must
        have been taken."""
        assert self._future is None, "one save at a time"
        future: Future[tuple[Path | None, float]] = Future()
        self._future, self._what = future, what

        def run() -> None:
            began = time.perf_counter()
            try:
                path = work()
            except BaseException as error:  # the worker boundary: `take` raises it
                future.set_exception(error)
            else:
                future.set_result((path, time.perf_counter() - began))

        # a daemon, so that a hanging disk cannot keep the process alive
        threading.Thread(target=run, name="checkpoint-save", daemon=True).start()

    def wait(self, seconds: float | None) -> bool:
        """Waits for the save for at most ``seconds`` (None: without limit); returns True if it has ended. A long save is not
        an error; one without progress is detected as a stalled run (`recover.stalled_after_s`)."""
        if self._future is not None:
            with waiting(self._what):
                wait([self._future], seconds)
        return not self.busy

    def take(self) -> tuple[Path | None, float] | None:
        """Waits for the last `start` without limit, and returns its result once: the checkpoint and the seconds that it
        took; None if nothing was started.

        Raises:
            CheckpointFailed: the save failed. Any other error of ``work`` is raised too.
        """
        future = self._future
        if future is None:
            return None
        self.wait(None)
        self._future = None
        return future.result()


def save_if_due(
    team: Team,
    rules: CheckpointConfig,
    run: RunFolder | None,
    step: int,
    steps: int,
    write_model: Callable[[Path], None],
    save_tokenizer: Callable[[Path], object],
    *,
    write_state: Callable[[Path], None] | None = None,
    metrics: Mapping[str, float] | None = None,
    leaving: bool = False,
) -> Path | None:
    """Saves a checkpoint if the section `checkpoint` says so for this step; returns its folder on rank 0. Collective.

    ``write_state``: writes the state for resuming, used if `checkpoint.resumable`. ``metrics``: of this step. ``leaving``:
    True if the run is interrupted after this step; it is then saved if it saves resumable checkpoints at all.

    Raises:
        CheckpointFailed: writing failed, and `checkpoint.on_error` does not let training continue.
    """
    if not is_save_due(rules, step, steps, leaving):
        return None
    try:
        return save_checkpoint(
            team,
            run,
            step,
            write_model,
            save_tokenizer,
            rules,
            write_state=write_state if rules.resumable else None,
            metrics=metrics,
        )
    except CheckpointFailed as error:
        if rules.on_error == "stop" or step == steps or leaving:
            raise
        if run is not None:
            run.failed_saves += 1
        log.warning("training goes on (checkpoint.on_error=continue), but %s", error)
        return None


LateWriter = Callable[[Mapping[str, State]], Callable[[Path], None] | None]
"""Takes a copy of all states and returns a function that writes their models into a folder; None if these models cannot be
written from a copy."""


class Saving:
    """Saves checkpoints as the section `checkpoint` says. A context manager: leaving it waits for a save in the background,
    unless the run is interrupted and cannot wait.

    With `checkpoint.asynchronous` training waits only until all states are copied, and continues while a thread writes the
    copy, to the same files and with the same rename. Only one save runs at a time; a second one waits for the first. A
    failure in the thread is raised by the next `is_due` or `save`, or when the block is left. After the last step training
    waits for the whole save.

    Each rank copies its state into memory that rank 0 can read (`tandem.state.snapshot`); only this is collective. Rank 0's
    thread writes alone, and the ranks learn the outcome in the next call that is collective anyway.
    """

    def __init__(
        self,
        rules: CheckpointConfig,
        run: RunFolder | None,
        steps: int,
        write_models: Callable[[Path], None],
        save_tokenizer: Callable[[Path], object],
        recovery: Recovery,
        late_writer: LateWriter,
    ):
        """``run``: the run folder, on rank 0. ``steps``: number of steps of the whole run. ``write_models``: writes the
        present models into a folder; collective. ``late_writer``: see `LateWriter`."""
        self.checkpoint: Path | None = None
        """The newest checkpoint that this process saved or resumed from; on rank 0."""
        self._rules, self._steps, self._recovery = rules, steps, recovery
        self._write_models, self._late_writer = write_models, late_writer
        self._save = partial(save_if_due, rules=rules, run=run, steps=steps, save_tokenizer=save_tokenizer)
        self._team = recovery.team
        self.snapshots, self._background = Snapshots(self._team), BackgroundSave()
        self._seconds: dict[str, float] = {}
        self.beside = rules.asynchronous and rules.resumable
        """True if saves are written in the background; becomes False when this turns out to be impossible."""
        self._under_way = False  # on all ranks: True while a save was started whose outcome is not known yet

    @property
    def busy(self) -> bool:
        """True if a checkpoint is being written in the background."""
        return self._background.busy

    def is_due(self, step: int, *, leaving: bool = False) -> bool:
        """Tells whether a checkpoint must be saved after this step. ``leaving``: see `save_if_due`. Collective.

        Raises:
            CheckpointFailed: a save in the background failed; earlier checkpoints are unchanged.
        """
        self._hear(wait=False)
        return is_save_due(self._rules, step, self._steps, leaving)

    def save(self, step: int, metrics: Mapping[str, float], leaving: bool = False) -> None:
        """Saves a checkpoint of this step, or starts to. ``metrics``: of this step. ``leaving``: see `save_if_due`.
        Collective.

        Raises:
            CheckpointFailed: this save or an earlier one failed; earlier checkpoints are unchanged.
        """
        began = time.perf_counter()
        if self._hear(wait=True):
            self._count("time/save_wait_s", time.perf_counter() - began)
        if step == self._steps or leaving or not self._began_beside(step, metrics):
            saved = self._save(
                self._team,
                step=step,
                write_model=self._write_models,
                write_state=self._recovery.write,
                metrics=metrics,
                leaving=leaving,
            )
            self.checkpoint = saved or self.checkpoint

    def persist(self, write: Callable[[], None] | None) -> None:
        """Calls ``write``, possibly twice; None: this rank has nothing to write. If writing fails while a checkpoint is
        being written in the background, and `checkpoint.on_error` lets training continue, waits for the checkpoint and calls
        ``write`` again: a failed checkpoint removes its files, which frees space. Collective: a failure is raised on all
        ranks.

        Raises:
            NotWritten: ``write`` failed on a rank.
        """
        try:
            self._together(write)
        except NotWritten as error:
            if self._rules.on_error == "stop" or not self._under_way:
                raise
            log.warning("%s. A checkpoint is being written; writing is tried again after that", error)
            with within("save"):
                self._hear(wait=True)
            self._together(write)

    def _together(self, write: Callable[[], None] | None) -> None:
        with self._team.together():
            if write is not None:
                write()

    def finish(self) -> Path | None:
        """Waits for a save in the background; returns the newest checkpoint on rank 0. Raises as `save`. Collective."""
        with within("save"):
            self._hear(wait=True)
        return self.checkpoint

    def metrics(self) -> dict[str, float]:
        """Returns, since the last call, the seconds that training waited for an earlier save, and the duration of saves that
        ended in the background."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _began_beside(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Copies the state and starts a thread that writes it; returns False if this is not possible. Collective."""
        if not self.beside:
            return False
        states = self._recovery.states()
        why_not = self.snapshots.why_not(states)
        no_writer = "these models cannot be written from a copy of their state"
        why_not = self._team.share(lambda: why_not or (no_writer if self._late_writer(states) is None else None))
        if why_not is not None:
            log.info("training waits for each save: %s", why_not)
            self.beside = False
            return False
        try:
            copy = self.snapshots.take(states)
        except NotWritten as error:
            log.warning("training waits for each save: %s", error)
            self.beside, self.snapshots = False, Snapshots(self._team)  # frees the memory of earlier copies
            return False

        def begin() -> bool:
            writer = self._late_writer(copy)  # made here, because the model changes during the next step
            if writer is None:  # a file that it would read was removed while the state was copied
                return False
            alone = Team.alone()  # a collective call in the thread would interfere with those of training
            write_state = partial(self._recovery.write, states=copy, team=alone)
            work = partial(self._save, alone, step=step, write_model=writer, write_state=write_state, metrics=dict(metrics))
            self._background.start(f"the checkpoint of step {step}", work)
            return True

        self._under_way = self._team.share(begin)
        return self._under_way

    def _hear(self, *, wait: bool) -> bool:
        """Returns True if a background save has ended since the last call; with ``wait`` waits for its end. Every rank
        learns the outcome. Collective.

        Raises:
            CheckpointFailed: the save failed.
        """
        if not self._under_way:
            return False

        def ended() -> bool:
            if self.busy and not wait:
                return False
            self._take()
            return True

        self._under_way = False  # a failure is raised only once
        self._under_way = not self._team.share(ended)
        return not self._under_way

    def _take(self) -> None:
        """Waits for the background save and takes its result, on rank 0. Other ranks have no save."""
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
            if asked_twice or isinstance(error, Stalled):  # a stalled run's save makes no progress either
                log.warning("the checkpoint that is being written is left unfinished; earlier checkpoints are unchanged")
                return
            log.warning("waiting for the checkpoint that is being written; Ctrl-C leaves it unfinished")
        try:
            with within("save"):
                self._end()
        except RankFailed:  # reported by the launcher, which ends this rank
            if error is None:
                raise
        except Exception as failure:  # the worker boundary: the error that came first ends the run
            if error is None:
                raise
            log.warning("the checkpoint that was being written failed too: %s", failure)
            log.info("cause", exc_info=failure)  # to log.txt

    def _end(self) -> None:
        """Waits for the background save. If the launcher ends this rank, now or during the wait, waits only as long as the
        launcher allows: the copies of all ranks are in this rank's memory, so the save can end even if other ranks died.

        Raises:
            RankFailed: the launcher ends this rank.
            CheckpointFailed: the save failed.
        """
        failure_elsewhere: RankFailed | None = None
        try:
            ended = self._background.wait(time_to_save_s())
        except RankFailed as failure:  # raised by the handler of the launcher's signal
            failure_elsewhere, ended = failure, self._background.wait(time_to_save_s())
        if ended:
            self._take()
        else:
            log.warning("the checkpoint that was being written is left unfinished: the time to finish it is over")
        if failure_elsewhere is not None:
            raise failure_elsewhere
