"""A fleet of inference servers as one engine: requests go to a healthy server, and to another where that one fails.

What callers see is `InferenceEngine`: one answer to each request, whatever happens to servers on the way. A request that its
server did not answer is asked anew, from its prompt and with its noise key, of another; so on our own engines its tokens do
not depend on which server answered. What a server that was given up answers later is thrown away.
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
from tandem.config.delivery import CANNOT_READ
from tandem.config.fleet import FleetConfig
from tandem.engines.inference.controlled import Controlled
from tandem.engines.inference.driver import cancelled
from tandem.engines.inference.fleet.addresses import Wanted
from tandem.engines.inference.fleet.health import ServerState
from tandem.engines.inference.fleet.members import Attempt, Member, ServerOrigin
from tandem.engines.inference.fleet.roster import Roster
from tandem.engines.inference.fleet.updates import Updates
from tandem.engines.inference.fleet.watch import Attach, Watcher

CLOSE_TIMEOUT_S = 30.0
STATISTICS_TIMEOUT_S = 2.0
"""A server that says nothing of itself within this time is counted with what it said before."""

HELD = frozenset({"running", "waiting", "shared_prompt_tokens", "kv_reserved_tokens", "kv_budget_tokens", "kv_held_bytes"})
HELD |= {"media_held_bytes"}
"""Statistics that are a state at this moment. All others are counters that only grow."""


class Fleet(Controlled):
    """One engine over many; made by `start`.

    ``capabilities``: what all its servers can do. ``first`` gives the weights of version 0 for servers of which nobody
    knows what they hold. ``journal`` is the file of the fault table, one JSON object a change of a server.
    """

    def __init__(
        self,
        config: FleetConfig,
        *,
        capabilities: frozenset[str],
        version: WeightVersion,
        journal: Path | None = None,
        watched: Path | None = None,
        attach: Attach | None = None,
        first: Callable[[], WeightUpdate] | None = None,
    ):
        self._config, self._capabilities = config, capabilities
        self.roster = Roster(config, version, journal)
        self._updates = Updates(self.roster, first)
        needed = next((frozenset({way}) for way in CANNOT_READ if way in capabilities), frozenset())
        self._watcher = Watcher(self.roster, self._updates, needed, watched, attach)
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._counting = threading.Lock()
        self._ended = False

    @classmethod
    def start(cls, servers: Sequence[ServerOrigin], config: FleetConfig, **rest: object) -> "Fleet":
        """Starts the servers of its own, all at once, and waits for them; others join as they answer.

        ``rest``: see the class.

        Raises:
            EngineDied, WaitTimeout, ConfigError: one of its own could not be started; none is left behind.
        """
        fleet = cls(config, **rest)  # type: ignore[arg-type]
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
        """Until each serves or has failed: else the first requests would all go to the one that is ready first."""
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
        """Asks one server after another until one answers.

        Raises:
            InfrastructureFailure: ``servers_failed`` after `rollout.fleet.max_server_retries` other servers.
            EngineDied: no server was healthy for `rollout.fleet.empty_timeout_s`, or the fleet was closed.
        """
        expires = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        failures: list[InfrastructureFailure] = []
        avoid: set[str] = set()
        # The same request with the same noise key: another Tandem server draws the same tokens, so a retry does not bias the
        # sample.
        while len(failures) <= self._config.max_server_retries:
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
        """One server's answer, within `rollout.fleet.request_timeout_s`."""
        if expires is not None:
            request = replace(request, deadline_s=max(0.0, expires - time.monotonic()))
        seconds = self._config.request_timeout_s
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
        """Until a server takes it; None when its deadline passes first.

        Raises:
            EngineDied: see `agenerate`.
        """
        began = time.monotonic()
        while True:
            # Registered before the look: a server that becomes healthy between the two wakes this future.
            future = self.roster.waiter()
            attempt = self.roster.place(request, avoid)
            if attempt is not None:
                return attempt
            self._watcher.check()
            now, empty = time.monotonic(), self.roster.empty_since
            limits = [] if expires is None else [expires - now]
            if empty is not None:
                # counted from this request's own beginning too, or one that comes late would fail at once
                limits.append(max(empty, began) + self._config.empty_timeout_s - now)
                if limits[-1] <= 0:
                    raise EngineDied(
                        f"no server was healthy for {self._config.empty_timeout_s:g} s (rollout.fleet.empty_timeout_s): "
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
        """The version that servers must hold to be given requests."""
        return self.roster.version

    @property
    def capabilities(self) -> frozenset[str]:
        """Those that all of its servers have."""
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
        """Calls the method of this name of all servers that serve; one that fails is fenced."""
        self._check()
        self._updates.everywhere_or_fence(name, lambda engine: getattr(engine, name)(*arguments))
        return {}

    def pause(self) -> None:
        """Pauses all servers; until `resume` none is suspected for making no tokens."""
        self.roster.paused = True
        super().pause()

    def resume(self) -> None:
        super().resume()
        self.roster.paused = False

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        """Waits for servers on their way, so that they sleep too: one that comes back would take all its memory meanwhile.

        Raises:
            RuntimeError: requests are under way.
        """
        if not self.roster.quiet:  # else none is on its way
            self._wait_for(list(self.roster.members.values()))
        if self.roster.requests():
            raise RuntimeError(f"sleep is refused while {self.roster.requests()} requests are under way")
        self.roster.asleep |= set(parts)  # first, so that none is asked for a token meanwhile
        super().sleep(parts)

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        """Servers whose weights slept are looked after again once new ones are committed."""
        super().wake(parts)
        self.roster.asleep -= set(parts) - {"weights"}

    # ------------------------------------------------------------------ joining and leaving

    def add(self, server: ServerOrigin) -> None:
        """A server joins: it is brought to the current weights before it serves."""
        self._check()
        self.roster.add(server)

    def remove(self, name: str) -> None:
        """A server leaves, once it has ended its requests or `rollout.fleet.drain_timeout_s` is over. Unknown: fine."""
        self.roster.leave(name, "it was asked to leave")

    def follow(self, wanted: Wanted) -> None:
        self._watcher.follow(wanted)

    # ------------------------------------------------------------------ figures and the end

    def statistics(self) -> dict[str, float]:
        """Sums over the servers, those that are gone included, and metrics ``fleet/…``.

        ``busy_s`` is that of the busiest: they work side by side.
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
        # requests and probes find out what is wrong with one that gives none
        return {member: read.result() if read.exception() is None else dict(member.seen) for member, read in done}

    def _check(self) -> None:
        if self.roster.closed:
            raise EngineDied("the fleet was closed")
        self._watcher.check()

    def close(self) -> None:
        """Servers that this run started end, or are left to whoever keeps them; attached ones are let go."""
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
