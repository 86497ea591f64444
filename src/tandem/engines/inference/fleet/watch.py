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

from tandem.api.failures import WaitTimeout
from tandem.engines.inference.fleet.addresses import Wanted, read_addresses
from tandem.engines.inference.fleet.health import SERVING, State
from tandem.engines.inference.fleet.joining import Joiner
from tandem.engines.inference.fleet.members import Member, Server
from tandem.engines.inference.fleet.roster import Roster

logger = logging.getLogger("tandem.fleet")

TICK_S = 0.25
"""How often the members are looked at."""

READ_EVERY_S = 1.0
"""How often the addresses are read, and the paces set."""

STEPS_FORWARD = ("generated_tokens", "prefill_tokens", "recomputed_tokens", "server_tokens")
"""Counters of which any shows that a server is at work; the last is that of other makers' servers."""

Attach = Callable[[str, str], Server]
"""Kind and URL → how to attach to that server."""


class Watcher:
    """Owns the thread. ``watched`` is read every second where there is one; ``attach`` says how to reach what it names."""

    def __init__(
        self,
        roster: Roster,
        joiner: Joiner,
        watched: Path | None = None,
        attach: Attach | None = None,
    ):
        self._roster, self._joiner = roster, joiner
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
        """What is to be done with one member now; never waits."""
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
        elif member.health.state != State.RETIRED and member.job is None and now >= member.retry_at and not quiet:
            member.job = asyncio.get_running_loop().create_task(self._joiner.bring(member))

    def _ask_if_silent(self, member: Member, now: float) -> None:
        health = member.health
        suspect = health.state == State.SUSPECT
        if now - health.progress < self._roster.config.probe_every_s and not suspect:
            return
        assert self._loop is not None
        if member.probe is None:
            member.probe = self._loop.create_task(self._probe(member))
        if not member.counting and member.attempts:  # a token asked for may wait behind them
            member.counting = True
            self._do_beside(self._count(member))

    # ------------------------------------------------------------------ signs of life

    async def _probe(self, member: Member) -> None:
        engine, incarnation = member.engine, member.health.incarnation
        assert engine is not None
        try:
            response = await self._joiner.ask(engine, self._roster.config.stall_timeout_s + 1.0)
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
