"""How a server comes (back) to serve: started or connected to, brought to the current weights, proven by a token."""

import asyncio
import time

from tandem.api.engines import InferenceEngine
from tandem.api.failures import WaitTimeout, WeightUpdateFailed
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig
from tandem.engines.inference.fleet.health import State
from tandem.engines.inference.fleet.members import Member, Server, taken_over
from tandem.engines.inference.fleet.roster import Roster
from tandem.engines.inference.fleet.updates import Updates

RESTART_WINDOW_S = 3600.0
"""`rollout.fleet.max_restarts` counts within this time."""

CANNOT_READ = {
    "shared_memory": "this run hands weights over in shared memory, which it cannot read; set rollout.fleet.watch or "
    "rollout.fleet.servers, and they go by disk",
    "disk": "this run hands weights over in folders, and it reads none; start it with --weights-root and the folder that "
    "rollout.weights.folder names",
}
"""Why a server without that capability gets no weights."""

PROBE = GenerationConfig(max_new_tokens=1, n_samples=1)


class Joiner:
    """Brings members on their way: starting → stale → healthy, and back from fenced. On the watcher's loop.

    ``needed``: capabilities without which a server cannot read this fleet's weights.
    """

    def __init__(self, roster: Roster, updates: Updates, needed: frozenset[str]):
        self._roster, self._updates, self._needed = roster, updates, needed

    async def bring(self, member: Member) -> None:
        """The next step on a member's way. Its failure is the member's, and it is tried again later."""
        roster, before = self._roster, member.health
        try:
            work = {State.STARTING: self._start, State.FENCED: self._revive, State.STALE: self._join}[before.state]
            await work(member)
        except WeightUpdateFailed as error:  # often it is only being written anew
            roster.set_back(member)
            roster.note(member, f"it could not take the weights yet: {_first_line(error)}")
        except ConfigError as error:  # it can never do what is asked of it
            roster.retire(member, str(error))
        except Exception as error:  # the worker boundary: it is the member's failure
            roster.fence(member, before.incarnation, _first_line(error))
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
        found = taken_over(engine)
        health = member.health.answers(time.monotonic(), "it was taken over as it runs" if found else "it answers")
        holds = None if found else member.server.holds
        with self._roster.lock:
            member.engine, member.steps, member.seen, member.switching = engine, 0.0, {}, False
            self._roster.change(member, health if holds is None else health.delivered(holds).emptied(holds))

    def begin(self, member: Member) -> None:
        """Starts it, or connects to it, in a thread; for the beginning of a fleet."""
        self.take(member, self.make(member.server))

    def make(self, server: Server) -> InferenceEngine:
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
            roster.change(member, member.health.starts(time.monotonic(), "another try"))
        else:
            try:
                await self.ask(member.engine, roster.config.suspect_after_s)
            except Exception:  # the worker boundary: it may be another process by now, which knows nothing of us
                await self._connect_anew(member, member.engine)
            with roster.lock:
                roster.change(member, member.health.answers(time.monotonic(), "it answers again"))

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
            roster.change(member, member.health.starts(time.monotonic()))

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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
