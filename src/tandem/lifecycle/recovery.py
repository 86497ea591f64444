"""The parts of a run that are saved, and the continuation of a run that was cut off.

What takes part are those parts of a session that have a state (`TrainingSession.parts`), and what every run has besides
(`parts_of`). A part is anything with a `state_dict` (`tandem.api.state.Stateful`).
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.api.state import State, Stateful
from tandem.api.team import Team
from tandem.flow.training import Elsewhere, TrainingSession
from tandem.rollout.ledger import Ledger
from tandem.state.checkpoint import remove_leftovers
from tandem.state.existing import step_of
from tandem.state.ledger import FILE, LedgerFile, Record
from tandem.state.manifest import STATE, newest_valid
from tandem.state.random_state import RandomStates
from tandem.state.run_folder import RunFolder
from tandem.state.tree import load_part, read_parts, write_tree
from tandem.tracking.tracker import Tracker

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """The place of the loop."""

    step: int = 0
    evaluations: dict[int, float] = field(default_factory=dict)
    """Step → accuracy on the validation rows."""

    def remaining(self, last: int) -> range:
        return range(self.step + 1, last + 1)

    def keep_accuracy(self, step: int, figures: Mapping[str, float]) -> None:
        """Keeps the accuracy among the figures of an evaluation, if they state one."""
        if "eval/accuracy" in figures:
            self.evaluations[step] = figures["eval/accuracy"]

    def state_dict(self) -> State:
        return {"step": self.step, "evaluations": [[step, value] for step, value in self.evaluations.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        self.evaluations = {int(step): float(value) for step, value in state["evaluations"]}


class DurableLedger:
    """A ledger and its file. Prompts are committed with the step in which they end; a checkpoint records the last commit."""

    def __init__(self, ledger: Ledger, file: LedgerFile, progress: Progress):
        self._ledger, self._file, self._progress = ledger, file, progress
        self._refused: list[Record] = []

    def commit(self) -> None:
        """Commits the episodes that ended since the last call, at the step that is done; with those that the disk refused
        then."""
        self._refused = [*self._refused, *self._ledger.take_ended()]
        self._file.commit(self._progress.step, self._refused)
        self._refused = []

    def forget(self) -> None:
        """Empties the ledger, for a run that begins anew."""
        self._file.roll_back(0)

    def state_dict(self) -> State:
        self.commit()
        return {"records": self._file.records, "digest": self._file.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After the progress: takes back what later steps did, and checks the rest record by record."""
        lost = self._file.roll_back(self._progress.step)
        self._file.verify(int(state["records"]), str(state["digest"]))
        self._ledger.load_records(self._file.ended(), {})
        if lost:
            log.info("%d prompts of later steps are trained again: the weights that learnt from them are lost", lost)


class Recovery:
    """Writes the state of all parts, and reads it back."""

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
        """``run``: on rank 0. ``parts``: of this rank, in the order in which they are loaded. ``still``: a block in which
        nothing of them changes. ``prepare``: wakes what the part of this name loads into; collective. ``elsewhere``: the
        processes that have parts of their own. ``again``: this process goes on with the run that it has begun itself."""
        self._run, self._parts, self.progress, self._ledger, self._still = run, dict(parts), progress, ledger, still
        self.team = team
        self._prepare, self._elsewhere, self._again = prepare, elsewhere, again

    def write(self, folder: Path, states: Mapping[str, State] | None = None, team: Team | None = None) -> None:
        """Writes the states into an empty folder: ``states``, a copy that was taken before, or those of now. Collective
        over ``team``, None: all that take part in the run.

        Raises:
            OSError: the disk refuses.
        """
        tree = self.states() if states is None else states
        write_tree(team or self.team, folder, tree, writes=self._run is not None)
        if self._elsewhere is not None:
            self._elsewhere.write(folder)

    def states(self) -> dict[str, State]:
        """The states of this rank's parts by name, as they are now and not copied. Collective."""
        tree: dict[str, State] = {}
        with self._still():
            for name in self._names():
                with self.team.together():
                    if name in self._parts:
                        tree[name] = self._parts[name].state_dict()
        return tree

    def commit(self, step: int) -> None:
        """The step is done: what ended in it is on the disk. Collective."""
        self.progress.step = step
        with self.team.together(), self._still():
            if self._ledger is not None:
                self._ledger.commit()

    def resume(self) -> Path | None:
        """Goes on from the newest valid checkpoint, if the folder holds a run; returns its folder. Collective.

        A run that was cut off before its first checkpoint begins anew, and says so.

        Raises:
            NothingToResume: there are checkpoints, and none is valid.
            ConfigError: the checkpoint is of another model, data set or configuration.
            StateDamaged, LedgerDamaged: what the checkpoint says is not there.
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
        """Marks the run as started: from here on no configuration is refused. ``step``: the last one done. Collective."""
        with self.team.together():
            if self._run is not None:
                self._run.begin(step)

    def _names(self) -> list[str]:
        """Rank 0's parts, on all ranks: one order for what is collective."""
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
            log.warning("%s was cut off before its first checkpoint: it begins anew at step 0%s", run.path, aside)
            return None
        for path, reason in point.skipped:
            log.warning("%s %s; it is skipped, and set aside", path, reason)
        point.set_skipped_aside()
        if point.manifest.run != run.id:
            run.adopt(point.manifest.run)
        log.info("going on after step %d, from %s", point.step, point.path)
        return point.path


UNSAVED: dict[str, Any] = {"combination": {"spreads": {}}, "verifier": {"pool": [], "undecided": 0, "missed": 0}}
"""The states that these parts have where a checkpoint says nothing of them."""

LOADS = {"trainer": "load actor", "critic": "load critic", "reference": "load reference", "publisher": "publish"}
"""The stages of the residency in which these parts are loaded."""


def parts_of(
    session: TrainingSession, progress: Progress, tracker: Tracker | None, ledger: DurableLedger | None, device: str
) -> dict[str, Stateful]:
    """In the order of loading: the ledger before the executor that counts in it, the weights before the publisher that
    delivers them, and the random states last, for loading may draw."""
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
    """Makes the recovery of a run; ``stack`` closes the ledger's file. ``again``: see `Recovery`. Collective."""
    progress, ledger = Progress(), None
    with session.team.together():
        if run is not None and session.ledger is not None:
            file = stack.enter_context(LedgerFile(run.path / FILE))
            ledger = DurableLedger(session.ledger, file, progress)
    parts = parts_of(session, progress, tracker, ledger, device)
    prepare = lambda part: session.conductor.prepare(LOADS.get(part, part))  # noqa: E731
    doing: dict[str, Any] = {"still": session.standing_still, "prepare": prepare, "elsewhere": session.elsewhere}
    return Recovery(run, parts, progress, session.team, ledger=ledger, again=again, **doing)
