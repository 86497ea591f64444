"""One server of the fleet, and one request on its way through it."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.api.engines import InferenceEngine
from tandem.api.failures import EngineDied, EpisodeFailure, InfrastructureFailure, WeightUpdateFailed
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.config.errors import ConfigError, kind_and_text
from tandem.engines.inference.fleet.health import Health
from tandem.engines.inference.fleet.router import Lease

PACE_MEMORY = 0.9
"""Share of the past in the running mean of seconds a token."""


@dataclass(frozen=True)
class ServerOrigin:
    """The way in which the fleet gets a server."""

    name: str
    """Unique in the fleet: ``embedded-0``, or ``KIND=URL`` for one that is attached."""

    make: Callable[[], InferenceEngine]
    """Starts it, or connects to it, and returns once that is done; may raise anything."""

    owned: bool
    """Started by this run: ended when it is fenced, and started again within the budget. Others are left as they are."""

    holds: int | None = None
    """Version of a freshly started server (its cache is empty), or None if unknown."""


def is_kept(engine: InferenceEngine) -> bool:
    """True if its server outlives this process, so that others can take it over."""
    return bool(getattr(getattr(engine, "process", None), "kept", False))


def taken_over(engine: InferenceEngine) -> bool:
    """True if its server was started by a process that is gone."""
    return bool(getattr(getattr(engine, "process", None), "taken_over", False))


class ServerFenced(InfrastructureFailure):
    """The server of a request was given up; the request moves."""

    def __init__(self, message: str):
        super().__init__("fenced", message)


class Attempt:
    """One request at one server. Made and awaited on the caller's event loop; given up from any thread."""

    __slots__ = ("began", "engine", "fenced", "future", "incarnation", "lease", "loop", "member", "on_late", "task")

    def __init__(self, member: "Member", lease: Lease, on_late: Callable[["Attempt"], None]):
        assert member.engine is not None
        self.member, self.lease, self.on_late = member, lease, on_late
        self.engine, self.incarnation = member.engine, member.health.incarnation
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[LLMResponse] = self.loop.create_future()
        self.task: asyncio.Task[LLMResponse] | None = None
        self.fenced = False
        self.began = time.monotonic()

    async def run(self, request: LLMRequest) -> LLMResponse:
        """The server's answer; a cancelled caller cancels the request there. Raises what the server raised.

        Raises:
            ServerFenced: see `give_up`. The request goes on at the server: what it answers is late.
        """
        self.task = self.loop.create_task(self.engine.agenerate(request))
        self.task.add_done_callback(self._settle)
        try:
            return await self.future
        finally:
            if not self.fenced:
                self.task.cancel()  # nothing where it is done

    def give_up(self, why: str) -> None:
        """Stops waiting for the server. From any thread."""
        self.fenced = True
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self._fail, ServerFenced(f"{self.member.name} was given up: {why}"))

    def abandon(self) -> None:
        """Tells the server that nobody wants the answer any more. From any thread."""
        if self.task is not None:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self.task.cancel)

    def time_out(self, seconds: float) -> None:
        """Fails the request: the server did not answer in time. On the caller's loop."""
        self._fail(InfrastructureFailure("request_timeout", f"{self.member.name} did not answer within {seconds:g} s"))

    def _fail(self, failure: InfrastructureFailure) -> None:
        if not self.future.done():
            self.future.set_exception(failure)

    def _settle(self, task: asyncio.Task[LLMResponse]) -> None:
        cancelled = task.cancelled()
        error = None if cancelled else task.exception()
        if self.fenced:
            self.member.orphans.discard(self)
        if self.future.done():
            if self.fenced and not cancelled and error is None:
                self.on_late(self)
        elif cancelled:
            self._fail(InfrastructureFailure("cancelled_by_server", f"{self.member.name} cancelled a request by itself"))
        elif error is not None:
            self.future.set_exception(self._fault(error))
        else:
            self.future.set_result(task.result())

    def _fault(self, error: BaseException) -> BaseException:
        """The failure to report: an error that is none of ours comes from an answer that nobody expected, so it is the
        server's fault, and the request moves."""
        if isinstance(error, EpisodeFailure) or not isinstance(error, Exception):
            return error
        failure = InfrastructureFailure("server", f"{self.member.name}: {kind_and_text(error)}")
        failure.__cause__ = error
        return failure


@dataclass(eq=False)
class Member:
    """A server as the fleet keeps it; guarded by the roster's lock."""

    server: ServerOrigin
    health: Health
    engine: InferenceEngine | None = None
    attempts: set[Attempt] = field(default_factory=set)
    orphans: set[Attempt] = field(default_factory=set)
    """Requests that were moved when it was fenced, and that it may still answer."""

    leaves_at: float | None = None
    """It is leaving: no new requests, and those that it has are moved at this time."""

    switching: bool = False
    restarts: list[float] = field(default_factory=list)
    """Times of its restarts."""

    retry_at: float = 0.0
    """Time before which nothing is tried with it."""

    setbacks: int = 0
    """Number of times in a row that it did not become healthy, or was not so for long."""

    healthy_at: float | None = None
    """When it became healthy, unless it failed since."""

    job: asyncio.Task[None] | None = None
    """The watcher's task that brings it (back)."""

    probe: asyncio.Task[None] | None = None
    """A token that it is asked for; of the watcher."""

    counting: bool = False
    steps: float = 0.0
    """Its counters of work when they were last looked at."""

    token_s: float | None = None
    """Running mean of the seconds that a request waits for a token."""

    seen: dict[str, float] = field(default_factory=dict)
    """The statistics of its engine when they were last read."""

    @property
    def name(self) -> str:
        return self.server.name

    def took(self, tokens: int, seconds: float) -> None:
        """Records how long a request of ``tokens`` tokens took."""
        if tokens >= 8:
            pace = seconds / tokens
            self.token_s = pace if self.token_s is None else PACE_MEMORY * self.token_s + (1 - PACE_MEMORY) * pace


def first_line(error: Exception) -> str:
    """An error in one line; of one that is not ours also its kind."""
    ours = isinstance(error, EngineDied | InfrastructureFailure | WeightUpdateFailed | ConfigError)
    return ((str(error) if ours else "") or kind_and_text(error)).partition("\n")[0]
