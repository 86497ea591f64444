"""Weight updates over a fleet: prepared and committed everywhere; whoever fails is fenced, whoever joins catches up."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from tandem.api.engines import InferenceEngine
from tandem.api.failures import EngineDied, InfrastructureFailure, WeightUpdateFailed
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.engines.inference.fleet.health import SERVING, ServerState
from tandem.engines.inference.fleet.members import Member, first_line
from tandem.engines.inference.fleet.roster import Roster

logger = logging.getLogger("tandem.fleet")

LOOK_S = 0.05
"""While several members are waited for, check this often whether one was fenced."""

ORPHANS_S = 10.0
"""A server that comes back has this long to let go of requests that were moved away from it."""

Outcome = dict[str, float] | Exception


class Updates:
    """Delivers to all members that serve. One update at a time; `catch_up` may run beside it, for members that do not serve.

    ``first`` gives the weights that the run begins with, for members of which nobody knows what they hold.
    """

    def __init__(self, roster: Roster, first: Callable[[], WeightUpdate] | None = None):
        self._roster, self._first = roster, first
        self._pending: WeightUpdate | None = None
        self._prepared: dict[Member, int] = {}

    # ------------------------------------------------------------------ all members

    def prepare(self, update: WeightUpdate) -> None:
        """Prepares it everywhere. Without a member that serves it is kept for those that come.

        Raises:
            WeightUpdateFailed: every member refused it, so the update is at fault; all of them still serve what they served.
        """
        roster = self._roster
        self._pending, self._prepared = None, {}
        with roster.lock:
            members = roster.serving()
            starts = {member: member.health.incarnation for member in members}
        # without the lock: a prepare may take minutes, and requests must find servers meanwhile
        outcomes = self.everywhere("prepare", starts, lambda engine: engine.prepare_weights(update) or {})
        took = [member for member in members if isinstance(outcomes.get(member), dict)]
        refused = [o for o in outcomes.values() if isinstance(o, WeightUpdateFailed)]
        # Nobody took it: the update is at fault, and fencing the whole fleet for it would end the run. One refusal among
        # successes is the server's fault.
        if refused and not took:
            raise WeightUpdateFailed(f"all {len(members)} servers refused it: {refused[0]}") from refused[0]
        self._fence_failed(starts, outcomes, f"version {update.version.number} was not prepared")
        self._prepared = {member: starts[member] for member in took}
        self._pending = update

    def commit(self, version: WeightVersion) -> dict[str, float]:
        """Switches everywhere; from then on only members that hold ``version`` are given requests.

        Returns the longest ``pause_s`` and ``recompute_s``.

        Raises:
            WeightUpdateFailed: it was not prepared, or no member could switch.
        """
        roster, update = self._roster, self._pending
        if update is None or update.version != version:
            held = "nothing" if update is None else f"version {update.version.number}"
            raise WeightUpdateFailed(f"version {version.number} cannot be committed: {held} is prepared")
        try:
            if roster.config.finish_before_update:
                self._wait_for_running()
            with roster.lock:
                # A server that was fenced after it prepared has another incarnation: it may have restarted, and holds
                # nothing to commit.
                starts = {m: i for m, i in self._prepared.items() if m.health.incarnation == i and m.health.state in SERVING}
            outcomes = self.everywhere("commit", starts, lambda engine: engine.commit_weights(version))
            reports = [outcome for outcome in outcomes.values() if isinstance(outcome, dict)]
            refused = [outcome for outcome in outcomes.values() if isinstance(outcome, WeightUpdateFailed)]
            if refused and not reports:
                # a refusal leaves the old weights; any other failure may have come in the middle of the switch
                unsure = {m: o for m, o in outcomes.items() if not isinstance(o, WeightUpdateFailed)}
                self._fence_failed(starts, unsure, f"version {version.number} was not committed")
                raise WeightUpdateFailed(f"no server switched to version {version.number}: {refused[0]}") from refused[0]
            self._fence_failed(starts, outcomes, f"version {version.number} was not committed")
            self._switched(update, [m for m in starts if isinstance(outcomes.get(m), dict)], starts)
        finally:
            self._pending, self._prepared = None, {}
            roster.holding = False
            roster.wake()
        return {key: max((report.get(key, 0.0) for report in reports), default=0.0) for key in ("pause_s", "recompute_s")}

    def discard(self) -> None:
        """Forgets what was prepared, everywhere."""
        starts = {member: start for member, start in self._prepared.items() if member.health.state in SERVING}
        self._pending, self._prepared = None, {}
        self.everywhere("discard", starts, lambda engine: engine.discard_weights() or {})

    def everywhere_or_fence(self, what: str, action: Callable[[InferenceEngine], None]) -> None:
        """Calls ``action`` for all members that serve, and fences those that fail. If all fail, raises the first failure."""
        with self._roster.lock:
            starts = {member: member.health.incarnation for member in self._roster.serving()}

        def act(engine: InferenceEngine) -> dict[str, float]:
            action(engine)
            return {}

        outcomes = self.everywhere(what, starts, act)
        errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
        if errors and len(errors) == len(outcomes) and not isinstance(errors[0], EngineDied):
            raise errors[0]
        self._fence_failed(starts, outcomes, f"{what} failed")

    def _switched(self, update: WeightUpdate, members: Sequence[Member], starts: dict[Member, int]) -> None:
        """Under the lock, so that nobody sees half of it: sets the version, what members hold, and who missed the update."""
        roster, number = self._roster, update.version.number
        with roster.lock:
            now = time.monotonic()
            roster.version, roster.update = update.version, update
            roster.asleep.discard("weights")
            for member in members:
                if member.health.incarnation == starts[member]:
                    health = member.health.delivered(number).emptied(number)
                    roster.change(member, health.token(now, number, roster.rules))
            # servers that missed the update must not get requests under its version
            for member in roster.members.values():
                roster.change(member, member.health.outdated(number))
        if not members:
            logger.warning("version %d: no server took it, it is kept for those that come; %s", number, roster.explain())

    def _wait_for_running(self) -> None:
        """Holds new requests back until none is under way, within the deadline."""
        roster = self._roster
        until = time.monotonic() + roster.config.drain_timeout_s
        with roster.changed:
            roster.holding = True
            while roster.requests() and not roster.closed:
                left = until - time.monotonic()
                if left <= 0:
                    # the update goes ahead: staleness must not grow for one slow request
                    roster.counts["interrupted"] += roster.requests()
                    logger.warning(
                        "the update interrupts %d requests, still running after %g s (rollout.fleet.drain_timeout_s)",
                        roster.requests(),
                        roster.config.drain_timeout_s,
                    )
                    return
                roster.changed.wait(min(left, 1.0))

    def _fence_failed(self, starts: dict[Member, int], outcomes: dict[Member, Outcome], what: str) -> None:
        for member, outcome in outcomes.items():
            if isinstance(outcome, Exception):
                self._roster.fence(member, starts[member], f"{what}: {first_line(outcome)}")

    def everywhere(
        self, what: str, starts: Mapping[Member, int], action: Callable[[InferenceEngine], dict[str, float]]
    ) -> dict[Member, Outcome]:
        """Calls ``action`` for all members at once; returns the outcome of each that was not fenced meanwhile.

        ``starts``: the incarnation that is meant; a member that is another by now is left out.

        Once one has done it, any that takes longer than `rollout.fleet.stall_timeout_s` more is fenced, and so is one that
        is suspect `rollout.fleet.suspect_after_s` later; but not in a commit, where it may compute keys and values anew.
        """
        roster = self._roster
        with roster.lock:
            engines = {m: m.engine for m, i in starts.items() if m.engine is not None and m.health.incarnation == i}
            for member in engines:
                # a server computes no tokens while it switches; the watcher must not take that for a stall
                member.switching = what == "commit"
        calls = {member: roster.threads.start(self._act, member, action, engine) for member, engine in engines.items()}
        first_at: float | None = None
        while True:
            outcomes = {member: call.result() for member, call in calls.items() if call.done()}
            with roster.lock:
                waiting = [m for m in calls if m not in outcomes and m.health.incarnation == starts[m]]
                if not waiting or roster.closed:
                    return outcomes
                # the clock starts with the first success: before it the update itself may be what takes long
                if first_at is None and any(isinstance(outcome, dict) for outcome in outcomes.values()):
                    first_at = time.monotonic()
                if first_at is not None:
                    passed = time.monotonic() - first_at
                    late = passed > roster.config.stall_timeout_s
                    grace = passed <= roster.config.suspect_after_s or what == "commit"
                    for member in waiting:
                        if late or (member.health.state == ServerState.SUSPECT and not grace):
                            why = f"it did not {what} though others did; {member.health.why}"
                            roster.fence(member, starts[member], why)
            wait([calls[member] for member in waiting], LOOK_S, FIRST_COMPLETED)

    def _act(
        self, member: Member, action: Callable[[InferenceEngine], dict[str, float]], engine: InferenceEngine
    ) -> Outcome:
        try:
            return action(engine)
        except Exception as error:  # the worker boundary: the other members decide what becomes of it
            return error
        finally:
            member.switching = False

    # ------------------------------------------------------------------ one member that does not serve

    def catch_up(self, member: Member) -> None:
        """Brings a stale member to the fleet's version with an empty cache; blocks.

        Raises:
            WeightUpdateFailed: the update could not be read (it is being written anew, perhaps): try again soon.
            InfrastructureFailure, OSError, RuntimeError: the member's fault.
        """
        roster = self._roster
        with roster.lock:
            engine, start, health = member.engine, member.health.incarnation, member.health
            target, update = roster.version.number, roster.update
        assert engine is not None
        if health.weights == health.cache == target:
            return
        if health.weights is None:  # nobody knows what it has in its cache, and what of ours it still computes
            _let_go(member)
            engine.flush()
        if update is None:
            if self._first is None:
                raise InfrastructureFailure(
                    "no_weights", f"there are no weights of version {target} to give to {member.name}"
                )
            update = self._first()
        with contextlib.suppress(WeightUpdateFailed):
            # what it prepared may be of an update that the fleet has given up
            engine.discard_weights()
        engine.prepare_weights(update)
        engine.commit_weights(update.version)
        with roster.lock:
            if member.health.incarnation == start:
                number = update.version.number
                roster.change(member, member.health.delivered(number).emptied(number))


def _let_go(member: Member) -> None:
    """Waits until the server has ended the requests that were moved away from it."""
    until = time.monotonic() + ORPHANS_S
    for orphan in list(member.orphans):
        orphan.abandon()
    while member.orphans and time.monotonic() < until:
        time.sleep(LOOK_S)
    member.orphans.clear()
