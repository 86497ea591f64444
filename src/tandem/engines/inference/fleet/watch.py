"""The fleet's own thread: watches all members, brings servers into service (again), and reads the file of addresses.

Its inputs are time, signs of life and the watched addresses; its outputs are changes of health. The loop waits for no
server: slow work runs in tasks or threads, so that a server that hangs does not delay the checks of others.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tandem.api.engines import InferenceEngine
from tandem.api.failures import WaitTimeout, WeightUpdateFailed
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.config.errors import ConfigError
from tandem.config.rollout import CANNOT_READ, GenerationConfig
from tandem.engines.inference.fleet.addresses import Wanted, read_addresses
from tandem.engines.inference.fleet.members import SERVING, Member, ServerOrigin, ServerState, first_line, taken_over
from tandem.engines.inference.fleet.roster import Roster
from tandem.engines.inference.fleet.updates import Updates

logger = logging.getLogger("tandem.fleet")

RESTART_WINDOW_S = 3600.0
"""Seconds within which restarts count towards `rollout.fleet.max_restarts`."""

PROBE = GenerationConfig(max_new_tokens=1, n_samples=1)

TICK_S = 0.25
"""Seconds between checks of the members."""

READ_EVERY_S = 1.0
"""Seconds between readings of the addresses; paces are set at the same times."""

STEPS_FORWARD = ("generated_tokens", "prefill_tokens", "recomputed_tokens", "server_tokens")
"""Counters whose growth shows that a server is at work; the last is that of vLLM and SGLang servers."""

Attach = Callable[[str, str], ServerOrigin]
"""Makes, from a kind and a URL, the description of a server to attach to."""


class Watcher:
    """Owns the thread, and moves members on: starting → stale → healthy, and back from fenced.

    ``needed``: capabilities without which a server cannot read this fleet's weights. ``watched``: file or folder of
    addresses, read every second; ``attach`` describes how to attach to an address.
    """

    def __init__(
        self,
        roster: Roster,
        updates: Updates,
        needed: frozenset[str],
        watched: Path | None = None,
        attach: Attach | None = None,
    ):
        self._roster, self._updates, self._needed = roster, updates, needed
        self._watched, self._attach = watched, attach
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._attached: set[str] = set()
        self._warned: set[str] = set()
        self._reading = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread and cancels its work on members. Idempotent."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def check(self) -> None:
        """Raises the exception that ended the thread, if one did."""
        if self._broken is not None:
            raise self._broken

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception as error:  # the worker boundary: the fleet's next caller gets the cause
            self._broken = error
            logger.exception("the fleet's own thread ended")
            self._roster.wake()

    async def _watch(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        before, read_at = time.monotonic(), 0.0
        while not self._stop.is_set() and not self._roster.closed:
            now = time.monotonic()
            self._look_at_all(now, now - before)
            before = now
            if now >= read_at:
                read_at = now + READ_EVERY_S
                self._roster.set_paces()
                self._roster.tell_if_empty(now)
                if self._watched is not None and not self._reading:
                    self._reading = True
                    self._spawn(self._read(self._watched))
            try:
                await asyncio.wait_for(self._stop.wait(), TICK_S)
            except TimeoutError:
                continue
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    def _look_at_all(self, now: float, passed: float) -> None:
        roster = self._roster
        with roster.lock:
            members = list(roster.members.values())
            quiet = roster.quiet
        stood_still = passed - TICK_S if passed > 4 * TICK_S else 0.0  # this process stood still, not the servers
        for member in members:
            if quiet or stood_still:
                with roster.lock:
                    roster.change(member, member.health.slept(passed if quiet else stood_still))
            self._look(member, now, quiet)

    def _look(self, member: Member, now: float, quiet: bool) -> None:
        """Advances a server's health. Then retires a server that leaves, probes a silent one, or starts a task that brings
        up one that does not serve; waits for none of these. While the fleet is ``quiet``, servers are only retired."""
        roster = self._roster
        if not quiet:
            with roster.lock:
                roster.change(member, member.health.ticks(now, roster.rules, switching=member.switching))
        if member.leaves_at is not None and (
            member.health.state not in SERVING or not member.attempts or now >= member.leaves_at
        ):
            roster.retire(member, "it left")
            return
        if member.health.state in SERVING:
            if not quiet:
                self._ask_if_silent(member, now)
        elif member.health.state != ServerState.RETIRED and member.job is None and now >= member.retry_at and not quiet:
            member.job = asyncio.get_running_loop().create_task(self.bring(member))

    def _ask_if_silent(self, member: Member, now: float) -> None:
        health = member.health
        suspect = health.state == ServerState.SUSPECT
        if now - health.progress < self._roster.rules.probe_every_s and not suspect:
            return
        assert self._loop is not None
        if member.probe is None:
            member.probe = self._loop.create_task(self._probe(member))
        if not member.counting and member.attempts:  # the probe may queue behind them
            member.counting = True
            self._spawn(self._count(member))

    # ------------------------------------------------------------------ one member on its way

    async def bring(self, member: Member) -> None:
        """Takes a member's next step towards healthy. A failure counts against the member, and is retried later."""
        roster, before = self._roster, member.health
        try:
            work = {ServerState.STARTING: self._start, ServerState.FENCED: self._revive, ServerState.STALE: self._join}[
                before.state
            ]
            await work(member)
        except WeightUpdateFailed as error:  # often the files are just being rewritten
            roster.set_back(member)
            roster.note(member, f"it could not take the weights yet: {first_line(error)}")
        except ConfigError as error:  # the server can never serve this run
            roster.retire(member, str(error))
        except Exception as error:  # the worker boundary: it is the member's failure
            roster.fence(member, before.incarnation, first_line(error))
            if member.health is before:  # it was fenced already, and did not come back
                roster.set_back(member)
        finally:
            member.job = None

    async def ask(self, engine: InferenceEngine, timeout_s: float) -> LLMResponse:
        """Generates one token. The engine's own exceptions pass through.

        Raises:
            WaitTimeout: no token came within ``timeout_s``.
        """
        request = LLMRequest((1,), PROBE, deadline_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await engine.agenerate(request)
        except TimeoutError:
            raise WaitTimeout(f"no token came within {timeout_s:g} s") from None

    async def _start(self, member: Member) -> None:
        """Starts the member's server, or connects to it."""
        roster, server = self._roster, member.server
        engine = await roster.threads.call(self.make, server)
        if not server.owned:
            await self._first_token(engine)
        with roster.lock:
            if roster.members.get(member.name) is not member or roster.closed:
                roster.threads.start(engine.close)
                return
            self.take(member, engine)

    def take(self, member: Member, engine: InferenceEngine) -> None:
        """Records that a member answers, through this engine. If its server was taken over, its weights are unknown."""
        ran_before = taken_over(engine)
        health = member.health.answers("it was taken over from an earlier process" if ran_before else "it answers")
        holds = None if ran_before else member.server.holds
        with self._roster.lock:
            member.engine, member.steps, member.seen, member.switching = engine, 0.0, {}, False
            self._roster.change(member, health if holds is None else health.delivered(holds).emptied(holds))

    def begin(self, member: Member) -> None:
        """Starts the member's server, or connects to it; called in a thread when the fleet starts."""
        self.take(member, self.make(member.server))

    def make(self, server: ServerOrigin) -> InferenceEngine:
        """Makes a server's engine; called in a thread. Closes it again if the fleet was closed meanwhile."""
        engine = server.make()
        if self._roster.closed:
            engine.close()
        return engine

    async def _revive(self, member: Member) -> None:
        """Brings a fenced member back. The run's own server is restarted; an attached one must generate a token;
        if it does not, it is connected to again."""
        roster = self._roster
        if member.server.owned:
            await self._restart(member)
        elif member.engine is None:
            roster.change(member, member.health.starts("another try"))
        else:
            try:
                await self.ask(member.engine, roster.rules.suspect_after_s)
            except Exception:  # the worker boundary: another process, to which we are unknown, may answer now
                await self._connect_anew(member, member.engine)
            with roster.lock:
                roster.change(member, member.health.answers("it answers again"))

    async def _connect_anew(self, member: Member, before: InferenceEngine) -> None:
        engine = await self._roster.threads.call(self.make, member.server)
        if engine is before:
            await self.ask(engine, self._roster.rules.suspect_after_s)
            return
        await self._first_token(engine)
        self.take(member, engine)
        self._let_go(before)

    async def _first_token(self, engine: InferenceEngine) -> None:
        """Requests a generated token over a new connection, and drops the connection if none comes."""
        try:
            await self.ask(engine, self._roster.rules.suspect_after_s)
        except BaseException:
            self._let_go(engine)
            raise

    def _let_go(self, engine: InferenceEngine) -> None:
        """Drops only the connection. Releasing the server would take it away from a newer connection of this run."""
        self._roster.threads.start(getattr(engine, "let_go", engine.close))

    async def _restart(self, member: Member) -> None:
        """Ends one of the run's own servers and lets it start again, within `rollout.fleet.max_restarts`."""
        roster, now = self._roster, time.monotonic()
        member.restarts = [at for at in member.restarts if now - at < RESTART_WINDOW_S]
        if len(member.restarts) >= roster.config.max_restarts:
            roster.retire(
                member,
                f"it failed {len(member.restarts) + 1} times within an hour "
                f"(rollout.fleet.max_restarts={roster.config.max_restarts}); the last: {member.health.why}",
            )
            return
        member.restarts.append(now)
        roster.counts["restarts"] += 1
        if member.engine is not None:
            await roster.threads.call(member.engine.close)
        member.engine = None
        with roster.lock:
            member.orphans.clear()
            roster.change(member, member.health.starts())

    async def _join(self, member: Member) -> None:
        """Brings a stale member to current weights and an empty cache, and has it generate a token with them."""
        roster, engine = self._roster, member.engine
        assert engine is not None
        readable = {"disk"} if "shared_memory" in engine.capabilities else set()  # on this machine, so it reads folders, too
        for capability in self._needed - engine.capabilities - readable:
            roster.retire(member, CANNOT_READ[capability])
            return
        await roster.threads.call(self._updates.catch_up, member)
        response = await self.ask(engine, roster.rules.stall_timeout_s)
        with roster.lock:
            if roster.quiet or not response.output_ids:
                return
            now, target = time.monotonic(), roster.version.number
            if response.versions[-1] != member.health.weights:
                raise WeightUpdateFailed(
                    f"{member.name} made a token with version {response.versions[-1]}, though it was given {target}"
                )
            roster.change(member, member.health.admitted(now, target))

    # ------------------------------------------------------------------ signs of life

    async def _probe(self, member: Member) -> None:
        engine, incarnation = member.engine, member.health.incarnation
        assert engine is not None
        try:
            response = await self.ask(engine, self._roster.rules.stall_timeout_s + 1.0)
            if response.output_ids:
                self._roster.alive(member, incarnation, time.monotonic())
        except WaitTimeout:
            pass  # `Health.ticks` judges silence
        except Exception as error:  # the worker boundary: it is the member's failure
            self._roster.failed(member, incarnation, error)
            await asyncio.sleep(TICK_S)
        finally:
            member.probe = None

    async def _count(self, member: Member) -> None:
        engine, incarnation = member.engine, member.health.incarnation
        assert engine is not None
        try:
            counters = await self._roster.threads.call(engine.statistics)
            steps = sum(counters.get(name, 0.0) for name in STEPS_FORWARD)
            if steps != member.steps:
                member.steps = steps
                self._roster.alive(member, incarnation, time.monotonic())
        except Exception as error:  # the worker boundary: it is the member's failure
            self._roster.failed(member, incarnation, error)
        finally:
            member.counting = False

    # ------------------------------------------------------------------ which servers are in the fleet

    async def _read(self, path: Path) -> None:
        try:
            wanted = await self._roster.threads.call(read_addresses, path)
            self.follow(wanted)
        except OSError as error:
            self._warn_once(f"{path} cannot be read, the fleet stays as it is: {error}")
        finally:
            self._reading = False

    def follow(self, wanted: Wanted) -> None:
        """Adds servers that are newly listed, and lets servers leave that are no longer listed or are asked to leave."""
        for problem in wanted.problems:
            self._warn_once(problem)
        names = {str(address): address for address in wanted.servers}
        for name, address in names.items():
            if name not in self._attached and name not in self._roster.members and self._attach is not None:
                self._roster.add(self._attach(address.kind, address.url))
                self._attached.add(name)
        for name in list(self._attached - names.keys()):
            self._roster.leave(name, "its address was taken away")
            self._attached.discard(name)
        for name in wanted.leaving:
            self._roster.leave(name, "it was asked to leave")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)
