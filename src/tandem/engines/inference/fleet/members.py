"""One server of the fleet, and one request at a server.

The health of one server is a pure state machine; time is an argument.

::

    starting ──► stale ──► healthy ◄──► suspect
       ▲           ▲          │            │
       │           │          ▼            ▼
       └───────────┴─────── fenced ◄───────┘        any state ──► retired

- *starting*: it has not answered yet.
- *stale*: it answers, but may hold other weights than the fleet's (it may have missed an update), or a cache of other
  weights. It gets no requests.
- *healthy*: it holds the fleet's weights, its cache holds nothing older, and it made a token not long ago. New requests go
  to healthy servers only.
- *suspect*: it has made no token for a while, or failed a request. It gets no new requests; those that it has may still end.
- *fenced*: given up. Its requests were moved, and its late answers are discarded (`incarnation`).
- *retired*: gone for good.

A server becomes healthy only through `Health._if_current`: weights and cache must both be at the fleet's version. Fencing
forgets both, so a server that comes back needs a delivery of weights and an empty cache, whatever it reports.

`Router` chooses the server of a request: the server that has computed its prefix, otherwise the server with the least work.
It is pure, and not thread-safe. A choice costs one dictionary look-up, or one pass over the servers, whatever the number of
requests.
"""

import asyncio
import contextlib
import enum
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tandem.api.engines import InferenceEngine
from tandem.api.failures import EngineDied, EpisodeFailure, InfrastructureFailure, WeightUpdateFailed
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.config.errors import ConfigError, kind_and_text
from tandem.config.fleet import SUSPECT_AFTER_S

MAX_AFFINITIES = 200_000
"""Most groups and chats whose server is remembered; the least recently used is forgotten first."""

PROMPT_TOKENS_PER_TOKEN = 16
"""Number of prompt tokens that cost as much as one generated token: a prompt's tokens are computed in parallel."""


def work_of(prompt_tokens: int, max_new_tokens: int) -> int:
    """Returns an estimate of a request's work, in generated tokens; at least 1."""
    return 1 + max_new_tokens + prompt_tokens // PROMPT_TOKENS_PER_TOKEN


class _RoutedServer:
    """A server's entry in the router. A server that leaves and joins again gets a new entry."""

    __slots__ = ("live", "name", "pace", "stamp", "work")

    def __init__(self, name: str):
        self.name, self.live = name, True
        self.work = self.stamp = 0
        self.pace = 1.0


class Lease(NamedTuple):
    """A request's share of a server's work; end it with `Router.end`."""

    place: _RoutedServer
    work: int

    @property
    def server(self) -> str:
        return self.place.name


class Router:
    """Distributes requests over the healthy servers: `add` a server when it becomes healthy, `remove` it when it fails.

    - *Affinity*: requests with one affinity (samples of a group, turns of a chat) go to one server for as long as it stays.
    - *Least work*: any other request goes to the server with the least work, in estimated tokens times its pace; among
      equals, to the server that was given work longest ago. Groups arrive whole, so no server is ahead of another by more
      than the work of the largest group.
    """

    def __init__(self, max_affinities: int = MAX_AFFINITIES):
        self._places: dict[str, _RoutedServer] = {}
        self.affinities: OrderedDict[str, _RoutedServer] = OrderedDict()
        self._max_affinities = max_affinities
        self._stamps = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def add(self, name: str) -> None:
        """Adds a healthy server. Does nothing if the router has the server already."""
        if name not in self._places:
            place = self._places[name] = _RoutedServer(name)
            self._touch(place)

    def remove(self, name: str) -> None:
        """Removes a server; unknown names are ignored. Its affinities move with their next request."""
        place = self._places.pop(name, None)
        if place is not None:
            place.live = False

    def choose(self, work: int, affinity: str | None = None, avoid: Collection[str] = ()) -> Lease | None:
        """Reserves a server for a request of ``work`` estimated tokens (`work_of`); None if only servers in ``avoid`` are
        left.

        ``avoid``: servers that have already failed this request.
        """
        place = self.affinities.get(affinity) if affinity is not None else None
        if place is None or not place.live or place.name in avoid:
            place = self._least(avoid)
            if place is None:
                return None
        if affinity is not None:
            self._remember(affinity, place)
        place.work += work
        self._touch(place)
        return Lease(place, work)

    def end(self, lease: Lease) -> None:
        """Takes a finished request's work off its server. Call it once for each lease."""
        place = lease.place
        place.work -= lease.work
        if place.live:
            self._touch(place)

    def set_pace(self, name: str, pace: float) -> None:
        """Sets a server's time per token relative to the other servers; 1 is usual."""
        place = self._places.get(name)
        if place is not None and place.pace != pace:
            place.pace = pace
            self._touch(place)

    def work(self) -> Mapping[str, int]:
        return {name: place.work for name, place in self._places.items()}

    def _remember(self, affinity: str, place: _RoutedServer) -> None:
        self.affinities[affinity] = place
        self.affinities.move_to_end(affinity)
        if len(self.affinities) > self._max_affinities:
            self.affinities.popitem(last=False)

    def _least(self, avoid: Collection[str]) -> _RoutedServer | None:
        places = (place for place in self._places.values() if place.name not in avoid)
        return min(places, key=lambda place: (place.work * place.pace, place.stamp), default=None)

    def _touch(self, place: _RoutedServer) -> None:
        """Puts the server behind all others with equal work."""
        self._stamps += 1
        place.stamp = self._stamps


class ServerState(enum.StrEnum):
    """The states of a server, see the diagram above."""

    STARTING = "starting"
    STALE = "stale"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    FENCED = "fenced"
    RETIRED = "retired"


SERVING = (ServerState.HEALTHY, ServerState.SUSPECT)
"""States in which a server may have requests."""


@dataclass(frozen=True)
class Rules:
    """Limits by which the fleet judges a server."""

    probe_every_s: float = 2.0
    """Seconds without progress after which a server is sent a request for one token, as a test."""

    suspect_after_s: float = SUSPECT_AFTER_S
    """Seconds without a token after which a healthy server becomes suspect."""

    stall_timeout_s: float = 60.0
    """Seconds without a token after which a server is fenced."""

    request_timeout_s: float = 600.0
    """Seconds after which an unanswered request moves to another server."""

    max_server_retries: int = 3
    """Number of times that a request moves to another server before it counts as failed."""

    empty_timeout_s: float = 600.0
    """Seconds without a healthy server after which waiting requests end the run."""

    max_failures: int = 3
    """Number of failures, without a token between them, that fence a server; the first makes it suspect."""

    one_failure_s: float = 0.2
    """Failures within this many seconds have one cause and count as one."""

    recover_tokens: int = 2
    """Number of signs of life, without a failure between them, that make a suspect server healthy again."""


@dataclass(frozen=True)
class Health:
    """The fleet's knowledge about a server. Each method returns the knowledge after an event; nothing changes in place."""

    progress: float
    """Time of the server's last sign of life: a token."""

    state: ServerState = ServerState.STARTING

    incarnation: int = 0
    """Incremented whenever the server is fenced: an answer to a request of an earlier incarnation is late."""

    weights: int | None = None
    """Number of the version that the server is known to hold; None: unknown."""

    cache: int | None = None
    """Number of the oldest version whose weights may have computed entries of the cache; None: unknown."""

    failures: int = 0
    """Number of failures since the last token; those within `Rules.one_failure_s` count as one."""

    failed_at: float | None = None
    tokens: int = 0
    """Number of signs of life since the server became suspect."""

    why: str = ""

    @classmethod
    def new(cls, now: float, why: str = "added") -> "Health":
        """Returns the state of a server that has not answered yet."""
        return cls(progress=now, why=why)

    # ------------------------------------------------------------------ coming

    def starts(self, why: str = "started again") -> "Health":
        return self._to(ServerState.STARTING, why) if self.state == ServerState.FENCED else self

    def answers(self, why: str = "it answers") -> "Health":
        """Returns the health after the server answers for the first time, or again. Its weights are not known yet."""
        if self.state not in (ServerState.STARTING, ServerState.FENCED):
            return self
        return replace(self._to(ServerState.STALE, why), weights=None, cache=None)

    def delivered(self, version: int) -> "Health":
        """Returns the health after the server reports that it holds these weights. Its cache may still be older, see
        `emptied`."""
        if self.state in (ServerState.STARTING, ServerState.FENCED, ServerState.RETIRED):
            return self
        # Under other weights the cache is not valid until it is emptied.
        return replace(self, weights=version, cache=self.cache if self.weights == version else None)

    def emptied(self, version: int) -> "Health":
        """Returns the health after the cache was emptied, or recomputed, while the server held these weights."""
        return replace(self, cache=version) if self.weights == version else self

    def admitted(self, now: float, target: int) -> "Health":
        """Returns the health after a stale server made a token: it becomes healthy if its weights and its cache are at the
        fleet's version ``target``."""
        return self._if_current(now, target, "current weights, empty cache") if self.state == ServerState.STALE else self

    # ------------------------------------------------------------------ serving

    def token(self, now: float, target: int, rules: Rules) -> "Health":
        """Returns the health after the server made a token, or other progress."""
        if self.state not in SERVING:
            return self
        after = replace(self, progress=now, failures=0)
        if self.state == ServerState.HEALTHY:
            return after
        after = replace(after, tokens=self.tokens + 1)
        return after._if_current(now, target, "it makes tokens again") if after.tokens >= rules.recover_tokens else after

    def fails(self, now: float, why: str, rules: Rules, *, fatal: bool = False) -> "Health":
        """Returns the health after a request or a call failed by the server's fault. ``fatal``: the server is gone, so it is
        fenced at once."""
        if self.state in (ServerState.FENCED, ServerState.RETIRED):
            return self
        # One broken connection fails many requests at once; they must not count as many failures.
        again = self.failed_at is None or now - self.failed_at >= rules.one_failure_s
        after = replace(self, failures=self.failures + again, failed_at=now if again else self.failed_at, tokens=0)
        if fatal or self.state in (ServerState.STARTING, ServerState.STALE) or after.failures >= rules.max_failures:
            return after._fenced(why)
        return after._to(ServerState.SUSPECT, why) if self.state == ServerState.HEALTHY else after

    def ticks(self, now: float, rules: Rules, *, switching: bool = False) -> "Health":
        """Returns the health at the time ``now``. ``switching``: the server is switching weights, so it is not fenced for
        making no token."""
        silent_s = now - self.progress
        if self.state not in SERVING or silent_s <= rules.suspect_after_s:
            return self
        why = f"no token for {silent_s:.1f} s"
        # a commit may recompute keys and values, and makes no token meanwhile
        if silent_s > rules.stall_timeout_s and not switching:
            return self._fenced(why)
        return replace(self._to(ServerState.SUSPECT, why), tokens=0) if self.state == ServerState.HEALTHY else self

    def slept(self, seconds: float) -> "Health":
        """Returns the health without ``seconds`` of the server's silence: meanwhile no tokens were requested, or the fleet's
        process stood still."""
        return replace(self, progress=self.progress + max(0.0, seconds))

    def outdated(self, target: int) -> "Health":
        """Returns the health after the fleet's version became ``target``. A server that missed the update gets no requests
        until it holds these weights."""
        # fenced servers learn the version when they come back
        if self.state not in SERVING or self.weights == target:
            return self
        return self._to(ServerState.STALE, f"it missed version {target}")

    # ------------------------------------------------------------------ going

    def retires(self, why: str) -> "Health":
        if self.state == ServerState.RETIRED:
            return self
        after = self._to(ServerState.RETIRED, why)
        return replace(after, incarnation=self.incarnation + 1, weights=None, cache=None)

    def _fenced(self, why: str) -> "Health":
        after = self._to(ServerState.FENCED, why)
        # All knowledge is dropped, since another process may answer next. The new incarnation makes old answers late.
        return replace(after, incarnation=self.incarnation + 1, weights=None, cache=None, tokens=0)

    def _if_current(self, now: float, target: int, why: str) -> "Health":
        if self.weights != target:
            return self._to(ServerState.STALE, f"it holds version {self.weights}, the fleet {target}")
        if self.cache != target:
            return self._to(ServerState.STALE, "its cache may hold keys of other weights")
        return replace(self._to(ServerState.HEALTHY, why), progress=now, failures=0, tokens=0)

    def _to(self, state: ServerState, why: str) -> "Health":
        return self if state == self.state else replace(self, state=state, why=why)


PACE_MEMORY = 0.9
"""Weight of the past in the running mean of seconds per token."""


@dataclass(frozen=True)
class ServerOrigin:
    """Describes how the fleet gets a server."""

    name: str
    """Unique in the fleet: ``embedded-0``, or ``KIND=URL`` for an attached server."""

    make: Callable[[], InferenceEngine]
    """Starts the server or connects to it, and returns once that is done; may raise anything."""

    owned: bool
    """True if this run starts the server: it is ended when fenced, and restarted within the budget. Attached servers are
    left as they are."""

    holds: int | None = None
    """Version of a freshly started server (its cache is empty), or None if unknown."""


def is_kept(engine: InferenceEngine) -> bool:
    """True if the engine's server outlives this process, so that another process can take it over."""
    return bool(getattr(getattr(engine, "process", None), "kept", False))


def taken_over(engine: InferenceEngine) -> bool:
    """True if the engine's server was started by an earlier process, and taken over from it."""
    return bool(getattr(getattr(engine, "process", None), "taken_over", False))


class ServerFenced(InfrastructureFailure):
    """The server of a request was given up; the request moves to another server."""

    def __init__(self, message: str):
        super().__init__("fenced", message)


class Attempt:
    """One request at one server. Created and awaited on the caller's event loop; any thread may give it up."""

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
        """Returns the server's answer, or raises the server's exception. A cancelled caller cancels the request at the
        server.

        Raises:
            ServerFenced: see `give_up`. The request goes on at the server, and its answer will be late.
        """
        self.task = self.loop.create_task(self.engine.agenerate(request))
        self.task.add_done_callback(self._settle)
        try:
            return await self.future
        finally:
            if not self.fenced:
                self.task.cancel()  # has no effect if it is done

    def give_up(self, why: str) -> None:
        """Stops waiting for the server: `run` raises `ServerFenced`. May be called from any thread."""
        self.fenced = True
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self._fail, ServerFenced(f"{self.member.name} was given up: {why}"))

    def abandon(self) -> None:
        """Cancels the request at the server. May be called from any thread."""
        if self.task is not None:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self.task.cancel)

    def time_out(self, seconds: float) -> None:
        """Fails the request, because the server did not answer in time. Call it on the caller's loop."""
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
        """Returns the failure to report. An error of an unknown kind comes from an unexpected answer, so it counts as the
        server's fault, and the request moves."""
        if isinstance(error, EpisodeFailure) or not isinstance(error, Exception):
            return error
        failure = InfrastructureFailure("server", f"{self.member.name}: {kind_and_text(error)}")
        failure.__cause__ = error
        return failure


@dataclass(eq=False)
class Member:
    """The fleet's record of a server; guarded by the roster's lock."""

    server: ServerOrigin
    health: Health
    engine: InferenceEngine | None = None
    attempts: set[Attempt] = field(default_factory=set)
    orphans: set[Attempt] = field(default_factory=set)
    """Requests that were moved when the server was fenced, and that it may still answer."""

    leaves_at: float | None = None
    """Time at which the requests of a leaving server are moved to other servers. It gets no new ones. None: the server is
    not leaving."""

    switching: bool = False
    restarts: list[float] = field(default_factory=list)
    """Times of the server's restarts."""

    retry_at: float = 0.0
    """Time before which the watcher does not try to bring the server back."""

    setbacks: int = 0
    """Number of times in a row that the server did not become healthy, or failed soon after."""

    healthy_at: float | None = None
    """Time at which the server became healthy; None if it has failed since."""

    job: asyncio.Task[None] | None = None
    """The watcher's task that brings the server into service."""

    probe: asyncio.Task[None] | None = None
    """The watcher's task that waits for a token from the server."""

    counting: bool = False
    steps: float = 0.0
    """Sum of the server's work counters when they were last read."""

    token_s: float | None = None
    """Running mean of the seconds that a request waits for a token."""

    seen: dict[str, float] = field(default_factory=dict)
    """The engine's statistics when they were last read."""

    @property
    def name(self) -> str:
        return self.server.name

    def took(self, tokens: int, seconds: float) -> None:
        """Records how long a request of ``tokens`` tokens took."""
        if tokens >= 8:
            pace = seconds / tokens
            self.token_s = pace if self.token_s is None else PACE_MEMORY * self.token_s + (1 - PACE_MEMORY) * pace


def first_line(error: Exception) -> str:
    """Returns an error in one line; with its kind, unless the error is Tandem's own."""
    ours = isinstance(error, EngineDied | InfrastructureFailure | WeightUpdateFailed | ConfigError)
    return ((str(error) if ours else "") or kind_and_text(error)).partition("\n")[0]
