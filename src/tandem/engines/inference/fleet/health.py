"""The health of one server: a pure state machine; time is an argument.

::

    starting ──► stale ──► healthy ◄──► suspect
       ▲           ▲          │            │
       │           │          ▼            ▼
       └───────────┴─────── fenced ◄───────┘        retired ends each of them

- *starting*: it has not answered yet.
- *stale*: it answers, but may hold other weights than the fleet's, or a cache of other weights. It serves nobody.
- *healthy*: it holds the fleet's weights, its cache holds nothing older, and it made a token not long ago. Requests go
  here only.
- *suspect*: it has made no token for a while, or failed a request. It gets no new ones; those that it has may still end.
- *fenced*: given up. Its requests went elsewhere, and what it still answers is thrown away (`incarnation`).
- *retired*: gone for good.

The one door to healthy is `Health._if_current`: weights and cache must both be at the fleet's version. Being fenced forgets
both, so a server that comes back passes through a delivery of weights and an empty cache, whatever it says of itself.
"""

import enum
from dataclasses import dataclass, replace


class ServerState(enum.StrEnum):
    """The states of a server, as in the drawing above."""

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
    """The patience of the fleet."""

    suspect_after_s: float = 4.0
    """Without a token for this long a healthy server becomes suspect."""

    stall_timeout_s: float = 60.0
    """Without a token for this long it is fenced."""

    max_failures: int = 3
    """So many failures without a token between them fence a server; the first makes it suspect."""

    one_failure_s: float = 0.2
    """Failures closer together than this have one cause and count as one."""

    recover_tokens: int = 2
    """So many signs of life, without a failure between them, make a suspect healthy again."""


@dataclass(frozen=True)
class Health:
    """The knowledge about a server. Each method returns the knowledge after an event; nothing is changed in place."""

    progress: float
    """When it last gave a sign of life: a token."""

    state: ServerState = ServerState.STARTING

    incarnation: int = 0
    """Grows whenever the server is fenced: an answer to a request of an earlier incarnation is late."""

    weights: int | None = None
    """Number of the version that it is known to hold."""

    cache: int | None = None
    """Number of the version for which its cache is known to hold nothing older."""

    failures: int = 0
    """Since its last token; those of one moment count as one."""

    failed_at: float | None = None
    tokens: int = 0
    """Signs of life since it became suspect."""

    why: str = ""

    @classmethod
    def new(cls, now: float, why: str = "added") -> "Health":
        """A server that has not answered yet."""
        return cls(progress=now, why=why)

    # ------------------------------------------------------------------ coming

    def starts(self, why: str = "started again") -> "Health":
        return self._to(ServerState.STARTING, why) if self.state == ServerState.FENCED else self

    def answers(self, why: str = "it answers") -> "Health":
        """It answers for the first time, or again; nothing is known yet of its weights."""
        if self.state not in (ServerState.STARTING, ServerState.FENCED):
            return self
        return replace(self._to(ServerState.STALE, why), weights=None, cache=None)

    def delivered(self, version: int) -> "Health":
        """It says that it holds these weights. What its cache holds is another question: see `emptied`."""
        if self.state in (ServerState.STARTING, ServerState.FENCED, ServerState.RETIRED):
            return self
        # Other weights make the cache doubtful until somebody has emptied it.
        return replace(self, weights=version, cache=self.cache if self.weights == version else None)

    def emptied(self, version: int) -> "Health":
        """While it held these weights, its cache was emptied, or computed anew."""
        return replace(self, cache=version) if self.weights == version else self

    def admitted(self, now: float, target: int) -> "Health":
        """A stale server made a token; ``target`` is the fleet's version. It stays stale where it holds something else."""
        return self._if_current(now, target, "current weights, empty cache") if self.state == ServerState.STALE else self

    # ------------------------------------------------------------------ serving

    def token(self, now: float, target: int, rules: Rules) -> "Health":
        """It made a token, or some other step forward."""
        if self.state not in SERVING:
            return self
        after = replace(self, progress=now, failures=0)
        if self.state == ServerState.HEALTHY:
            return after
        after = replace(after, tokens=self.tokens + 1)
        return after._if_current(now, target, "it makes tokens again") if after.tokens >= rules.recover_tokens else after

    def fails(self, now: float, why: str, rules: Rules, *, fatal: bool = False) -> "Health":
        """A request or a call failed by the server's fault. ``fatal``: it is gone, there is nothing to wait for."""
        if self.state in (ServerState.FENCED, ServerState.RETIRED):
            return self
        # One broken connection fails many requests at once; they must not count as many failures.
        again = self.failed_at is None or now - self.failed_at >= rules.one_failure_s
        after = replace(self, failures=self.failures + again, failed_at=now if again else self.failed_at, tokens=0)
        if fatal or self.state in (ServerState.STARTING, ServerState.STALE) or after.failures >= rules.max_failures:
            return after._fenced(why)
        return after._to(ServerState.SUSPECT, why) if self.state == ServerState.HEALTHY else after

    def ticks(self, now: float, rules: Rules, *, switching: bool = False) -> "Health":
        """Time passed. ``switching``: it is switching weights, so it may make no token for long without being fenced."""
        silent_s = now - self.progress
        if self.state not in SERVING or silent_s <= rules.suspect_after_s:
            return self
        why = f"no token for {silent_s:.1f} s"
        # a commit may recompute keys and values, and makes no token meanwhile
        if silent_s > rules.stall_timeout_s and not switching:
            return self._fenced(why)
        return replace(self._to(ServerState.SUSPECT, why), tokens=0) if self.state == ServerState.HEALTHY else self

    def slept(self, seconds: float) -> "Health":
        """Leaves ``seconds`` out of its silence: nobody asked it for tokens, or the fleet itself stood still."""
        return replace(self, progress=self.progress + max(0.0, seconds))

    def outdated(self, target: int) -> "Health":
        """The fleet's version is ``target`` from now on; a server that did not take part serves nobody until it holds it."""
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
        # All knowledge is dropped: whatever answers next may be another process. The new incarnation makes its old answers
        # late.
        return replace(after, incarnation=self.incarnation + 1, weights=None, cache=None, tokens=0)

    def _if_current(self, now: float, target: int, why: str) -> "Health":
        if self.weights != target:
            return self._to(ServerState.STALE, f"it holds version {self.weights}, the fleet {target}")
        if self.cache != target:
            return self._to(ServerState.STALE, "its cache may hold keys of other weights")
        return replace(self._to(ServerState.HEALTHY, why), progress=now, failures=0, tokens=0)

    def _to(self, state: ServerState, why: str) -> "Health":
        return self if state == self.state else replace(self, state=state, why=why)
