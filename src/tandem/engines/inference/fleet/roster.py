"""The fleet's state: its members, where requests go, which weights are current. One lock guards all of it."""

import asyncio
import contextlib
import logging
import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from tandem.api.failures import EngineDied, InfrastructureFailure
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.api.shared_files import json_line
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.config.fleet import FleetConfig
from tandem.engines.inference.engine_calls import Threads
from tandem.engines.inference.fleet.members import (
    SERVING,
    Attempt,
    Health,
    Member,
    Router,
    Rules,
    ServerOrigin,
    ServerState,
    first_line,
    is_kept,
    work_of,
)

logger = logging.getLogger("tandem.fleet")


PROGRESS_STEP_S = 0.25
"""Signs of life of a healthy server within this many seconds of the last recorded one are not recorded."""

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
"""Seconds before a server that has failed again is retried: the first waiting time, which doubles up to the last."""

STEADY_S = 10.0
"""A server that fails is retried at once if it was healthy for longer than this many seconds and longer than twice its last
waiting time."""

EMPTY_WARNING_S = 3.0
"""Seconds without a healthy server after which a warning is logged."""

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Roster:
    """Members by name. Methods take the lock themselves; ``changed`` is notified of any change.

    ``journal``: file of the fault table (docs/fleet.md), emptied here; None: changes are only logged.
    """

    def __init__(self, config: FleetConfig, rules: Rules, version: WeightVersion, journal: Path | None):
        self.config, self.rules, self.version = config, rules, version
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.members: dict[str, Member] = {}
        self.router = Router()
        self.threads = Threads("fleet-call")
        self.counts: Counter[str] = Counter()
        self.update: WeightUpdate | None = None
        """The last committed update, which members that join receive."""
        self.paused = False
        self.asleep: set[str] = set()
        """Parts that sleep; weights are removed from this set by the next commit."""
        self.holding = False
        """True while new requests wait, because weights are about to change."""
        self.closed = False
        self.empty_since: float | None = time.monotonic()
        self._journal = journal
        if journal is not None:
            journal.parent.mkdir(parents=True, exist_ok=True)
            journal.write_text("", encoding="utf-8")
        self._waiters: list[Waiter] = []
        self._warned = False

    # ------------------------------------------------------------------ members

    def add(self, server: ServerOrigin) -> Member:
        """Adds a member that is not started yet."""
        with self.lock:
            if server.name in self.members:
                raise ValueError(f"the fleet has a server called {server.name!r} already")
            member = self.members[server.name] = Member(server, Health.new(time.monotonic()))
            self._write(member, "", "added", 0)
            return member

    def serving(self) -> list[Member]:
        """Returns the members that may have requests."""
        with self.lock:
            return [member for member in self.members.values() if member.health.state in SERVING]

    def change(self, member: Member, health: Health) -> None:
        """Sets the health of a member, and acts on the change: routing, requests to move, journal, restarts."""
        with self.changed:
            before, member.health = member.health, health
            # most changes are another sign of life, many a second: only a new state or incarnation has consequences
            if before is health or (before.state, before.incarnation) == (health.state, health.incarnation):
                return
            self._route(member)
            moved = self._give_up(member) if before.incarnation != health.incarnation else 0
            self._write(member, before.state, health.why, moved, time.monotonic() - before.progress)
            if health.state == ServerState.HEALTHY and member.healthy_at is None:
                member.healthy_at = time.monotonic()
            if health.state == ServerState.FENCED:
                self.counts["fenced"] += 1
                self.set_back(member)
                if member.probe is not None:
                    member.probe.get_loop().call_soon_threadsafe(member.probe.cancel)
            self.changed.notify_all()

    def set_back(self, member: Member) -> None:
        """Records that a member failed. The next try is at once; after repeated failures the waiting time grows."""
        now = time.monotonic()
        steady = member.healthy_at is not None and now - member.healthy_at > max(STEADY_S, 2 * _wait_s(member.setbacks))
        member.setbacks, member.healthy_at = 1 if steady else member.setbacks + 1, None
        member.retry_at = now + _wait_s(member.setbacks)

    def note(self, member: Member, why: str) -> None:
        """Writes a row of the fault table with the reason why a member stays in its state; the same reason only once in a
        row."""
        with self.lock:
            if member.health.why != why:
                member.health = replace(member.health, why=why)
                self._write(member, member.health.state, why, 0)

    def leave(self, name: str, why: str) -> None:
        """Lets a member leave: it gets no new requests, finishes its present requests, and is then retired."""
        with self.changed:
            member = self.members.get(name)
            if member is None or member.leaves_at is not None:
                return
            member.leaves_at = time.monotonic() + self.config.drain_timeout_s
            self._route(member)
            self._write(member, member.health.state, f"leaving: {why}", 0)
            self.changed.notify_all()

    def retire(self, member: Member, why: str, *, spare_kept: bool = False) -> None:
        """Removes a member for good. Its remaining requests are moved, and its engine is closed in a thread.

        ``spare_kept``: a server that outlives this process is left running, for the next process.
        """
        with self.changed:
            if self.members.get(member.name) is not member:
                return
            self.change(member, member.health.retires(why))
            del self.members[member.name]
            engine = member.engine
            if engine is not None:
                # closing may block for seconds, and the lock is held here
                self.threads.start(
                    getattr(engine, "let_go", engine.close) if spare_kept and is_kept(engine) else engine.close
                )

    def _route(self, member: Member) -> None:
        if member.health.state == ServerState.HEALTHY and member.leaves_at is None:
            self.router.add(member.name)
            if self.empty_since is not None:
                logger.info("there is a healthy server: %s", member.name)
                self.empty_since = None
            self.wake()
        else:
            self.router.remove(member.name)
            if not len(self.router) and self.empty_since is None:
                self.empty_since, self._warned = time.monotonic(), False

    def _give_up(self, member: Member) -> int:
        why = member.health.why
        attempts, member.attempts = list(member.attempts), set()
        # the server may still compute them; its cache cannot be trusted before they have ended
        member.orphans.update(attempts)
        for attempt in attempts:
            attempt.give_up(why)
        return len(attempts)

    def _write(self, member: Member, before: str, why: str, moved: int, silent_s: float | None = None) -> None:
        """Writes a row of the fault table: the state before (empty for a new member), requests that moved, seconds since the
        last token. In the log, suspect and fenced are warnings, unless the fleet itself ends."""
        after = member.health
        trouble = after.state in (ServerState.SUSPECT, ServerState.FENCED) and not self.closed
        logger.log(
            logging.WARNING if trouble else logging.INFO,
            "server %s: %s → %s (%s)%s",
            member.name,
            before or "new",
            after.state,
            why,
            f", {moved} requests move" if moved else "",
        )
        if self._journal is None:
            return
        row = {"time": round(time.time(), 3), "server": member.name, "from": before, "to": after.state, "why": why}
        row |= {"moved": moved, "incarnation": after.incarnation}
        row |= {} if silent_s is None else {"silent_s": round(silent_s, 3)}
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json_line(row) + "\n")

    # ------------------------------------------------------------------ requests

    def place(self, request: LLMRequest, avoid: Collection[str]) -> Attempt | None:
        """Reserves a server for a request; one in ``avoid`` only if there is no other. Returns None if the request has to
        wait."""
        with self.lock:
            if self.closed:
                raise EngineDied("the fleet was closed")
            if self.holding:
                return None
            work = work_of(len(request.input_ids), request.gconfig.max_new_tokens)
            lease = self.router.choose(work, request.affinity, avoid)
            # a server that failed this request is better than none
            if lease is None and avoid:
                lease = self.router.choose(work, request.affinity)
            if lease is None:
                return None
            member = self.members[lease.server]
            attempt = Attempt(member, lease, self.late)
            member.attempts.add(attempt)
            return attempt

    def waiter(self) -> "asyncio.Future[None]":
        """Returns a future on the caller's loop that is done when there may be a server."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self.lock:
            self._waiters.append((loop, future))
            # a server may have come between the caller's `place` and this lock, and would not wake the caller
            if self.closed or (len(self.router) and not self.holding):
                self.wake()
        return future

    def wake(self) -> None:
        """Lets all waiting requests look for a server again, in order of arrival."""
        with self.lock:
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_release, future)

    def ended(self, attempt: Attempt) -> None:
        """Records that a request has ended at its server, for any reason."""
        with self.lock:
            attempt.member.attempts.discard(attempt)
            self.router.end(attempt.lease)
            if self.holding or attempt.member.leaves_at is not None:
                self.changed.notify_all()

    def answered(self, attempt: Attempt, response: LLMResponse) -> None:
        if response.output_ids:
            now = time.monotonic()
            attempt.member.took(len(response.output_ids), now - attempt.began)
            self.alive(attempt.member, attempt.incarnation, now)

    def alive(self, member: Member, incarnation: int, now: float) -> None:
        health = member.health
        # without the lock: tokens arrive many times a second, and a wrong decision here does no harm
        if health.state == ServerState.HEALTHY and not health.failures and now - health.progress < PROGRESS_STEP_S:
            return
        with self.lock:
            health = member.health
            # read again under the lock: the server may have been fenced in between
            if health.incarnation == incarnation:
                self.change(member, health.token(now, self.version.number, self.rules))

    def failed(self, member: Member, incarnation: int, failure: Exception) -> None:
        """Records that a member failed a request or a call; ignored for an earlier incarnation."""
        with self.lock:
            if member.health.incarnation == incarnation:
                why = first_line(failure)
                fatal = isinstance(failure, EngineDied)
                self.change(member, member.health.fails(time.monotonic(), why, self.rules, fatal=fatal))

    def fence(self, member: Member, incarnation: int, why: str) -> None:
        self.failed(member, incarnation, EngineDied(why))

    def late(self, attempt: Attempt) -> None:
        """Records an answer that came after its server was given up. It is discarded, because its request has moved."""
        with self.lock:
            self.counts["late_answers"] += 1
            why = f"a late answer of incarnation {attempt.incarnation} was thrown away"
            self._write(attempt.member, attempt.member.health.state, why, 0)

    # ------------------------------------------------------------------ in words and figures

    def explain(self) -> str:
        """Describes every member and its state, for messages."""
        with self.lock:
            states = [f"{m.name} is {m.health.state} ({m.health.why})" for m in self.members.values()]
        return "; ".join(states) if states else "the fleet has no servers; add one: tandem fleet add KIND=URL RUN"

    def tell_if_empty(self, now: float) -> None:
        """Warns once if requests have waited long for a server."""
        with self.lock:
            # only if requests wait: a fleet without requests may be empty
            if (
                self._waiters
                and self.empty_since is not None
                and not self._warned
                and now - self.empty_since > EMPTY_WARNING_S
            ):
                self._warned = True
                logger.warning(
                    "no server is healthy; requests wait, %g s at most (rollout.fleet.startup_timeout_s): %s",
                    self.rules.empty_timeout_s,
                    self.explain(),
                )

    @property
    def quiet(self) -> bool:
        """True if no server is expected to make tokens now."""
        return self.paused or bool(self.asleep)

    def requests(self) -> int:
        with self.lock:
            return sum(len(member.attempts) for member in self.members.values())

    def set_paces(self) -> None:
        """Gives less work to servers that take much longer per token than the median: by a power of two."""
        with self.lock:
            measured = [m for m in self.members.values() if m.token_s and m.health.state == ServerState.HEALTHY]
            if len(measured) < 2:
                return
            # powers of two of the median, so that paces change seldom, and affinities with them
            median = statistics.median_low([m.token_s or 0.0 for m in measured])
            for member in measured:
                self.router.set_pace(member.name, 2.0 ** max(0, math.floor(math.log2((member.token_s or median) / median))))

    def metrics(self) -> dict[str, float]:
        with self.lock:
            work = list(self.router.work().values())
            names = ("fenced", "restarts", "moved", "late_answers", "interrupted")
            return {f"fleet/{name}": float(self.counts[name]) for name in names} | {
                "fleet/servers": float(len(self.members)),
                "fleet/healthy": float(len(self.router)),
                "fleet/work_spread": max(work) / (sum(work) / len(work)) if any(work) else 1.0,
            }

    def too_often(self, request_failures: list[InfrastructureFailure]) -> InfrastructureFailure:
        """Returns the failure of a request that failed at one server after another."""
        reasons = "; ".join(str(failure).partition("\n")[0] for failure in request_failures[-3:])
        return InfrastructureFailure(
            "servers_failed",
            f"a request failed {len(request_failures)} times, at one server after another: {reasons}",
        )


def _wait_s(setbacks: int) -> float:
    return 0.0 if setbacks < 2 else min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(10, setbacks - 2))


def _release(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
