"""A fleet of inference servers as one engine: requests go to a healthy server, and to another one if that fails.

Callers see an `InferenceEngine`: one answer to each request, whatever happens to servers meanwhile. A request that its
server did not answer starts again at another, from its prompt and with the same noise key; so on our own engines its tokens
do not depend on the server. Late answers of a server that was given up are discarded.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.api.engines import InferencePart
from tandem.api.failures import DataFailure, EngineDied, InfrastructureFailure
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.config.fleet import FleetConfig
from tandem.config.rollout import CANNOT_READ
from tandem.engines.inference.driver import cancelled
from tandem.engines.inference.engine_calls import Controlled
from tandem.engines.inference.fleet.addresses import Wanted
from tandem.engines.inference.fleet.members import Attempt, Member, Rules, ServerOrigin, ServerState
from tandem.engines.inference.fleet.roster import Roster
from tandem.engines.inference.fleet.updates import Updates
from tandem.engines.inference.fleet.watch import Attach, Watcher

CLOSE_TIMEOUT_S = 30.0
STATISTICS_TIMEOUT_S = 2.0
"""Seconds that `Fleet.statistics` waits for servers. A slower server is left out; its counters are included next time."""

HELD = frozenset({"running", "waiting", "shared_prompt_tokens", "kv_reserved_tokens", "kv_budget_tokens", "kv_held_bytes"})
HELD |= {"media_held_bytes"}
"""Statistics that describe the present state. All others are counters that only grow."""


class Fleet(Controlled):
    """One engine over many servers; made by `start`.

    ``rules``: the limits by which servers are judged. ``capabilities``: those that all servers have. ``first``: returns the
    weights of version 0, for servers whose weights are unknown. ``journal``: file of the fault table, with one JSON object
    per change of a server.
    """

    def __init__(
        self,
        config: FleetConfig,
        *,
        rules: Rules | None = None,
        capabilities: frozenset[str],
        version: WeightVersion,
        journal: Path | None = None,
        watched: Path | None = None,
        attach: Attach | None = None,
        first: Callable[[], WeightUpdate] | None = None,
    ):
        self._config, self._rules, self._capabilities = config, rules or Rules(), capabilities
        self.roster = Roster(config, self._rules, version, journal)
        self._updates = Updates(self.roster, first)
        needed = next((frozenset({channel}) for channel in CANNOT_READ if channel in capabilities), frozenset())
        self._watcher = Watcher(self.roster, self._updates, needed, watched, attach)
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._counting = threading.Lock()
        self._ended = False

    @classmethod
    def start(cls, servers: Sequence[ServerOrigin], config: FleetConfig, **options: object) -> "Fleet":
        """Starts the run's own servers, all at once, and waits for them; attached servers join when they answer.

        ``options``: see the class.

        Raises:
            EngineDied, WaitTimeout, ConfigError: one of the run's own servers could not be started; all are closed again.
        """
        fleet = cls(config, **options)  # type: ignore[arg-type]
        owned = [member for member in (fleet.roster.add(server) for server in servers) if member.server.owned]
        try:
            fleet._start(owned)
            fleet._watcher.start()
            fleet._wait_for(owned)
        except BaseException:
            fleet.close()
            raise
        return fleet

    def _wait_for(self, members: Sequence[Member]) -> None:
        """Waits until each member serves or has failed; otherwise all first requests would go to the first ready server."""
        with self.roster.changed:
            self.roster.changed.wait_for(
                lambda: all(member.health.state not in (ServerState.STARTING, ServerState.STALE) for member in members),
                self._config.startup_timeout_s,
            )

    def _start(self, members: Sequence[Member]) -> None:
        starts = [self.roster.threads.start(self._watcher.begin, member) for member in members]
        done, _ = wait(starts, return_when=FIRST_EXCEPTION)  # each has its own deadline
        for start in done:
            start.result()

    # ------------------------------------------------------------------ requests

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Sends the request to one server after another until one answers.

        Raises:
            InfrastructureFailure: ``servers_failed`` after `Rules.max_server_retries` other servers.
            EngineDied: no server was healthy for `Rules.empty_timeout_s`, or the fleet was closed.
        """
        expires = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        failures: list[InfrastructureFailure] = []
        avoid: set[str] = set()
        # The same request with the same noise key: another Tandem server draws the same tokens, so a retry does not bias the
        # sample.
        while len(failures) <= self._rules.max_server_retries:
            attempt = self.roster.place(request, avoid) or await self._wait_for_server(request, avoid, expires)
            if attempt is None:
                return cancelled(request)
            try:
                return await self._attempt(attempt, request, expires)
            except InfrastructureFailure as failure:
                if self.roster.closed:
                    raise EngineDied("the fleet was closed") from failure
                failures.append(failure)
                avoid.add(attempt.member.name)
                self.roster.counts["moved"] += 1
        raise self.roster.too_often(failures) from failures[-1]

    async def _attempt(self, attempt: Attempt, request: LLMRequest, expires: float | None) -> LLMResponse:
        """Returns one server's answer, within `Rules.request_timeout_s`."""
        if expires is not None:
            request = replace(request, deadline_s=max(0.0, expires - time.monotonic()))
        seconds = self._rules.request_timeout_s
        timer = attempt.loop.call_later(seconds, attempt.time_out, seconds)
        try:
            response = await attempt.run(request)
        # the request's own fault, and a sign of life of the server
        except DataFailure:
            self.roster.alive(attempt.member, attempt.incarnation, time.monotonic())
            raise
        except InfrastructureFailure as failure:
            self.roster.failed(attempt.member, attempt.incarnation, failure)
            raise
        finally:
            timer.cancel()
            self.roster.ended(attempt)
        self.roster.answered(attempt, response)
        return response

    async def _wait_for_server(self, request: LLMRequest, avoid: set[str], expires: float | None) -> Attempt | None:
        """Waits for a server that takes the request; returns None if its deadline passes first.

        Raises:
            EngineDied: see `agenerate`.
        """
        began = time.monotonic()
        while True:
            # Registered before `place`: a server that becomes healthy between the two wakes this future.
            future = self.roster.waiter()
            attempt = self.roster.place(request, avoid)
            if attempt is not None:
                return attempt
            self._watcher.check()
            now, empty = time.monotonic(), self.roster.empty_since
            limits = [] if expires is None else [expires - now]
            if empty is not None:
                # counted from this request's own start at the earliest, or a new request would fail at once
                limits.append(max(empty, began) + self._rules.empty_timeout_s - now)
                if limits[-1] <= 0:
                    raise EngineDied(
                        f"no server was healthy for {self._rules.empty_timeout_s:g} s (rollout.fleet.startup_timeout_s): "
                        f"{self.roster.explain()}"
                    )
            if expires is not None and limits[0] <= 0:
                return None
            try:
                async with asyncio.timeout(min(limits) if limits else None):
                    await future
            except TimeoutError:
                continue

    # ------------------------------------------------------------------ weights

    @property
    def version(self) -> WeightVersion:
        """The version that servers must hold to get requests."""
        return self.roster.version

    @property
    def capabilities(self) -> frozenset[str]:
        """Capabilities that all servers have."""
        return self._capabilities

    def prepare_weights(self, update: WeightUpdate) -> None:
        self._check()
        self._updates.prepare(update)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        self._check()
        return self._updates.commit(version)

    def discard_weights(self) -> None:
        self._updates.discard()

    # ------------------------------------------------------------------ control

    def control(self, name: str, *arguments: Any) -> dict[str, float]:
        """Calls the method of this name on all serving servers. A server that fails is fenced."""
        self._check()
        self._updates.everywhere_or_fence(name, lambda engine: getattr(engine, name)(*arguments))
        return {}

    def pause(self) -> None:
        """Pauses all servers. Until `resume`, no server becomes suspect because it makes no tokens."""
        self.roster.paused = True
        super().pause()

    def resume(self) -> None:
        super().resume()
        self.roster.paused = False

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        """Puts all servers to sleep. First waits for servers that are starting, because they would allocate memory
        afterwards.

        Raises:
            RuntimeError: requests are under way.
        """
        if not self.roster.quiet:  # while quiet, no server is starting
            self._wait_for(list(self.roster.members.values()))
        if self.roster.requests():
            raise RuntimeError(f"sleep is refused while {self.roster.requests()} requests are under way")
        self.roster.asleep |= set(parts)  # before the call, so that no server is probed meanwhile
        super().sleep(parts)

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        """Wakes all servers. If weights slept, servers are watched again once new weights are committed."""
        super().wake(parts)
        self.roster.asleep -= set(parts) - {"weights"}

    # ------------------------------------------------------------------ joining and leaving

    def add(self, server: ServerOrigin) -> None:
        """Adds a server. It gets the current weights before it serves."""
        self._check()
        self.roster.add(server)

    def remove(self, name: str) -> None:
        """Lets a server leave once its requests have ended or `rollout.fleet.drain_timeout_s` is over. Unknown names are
        ignored."""
        self.roster.leave(name, "it was asked to leave")

    def follow(self, wanted: Wanted) -> None:
        self._watcher.follow(wanted)

    # ------------------------------------------------------------------ figures and the end

    def statistics(self) -> dict[str, float]:
        """Returns sums over all servers, past ones included, and metrics ``fleet/…``.

        ``busy_s`` is that of the busiest server, because servers work in parallel.
        """
        with self._counting:
            read = self._read_statistics()
            held: defaultdict[str, float] = defaultdict(float)
            busy: list[float] = []
            for member, counters in read.items():
                for name, value in counters.items():
                    # a counter that fell belongs to a restarted server: all of it is new
                    before = member.seen.get(name, 0.0)
                    grown = value - before if value >= before else value
                    if name in HELD:
                        held[name] += value
                    elif name == "busy_s":
                        busy.append(grown)
                    else:
                        self._totals[name] += grown
                member.seen = counters
            self._totals["busy_s"] += max(busy, default=0.0)
            return {"generated_tokens": 0.0, **self._totals, **held, **self.roster.metrics()}

    def _read_statistics(self) -> dict[Member, dict[str, float]]:
        roster = self.roster
        with roster.lock:
            engines = [(member, member.engine) for member in roster.serving() if member.engine is not None]
        reads = [(member, engine, roster.threads.start(engine.statistics)) for member, engine in engines]
        wait([read for _, _, read in reads], STATISTICS_TIMEOUT_S)
        with roster.lock:
            done = [(member, read) for member, engine, read in reads if read.done() and member.engine is engine]
        # why a server gives none, requests and probes will find out
        return {member: read.result() if read.exception() is None else dict(member.seen) for member, read in done}

    def _check(self) -> None:
        if self.roster.closed:
            raise EngineDied("the fleet was closed")
        self._watcher.check()

    def close(self) -> None:
        """Ends the servers that this run started, except those that outlive the run's process; disconnects from attached
        servers."""
        if self._ended:
            return
        self._ended = True
        roster = self.roster
        roster.closed = True
        with roster.changed:
            roster.changed.notify_all()
        self._watcher.stop()
        with roster.lock:
            members = list(roster.members.values())
        for member in members:
            roster.retire(member, "the fleet was closed", spare_kept=True)
        roster.wake()
        roster.threads.join(CLOSE_TIMEOUT_S)
