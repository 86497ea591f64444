"""Weight updates over a fleet: prepared and committed on all servers. A server that fails is fenced; one that joins catches
up."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from tandem.api.engines import InferenceEngine
from tandem.api.failures import EngineDied, InfrastructureFailure, WeightUpdateFailed
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.engines.inference.fleet.members import SERVING, Member, ServerState, first_line
from tandem.engines.inference.fleet.roster import Roster

logger = logging.getLogger("tandem.fleet")

LOOK_S = 0.05
"""Seconds between two checks whether a member was fenced, while the fleet waits for several members."""

ORPHANS_S = 10.0
"""Maximum seconds until a server that comes back has ended the requests that were moved to other servers."""

Outcome = dict[str, float] | Exception


class Updates:
    """Delivers weights to all serving members. One update runs at a time; `catch_up` may run beside it, for other members.

    ``first``: returns the run's initial weights, for members whose weights are unknown.
    """

    def __init__(self, roster: Roster, first: Callable[[], WeightUpdate] | None = None):
        self._roster, self._first = roster, first
        self._pending: WeightUpdate | None = None
        self._prepared: dict[Member, int] = {}

    # ------------------------------------------------------------------ all members

    def prepare(self, update: WeightUpdate) -> None:
        """Prepares the update on all serving members. If no member serves, stores the update for members that join.

        Raises:
            WeightUpdateFailed: every member refused the update, so the update is at fault; all still serve the old weights.
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
        # If no member took it, the update is at fault, and fencing the whole fleet would end the run. One refusal among
        # successes is the server's fault.
        if refused and not took:
            raise WeightUpdateFailed(f"all {len(members)} servers refused it: {refused[0]}") from refused[0]
        self._fence_failed(starts, outcomes, f"version {update.version.number} was not prepared")
        self._prepared = {member: starts[member] for member in took}
        self._pending = update

    def commit(self, version: WeightVersion) -> dict[str, float]:
        """Switches all members that prepared ``version``; from then on only members that hold it get requests.

        Returns the longest ``pause_s`` and ``recompute_s``.

        Raises:
            WeightUpdateFailed: the version was not prepared, or no member could switch.
        """
        roster, update = self._roster, self._pending
        if update is None or update.version != version:
            prepared = "nothing" if update is None else f"version {update.version.number}"
            raise WeightUpdateFailed(f"version {version.number} cannot be committed: {prepared} is prepared")
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
        """Discards the prepared weights on all members."""
        starts = {member: start for member, start in self._prepared.items() if member.health.state in SERVING}
        self._pending, self._prepared = None, {}
        self.everywhere("discard", starts, lambda engine: engine.discard_weights() or {})

    def everywhere_or_fence(self, name: str, action: Callable[[InferenceEngine], None]) -> None:
        """Calls ``action`` for all serving members, and fences those that fail. If all fail, raises the first failure."""
        with self._roster.lock:
            starts = {member: member.health.incarnation for member in self._roster.serving()}

        def act(engine: InferenceEngine) -> dict[str, float]:
            action(engine)
            return {}

        outcomes = self.everywhere(name, starts, act)
        errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
        if errors and len(errors) == len(outcomes) and not isinstance(errors[0], EngineDied):
            raise errors[0]
        self._fence_failed(starts, outcomes, f"{name} failed")

    def _switched(self, update: WeightUpdate, members: Sequence[Member], starts: dict[Member, int]) -> None:
        """Sets, in one locked step, the fleet's version, what members hold, and which members missed the update."""
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
            logger.warning(
                "version %d: no server took the update, so it waits for servers that join; %s", number, roster.explain()
            )

    def _wait_for_running(self) -> None:
        """Holds new requests back and waits until none is under way, at most `rollout.fleet.drain_timeout_s`."""
        roster = self._roster
        until = time.monotonic() + roster.config.drain_timeout_s
        with roster.changed:
            roster.holding = True
            while roster.requests() and not roster.closed:
                remaining = until - time.monotonic()
                if remaining <= 0:
                    # the update goes ahead: staleness must not grow for one slow request
                    roster.counts["interrupted"] += roster.requests()
                    logger.warning(
                        "the update interrupts %d requests, still running after %g s (rollout.fleet.drain_timeout_s)",
                        roster.requests(),
                        roster.config.drain_timeout_s,
                    )
                    return
                roster.changed.wait(min(remaining, 1.0))

    def _fence_failed(self, starts: dict[Member, int], outcomes: dict[Member, Outcome], problem: str) -> None:
        for member, outcome in outcomes.items():
            if isinstance(outcome, Exception):
                self._roster.fence(member, starts[member], f"{problem}: {first_line(outcome)}")

    def everywhere(
        self, name: str, starts: Mapping[Member, int], action: Callable[[InferenceEngine], dict[str, float]]
    ) -> dict[Member, Outcome]:
        """Calls ``action`` for all members at once. Returns the outcome of each member that was not fenced meanwhile.

        ``starts``: the expected incarnation of each member; a member with another incarnation is left out.

        Once one member has succeeded, a member that takes `rollout.fleet.stall_timeout_s` longer is fenced. So is a member
        that is suspect `Rules.suspect_after_s` later, except in a commit, where it may recompute keys and values.
        """
        roster = self._roster
        with roster.lock:
            engines = {m: m.engine for m, i in starts.items() if m.engine is not None and m.health.incarnation == i}
            for member in engines:
                # a server computes no tokens while it switches; the watcher must not take that for a stall
                member.switching = name == "commit"
        calls = {member: roster.threads.start(self._act, member, action, engine) for member, engine in engines.items()}
        first_at: float | None = None
        while True:
            outcomes = {member: call.result() for member, call in calls.items() if call.done()}
            with roster.lock:
                waiting = [m for m in calls if m not in outcomes and m.health.incarnation == starts[m]]
                if not waiting or roster.closed:
                    return outcomes
                # the clock starts with the first success: before it, the update itself may take long
                if first_at is None and any(isinstance(outcome, dict) for outcome in outcomes.values()):
                    first_at = time.monotonic()
                if first_at is not None:
                    passed = time.monotonic() - first_at
                    late = passed > roster.rules.stall_timeout_s
                    grace = passed <= roster.rules.suspect_after_s or name == "commit"
                    for member in waiting:
                        if late or (member.health.state == ServerState.SUSPECT and not grace):
                            why = f"it did not {name} though others did; {member.health.why}"
                            roster.fence(member, starts[member], why)
            wait([calls[member] for member in waiting], LOOK_S, FIRST_COMPLETED)

    def _act(
        self, member: Member, action: Callable[[InferenceEngine], dict[str, float]], engine: InferenceEngine
    ) -> Outcome:
        try:
            return action(engine)
        except Exception as error:  # the worker boundary: the caller decides, by the other members' outcomes
            return error
        finally:
            member.switching = False

    # ------------------------------------------------------------------ one member that does not serve

    def catch_up(self, member: Member) -> None:
        """Brings a stale member to the fleet's version, with an empty cache; blocks.

        Raises:
            WeightUpdateFailed: the update could not be read, perhaps because it is being rewritten: try again soon.
            InfrastructureFailure, OSError, RuntimeError: the member's fault.
        """
        roster = self._roster
        with roster.lock:
            engine, start, health = member.engine, member.health.incarnation, member.health
            target, update = roster.version.number, roster.update
        assert engine is not None
        if health.weights == health.cache == target:
            return
        if health.weights is None:  # its cache is unknown, and it may still compute requests of ours
            _let_go(member)
            engine.flush()
        if update is None:
            if self._first is None:
                raise InfrastructureFailure(
                    "no_weights", f"there are no weights of version {target} to give to {member.name}"
                )
            update = self._first()
        with contextlib.suppress(WeightUpdateFailed):
            # it may have prepared an update that the fleet has given up
            engine.discard_weights()
        engine.prepare_weights(update)
        engine.commit_weights(update.version)
        with roster.lock:
            if member.health.incarnation == start:
                number = update.version.number
                roster.change(member, member.health.delivered(number).emptied(number))


def _let_go(member: Member) -> None:
    """Cancels the requests that were moved away from the server, and waits until it has ended them."""
    until = time.monotonic() + ORPHANS_S
    for orphan in list(member.orphans):
        orphan.abandon()
    while member.orphans and time.monotonic() < until:
        time.sleep(LOOK_S)
    member.orphans.clear()
