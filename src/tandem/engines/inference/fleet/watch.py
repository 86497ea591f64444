"""The fleet's own thread: looks after every member, brings those that come (back), and reads who shall be there.

Consumes time, signs of life and the watched addresses; produces changes of health. It waits for nobody: whatever may take
long runs in a task of its own or in a thread, so one server that hangs delays no look at another.
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
from tandem.config.delivery import CANNOT_READ
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig
from tandem.engines.inference.fleet.addresses import Wanted, read_addresses
from tandem.engines.inference.fleet.health import SERVING, ServerState
from tandem.engines.inference.fleet.members import Member, ServerOrigin, first_line, taken_over
from tandem.engines.inference.fleet.roster import Roster
from tandem.engines.inference.fleet.updates import Updates

logger = logging.getLogger("tandem.fleet")

RESTART_WINDOW_S = 3600.0
"""`rollout.fleet.max_restarts` counts within this time."""

PROBE = GenerationConfig(max_new_tokens=1, n_samples=1)

TICK_S = 0.25
"""Seconds between looks at the members."""

READ_EVERY_S = 1.0
"""Seconds between readings of the addresses, when the paces are set too."""

STEPS_FORWARD = ("generated_tokens", "prefill_tokens", "recomputed_tokens", "server_tokens")
"""Counters of which any shows that a server is at work; the last is that of other makers' servers."""

Attach = Callable[[str, str], ServerOrigin]
"""Kind and URL → how to attach to that server."""


class Watcher:
    """Owns the thread, and brings members on their way: starting → stale → healthy, and back from fenced.

    ``needed``: capabilities without which a server cannot read this fleet's weights. ``watched`` is read every second where
    there is one; ``attach`` says how to reach what it names.
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
        self._told: set[str] = set()
        self._reading = False
        self._beside: set[asyncio.Task[None]] = set()
        self._broken: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends; what it was doing with members is cancelled. Idempotent."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def check(self) -> None:
        """Raises what ended the thread, if something did."""
        if self._broken is not None:
            raise self._broken

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception as error:  # the worker boundary: whoever asks the fleet next gets the cause
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
                    self._do_beside(self._read(self._watched))
            try:
                await asyncio.wait_for(self._stop.wait(), TICK_S)
            except TimeoutError:
                continue
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _do_beside(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._beside.add(task)  # the loop itself would forget it
        task.add_done_callback(self._beside.discard)

    def _look_at_all(self, now: float, passed: float) -> None:
        roster = self._roster
        with roster.lock:
            members = list(roster.members.values())
            quiet = roster.quiet
        stood_still = passed - TICK_S if passed > 4 * TICK_S else 0.0  # this process did, so nobody was asked
        for member in members:
            if quiet or stood_still:
                with roster.lock:
                    roster.change(member, member.health.slept(passed if quiet else stood_still))
            self._look(member, now, quiet)

    def _look(self, member: Member, now: float, quiet: bool) -> None:
        """Does what one member needs now; never waits."""
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
        if now - health.progress < self._roster.config.probe_every_s and not suspect:
            return
        assert self._loop is not None
        if member.probe is None:
            member.probe = self._loop.create_task(self._probe(member))
        if not member.counting and member.attempts:  # a token asked for may wait behind them
            member.counting = True
            self._do_beside(self._count(member))

    # ------------------------------------------------------------------ one member on its way

    async def bring(self, member: Member) -> None:
        """The next step on a member's way. Its failure is the member's, and it is tried again later."""
        roster, before = self._roster, member.health
        try:
            work = {ServerState.STARTING: self._start, ServerState.FENCED: self._revive, ServerState.STALE: self._join}[
                before.state
            ]
            await work(member)
        except WeightUpdateFailed as error:  # often it is only being written anew
            roster.set_back(member)
            roster.note(member, f"it could not take the weights yet: {first_line(error)}")
        except ConfigError as error:  # it can never do what is asked of it
            roster.retire(member, str(error))
        except Exception as error:  # the worker boundary: it is the member's failure
            roster.fence(member, before.incarnation, first_line(error))
            if member.health is before:  # it was fenced already, and did not come back
                roster.set_back(member)
        finally:
            member.job = None

    async def ask(self, engine: InferenceEngine, timeout_s: float) -> LLMResponse:
        """One token.

        Raises:
            WaitTimeout: none came within ``timeout_s``. Else what the engine raises.
        """
        request = LLMRequest((1,), PROBE, deadline_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await engine.agenerate(request)
        except TimeoutError:
            raise WaitTimeout(f"it made no token within {timeout_s:g} s") from None

    async def _start(self, member: Member) -> None:
        """Starts it, or connects to it."""
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
        """A member answers by this engine. Of one that is taken over nobody knows what it holds."""
        ran_before = taken_over(engine)
        health = member.health.answers("it was taken over as it runs" if ran_before else "it answers")
        holds = None if ran_before else member.server.holds
        with self._roster.lock:
            member.engine, member.steps, member.seen, member.switching = engine, 0.0, {}, False
            self._roster.change(member, health if holds is None else health.delivered(holds).emptied(holds))

    def begin(self, member: Member) -> None:
        """Starts it, or connects to it, in a thread; for the beginning of a fleet."""
        self.take(member, self.make(member.server))

    def make(self, server: ServerOrigin) -> InferenceEngine:
        """In a thread; what comes after the end is closed again."""
        engine = server.make()
        if self._roster.closed:
            engine.close()
        return engine

    async def _revive(self, member: Member) -> None:
        """A fenced member: one of ours is started again; another one is asked for a token, else connected to anew."""
        roster = self._roster
        if member.server.owned:
            await self._restart(member)
        elif member.engine is None:
            roster.change(member, member.health.starts("another try"))
        else:
            try:
                await self.ask(member.engine, roster.config.suspect_after_s)
            except Exception:  # the worker boundary: it may be another process by now, which knows nothing of us
                await self._connect_anew(member, member.engine)
            with roster.lock:
                roster.change(member, member.health.answers("it answers again"))

    async def _connect_anew(self, member: Member, before: InferenceEngine) -> None:
        engine = await self._roster.threads.call(self.make, member.server)
        if engine is before:
            await self.ask(engine, self._roster.config.suspect_after_s)
            return
        await self._first_token(engine)
        self.take(member, engine)
        self._let_go(before)

    async def _first_token(self, engine: InferenceEngine) -> None:
        """A connection that was just made counts once a token came over it."""
        try:
            await self.ask(engine, self._roster.config.suspect_after_s)
        except BaseException:
            self._let_go(engine)
            raise

    def _let_go(self, engine: InferenceEngine) -> None:
        """Drops a connection only: to give the server back would take it away from a newer connection of ours."""
        self._roster.threads.start(getattr(engine, "let_go", engine.close))

    async def _restart(self, member: Member) -> None:
        """Ends one of ours and lets it start again, within the budget."""
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
        """A stale member: current weights, an empty cache, and a token made with them."""
        roster, engine = self._roster, member.engine
        assert engine is not None
        here = {"disk"} if "shared_memory" in engine.capabilities else set()  # a folder of this machine, too
        for capability in self._needed - engine.capabilities - here:
            roster.retire(member, CANNOT_READ[capability])
            return
        await roster.threads.call(self._updates.catch_up, member)
        response = await self.ask(engine, roster.config.stall_timeout_s)
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
            response = await self.ask(engine, self._roster.config.stall_timeout_s + 1.0)
            if response.output_ids:
                self._roster.alive(member, incarnation, time.monotonic())
        except WaitTimeout:
            pass  # the clock says that better: `Health.ticks`
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

    # ------------------------------------------------------------------ who shall be there

    async def _read(self, path: Path) -> None:
        try:
            wanted = await self._roster.threads.call(read_addresses, path)
            self.follow(wanted)
        except OSError as error:
            self._tell_once(f"{path} cannot be read, the fleet stays as it is: {error}")
        finally:
            self._reading = False

    def follow(self, wanted: Wanted) -> None:
        """Adds who is new, and lets go who is no longer named, or asked to leave."""
        for problem in wanted.problems:
            self._tell_once(problem)
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

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning("%s", message)
