"""Taking a batch of finished groups out of the pool: when there are enough, which ones, and when waiting is in vain."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.api.activity import waiting
from tandem.api.collective import from_main
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, WaitTimeout
from tandem.api.samples import Group
from tandem.config.rollout import RolloutConfig
from tandem.rollout.collate import expired
from tandem.rollout.episodes import Episode, finished
from tandem.rollout.pool import EpisodePool, NoBatch


class GroupScorer(Protocol):
    """Gives finished groups the rewards that need a model."""

    def __call__(self, groups: Sequence[Group]) -> list[Group | DataFailure]:
        """Groups → the same with more rewards, or why one cannot be trained on. Collective; rank 0 alone brings any."""
        ...

    def generate_again(self) -> None:
        """More groups are generated: the engine must be there. Collective."""
        ...


@dataclass
class Wish:
    """One batch that is asked for."""

    begin: Callable[[], int]
    """Queues the rows that the caller brought, if any, and returns how many groups are wanted."""

    patience_s: float
    partial: bool
    """Fewer groups will do when no more can come."""

    count: int | None = None
    waited_s: float = 0.0
    episodes: list[Episode] = field(default_factory=list)
    """The episodes that were taken for it."""


class Collector:
    """The oldest groups first, as `on_expiry`, `oversample` and ``deterministic`` say; see `Rollout` for what they mean.

    Waits as long as a wish is patient. ``taken``: the episodes of steps that have not ended.
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        config: RolloutConfig,
        pool: EpisodePool,
        max_head_offpolicyness: int,
        deterministic: bool,
    ):
        """``engine``: on rank 0, which collects."""
        self._engine, self._config, self._pool = engine, config, pool
        self._eta, self._deterministic = max_head_offpolicyness, deterministic
        self.taken: list[Episode] = []
        self.metrics: dict[str, float] = {}
        """Of the pool, when the last batch was taken."""

    def collect(self, wish: Wish) -> list[Episode]:
        """Waits for as many groups as are wished for, and takes them if all are judged. If a model still has to judge one of
        them, it takes none and returns them as candidates.

        Raises:
            WaitTimeout: after the patience of the wish; says what it waited for.
            NoBatch: so many will never come.
            Exception: what broke the pool, such as `EngineDied`.
        """
        count = wish.count = wish.begin() if wish.count is None else wish.count
        began = time.monotonic()
        with self._pool.changed:
            self._pool.wanted = count
        try:
            with waiting(f"{count} groups"):
                return self._wait(count, wish.partial, began - wish.waited_s, began + wish.patience_s - wish.waited_s)
        finally:
            wish.waited_s += time.monotonic() - began
            with self._pool.changed:
                self._pool.wanted = 0

    def collect_scored(self, wish: Wish, scorer: GroupScorer) -> None:
        """Collects candidates, has all ranks score them, filters them, and again until enough stand: `Wish.episodes`.

        Collective. Raises as `collect`.
        """

        candidates: list[Episode] = []
        outcomes: list[Group | DataFailure] = []

        def lacks_groups() -> bool:
            self._judge(candidates, outcomes)  # here, so that all ranks hear of what it raises
            with self._pool.changed:
                return wish.count is not None and len(self._pool.waiting) < wish.count

        def next_candidates() -> int:
            wish.episodes = self.collect(wish)
            candidates[:] = [episode for episode in wish.episodes if not episode.judged]
            return len(candidates)

        while from_main(next_candidates):
            outcomes = scorer([episode.group for episode in candidates if episode.group is not None])
            if from_main(lacks_groups):
                scorer.generate_again()

    def _judge(self, candidates: Sequence[Episode], outcomes: Sequence[Group | DataFailure]) -> None:
        """The scores of these groups are there: workflows that read them finish the groups, and the filter sees them."""
        for episode, outcome in zip(candidates, outcomes, strict=True):
            if isinstance(outcome, Group) and episode.workflow.reads_scores:
                outcome = self._pool.loop.run(finished(episode.workflow, outcome))
            with self._pool.changed:
                self._pool.judge(episode, outcome)

    def _wait(self, count: int, partial: bool, began: float, deadline: float) -> list[Episode]:
        while True:
            if self._deterministic:
                self._wave(deadline)
            with self._pool.changed:
                episodes = self._try(count, partial)
                if episodes is not None:
                    return episodes
                if time.monotonic() >= deadline:
                    raise WaitTimeout(f"waited {time.monotonic() - began:.1f} s for {count} groups; {self._pool.describe()}")
                if self._pool.running:  # else the next wave begins
                    self._pool.changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))

    def _try(self, count: int, partial: bool) -> list[Episode] | None:
        """One look: the episodes of the batch, taken; None to wait on. Raises where waiting is in vain."""
        if self._pool.broken is not None:
            raise self._pool.broken
        if not self._deterministic:
            self._pool.pump()
        chosen = self._choose(count)
        if chosen is None and not self._pool.running:
            if self._deterministic and self._pool.gate.capacity() and (self._pool.submitted or self._pool.source):
                return None  # the next wave
            if not self._deterministic:
                self._pool.pump()  # what expired has made room
            if not self._pool.running:
                chosen = self._give_up(count, partial)
        if chosen is not None and all(episode.judged for episode in chosen):
            self._take(chosen)
        return chosen

    def _choose(self, count: int) -> list[Episode] | None:
        assert self._engine is not None, "rank 0 needs an engine"
        oldest = self._engine.version.number - self._eta
        if self._config.on_expiry == "drop":
            for episode in [e for e in self._pool.waiting.values() if _has_expired(e, oldest)]:
                self._pool.discard(episode, "expired")
        if self._config.on_expiry == "wait" and self._eta and any(e.version <= oldest for e in self._pool.running.values()):
            return None
        if len(self._pool.waiting) < count:
            return None
        if self._config.oversample > 1:
            return sorted(list(self._pool.waiting.values())[:count], key=lambda episode: episode.number)
        return [self._pool.waiting[number] for number in sorted(self._pool.waiting)[:count]]

    def _give_up(self, count: int, partial: bool) -> list[Episode]:
        if partial and self._pool.waiting and not self._pool.submitted:
            return [self._pool.waiting[number] for number in sorted(self._pool.waiting)[:count]]
        if self.taken and not self._pool.gate.capacity():
            raise NoBatch(
                f"call end_step() after each batch: the last one is still being trained on; {self._pool.describe()}"
            )
        if not self._pool.gate.capacity():
            raise NoBatch(f"{count} groups are more than the staleness gate ever admits; {self._pool.describe()}")
        raise NoBatch(f"the data ended with {len(self._pool.waiting)} of {count} groups; {self._pool.describe()}")

    def _take(self, chosen: Sequence[Episode]) -> None:
        self.metrics = {
            "episodes/running": float(len(self._pool.running)),
            "episodes/waiting": float(len(self._pool.waiting) - len(chosen)),
        }
        for episode in chosen:
            del self._pool.waiting[episode.number]
            assert episode.group is not None, "it waits, so it has finished"
            self._pool.settle(episode.group)
            self._pool.gate.consume()
            self._pool.ledger.move(episode.prompt, "taken")
        self.taken += chosen
        self._pool.filtered.clear()
        if self._config.oversample > 1:
            self._abort_rest()

    def _abort_rest(self) -> None:
        for episode in list(self._pool.running.values()):
            self._pool.abort(episode, "oversampled")
        for episode in list(self._pool.waiting.values()):
            self._pool.discard(episode, "oversampled")

    def _wave(self, deadline: float) -> None:
        """Deterministic: all that the gate admits is queued while the engine stands still, and then begins at once."""
        with self._pool.changed:
            episodes = [] if self._pool.running else self._pool.admit()
        if not episodes:
            return
        assert self._engine is not None, "rank 0 needs an engine"
        self._engine.pause()
        try:
            self._pool.loop.call(self._pool.spawn, episodes)
            with self._pool.changed:
                ready = self._pool.changed.wait_for(
                    lambda: self._pool.broken or all(_settled(e, self._pool.running) for e in episodes),
                    deadline - time.monotonic(),
                )
                if not ready:
                    raise WaitTimeout(
                        f"waited for {len(episodes)} episodes to issue their requests; {self._pool.describe()}"
                    )
        finally:
            self._engine.resume()


def _settled(episode: Episode, running: Mapping[int, Episode]) -> bool:
    return episode.number not in running or (episode.engine is not None and episode.engine.settled)


def _has_expired(episode: Episode, oldest: int) -> bool:
    group = episode.group
    return group is not None and any(bool(expired(t, oldest).any()) for s in group.samples for t in s.trajectories)
