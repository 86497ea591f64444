"""Saves the state of a run, and resumes an interrupted run from it.

The state consists of the session's parts (`TrainingSession.parts`) and the parts that every run has (`parts_of`). A part is
any object with a `state_dict` (`tandem.api.state.Stateful`).
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.api.state import State, Stateful
from tandem.api.team import Team
from tandem.flow.session import Elsewhere, TrainingSession
from tandem.rollout.gate import Ledger
from tandem.state.checkpoint import STATE, newest_valid, remove_leftovers
from tandem.state.existing import step_of
from tandem.state.ledger import FILE, LedgerFile, Record
from tandem.state.run_folder import RunFolder
from tandem.state.tree import RandomStates, load_part, read_parts, write_tree
from tandem.tracking.tracker import Tracker

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """The progress of the loop: the last finished step, and the evaluations."""

    step: int = 0
    evaluations: dict[int, float] = field(default_factory=dict)
    """Step → accuracy on the validation rows."""

    def remaining(self, last: int) -> range:
        return range(self.step + 1, last + 1)

    def keep_accuracy(self, step: int, figures: Mapping[str, float]) -> None:
        """Stores the accuracy of an evaluation at ``step``, if ``figures`` has one."""
        if "eval/accuracy" in figures:
            self.evaluations[step] = figures["eval/accuracy"]

    def state_dict(self) -> State:
        return {"step": self.step, "evaluations": [[step, value] for step, value in self.evaluations.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        self.evaluations = {int(step): float(value) for step, value in state["evaluations"]}


class DurableLedger:
    """A ledger and its file. Prompts are committed with the step in which they ended; a checkpoint records the last
    commit."""

    def __init__(self, ledger: Ledger, file: LedgerFile, progress: Progress):
        self._ledger, self._file, self._progress = ledger, file, progress
        self._refused: list[Record] = []

    def commit(self) -> None:
        """Commits the episodes that ended since the last call, and those of an earlier failed commit, at the finished
        step."""
        self._refused = [*self._refused, *self._ledger.take_ended()]
        self._file.commit(self._progress.step, self._refused)
        self._refused = []

    def forget(self) -> None:
        """Empties the ledger's file, for a run that begins anew."""
        self._file.roll_back(0)

    def state_dict(self) -> State:
        self.commit()
        return {"records": self._file.records, "digest": self._file.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Removes the records of later steps, and verifies the others. Must be called after the progress is loaded."""
        lost = self._file.roll_back(self._progress.step)
        self._file.verify(int(state["records"]), str(state["digest"]))
        self._ledger.load_records(self._file.ended(), {})
        if lost:
            log.info("%d prompts of later steps are trained again, because the weights trained on them are lost", lost)


class Recovery:
    """Writes the state of all parts of a run, and loads it again."""

    def __init__(
        self,
        run: RunFolder | None,
        parts: Mapping[str, Stateful],
        progress: Progress,
        team: Team,
        *,
        ledger: DurableLedger | None = None,
        still: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        prepare: Callable[[str], None] = lambda part: None,
        elsewhere: Elsewhere | None = None,
        again: bool = False,
    ):
        """Makes a recovery.

        Args:
            run: the run folder on rank 0; None on other ranks.
            parts: name → part of the state on this rank, in the order of loading.
            still: returns a context manager; no part changes while it is active.
            prepare: called with a part's name before the part is loaded; wakes the model of this part. Collective.
            elsewhere: processes besides the ranks that have parts of the state.
            again: True if this process started the run itself, and now continues it after a failure.
        """
        self._run, self._parts, self.progress, self._ledger, self._still = run, dict(parts), progress, ledger, still
        self.team = team
        self._prepare, self._elsewhere, self._again = prepare, elsewhere, again

    def write(self, folder: Path, states: Mapping[str, State] | None = None, team: Team | None = None) -> None:
        """Writes states into an empty folder. ``states``: copied earlier; None: the present ones. ``team``: the ranks that
        take part; None: all. Collective over ``team``.

        Raises:
            OSError: writing failed.
        """
        tree = self.states() if states is None else states
        write_tree(team or self.team, folder, tree)
        if self._elsewhere is not None:
            self._elsewhere.write(folder)

    def states(self) -> dict[str, State]:
        """Returns the present states of this rank's parts by name, without copying them. Collective."""
        tree: dict[str, State] = {}
        with self._still():
            for name in self._names():
                with self.team.together():
                    if name in self._parts:
                        tree[name] = self._parts[name].state_dict()
        return tree

    def commit(self, step: int) -> None:
        """Marks a step as finished, and writes the prompts that ended in it to the ledger. Collective."""
        self.progress.step = step
        with self.team.together(), self._still():
            if self._ledger is not None:
                self._ledger.commit()

    def resume(self) -> Path | None:
        """Loads the newest valid checkpoint if the folder holds a run; returns the checkpoint's folder, else None.
        Collective.

        A run that was interrupted before its first checkpoint begins anew, with a warning.

        Raises:
            NothingToResume: there are checkpoints, and none is valid.
            ConfigError: the checkpoint belongs to another model, data set or configuration.
            StateDamaged, LedgerDamaged: the state or the ledger does not match the checkpoint.
        """
        path = self.team.share(self._choose)
        if path is None:
            with self.team.together():
                if self._ledger is not None:
                    self._ledger.forget()
                if self._again and "tracker" in self._parts:
                    self._parts["tracker"].load_state_dict({"step": -1})
            self._begin()
            return None
        with self.team.together():
            tree = UNSAVED | read_parts(path / STATE)
        if self._elsewhere is not None:
            self._elsewhere.load(path / STATE, UNSAVED)
        for name in self._names():
            self._prepare(name)
            with self.team.together():
                if name in self._parts:
                    load_part(name, self._parts[name], tree, path)
        self._begin(step_of(path))
        return path

    def _begin(self, step: int = 0) -> None:
        """Marks the run as started; after this no configuration is refused. ``step``: the last finished step. Collective."""
        with self.team.together():
            if self._run is not None:
                self._run.begin(step)

    def _names(self) -> list[str]:
        """Returns the names of rank 0's parts on all ranks, so that all make collective calls in the same order."""
        return self.team.share(lambda: list(self._parts))

    def _choose(self) -> Path | None:
        run = self._run
        assert run is not None, "rank 0 has the run folder"
        remove_leftovers(run.checkpoints)
        before = run.going.found if run.going is not None and not self._again else None
        if before is None and not self._again:
            return None
        point = newest_valid(run.checkpoints, run.id if before is None else before.id or None)
        if point is None:
            aside = f", and the metrics up to step {before.steps} are set aside" if before and before.steps else ""
            log.warning("%s was interrupted before its first checkpoint: it begins anew at step 0%s", run.path, aside)
            return None
        for path, reason in point.skipped:
            log.warning("%s %s; it is skipped, and its folder renamed", path, reason)
        point.set_skipped_aside()
        if point.manifest.run != run.id:
            run.adopt(point.manifest.run)
        log.info("going on after step %d, from %s", point.step, point.path)
        return point.path


UNSAVED: dict[str, Any] = {"combination": {"spreads": {}}, "verifier": {"pool": [], "undecided": 0, "missed": 0}}
"""The states of these parts if a checkpoint does not contain them."""

LOADS = {"trainer": "load actor", "critic": "load critic", "reference": "load reference", "publisher": "publish"}
"""Part → the residency's stage in which it is loaded."""


def parts_of(
    session: TrainingSession, progress: Progress, tracker: Tracker | None, ledger: DurableLedger | None, device: str
) -> dict[str, Stateful]:
    """Returns all parts by name, in the order of loading: the ledger before the executor, which uses it; the weights before
    the publisher, which delivers them; the random states last, because loading may draw random numbers."""
    parts: dict[str, Stateful] = {"progress": progress}
    if ledger is not None:
        parts["ledger"] = ledger
    parts |= session.parts
    if tracker is not None:
        parts["tracker"] = tracker
    return parts | {"random": RandomStates(device, session.team)}


def recovery_of(
    session: TrainingSession,
    run: RunFolder | None,
    tracker: Tracker | None,
    device: str,
    stack: contextlib.ExitStack,
    *,
    again: bool = False,
) -> Recovery:
    """Makes the `Recovery` of a run; ``stack`` closes the ledger's file. ``again``: see `Recovery`. Collective."""
    progress, ledger = Progress(), None
    with session.team.together():
        if run is not None and session.ledger is not None:
            file = stack.enter_context(LedgerFile(run.path / FILE))
            ledger = DurableLedger(session.ledger, file, progress)
    parts = parts_of(session, progress, tracker, ledger, device)
    return Recovery(
        run,
        parts,
        progress,
        session.team,
        ledger=ledger,
        still=session.standing_still,
        prepare=lambda part: session.conductor.prepare(LOADS.get(part, part)),
        elsewhere=session.elsewhere,
        again=again,
    )
