"""Runs episodes on an event loop as the book admits them, and waits for their groups."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from tandem.api.activity import GENERATING, did, waiting
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, EpisodeFailure, WaitTimeout
from tandem.api.team import Team
from tandem.api.workflow import Group, RolloutWorkflow
from tandem.config.rollout import RolloutConfig
from tandem.rollout.book import EpisodeBook, GroupFilter, GroupObserver
from tandem.rollout.episodes import Episode, EpisodeRunner, finish_groups
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.remote_episodes import OtherRanks, RolloutWorkers


@dataclass
class Wish:
    """A request for one batch."""

    count: int
    partial: bool
    """True: a smaller batch is accepted if no further group can finish."""

    patience_s: float
    workflow: RolloutWorkflow | None = None
    """The workflow of the batch's rows, which every rank has."""

    episodes: list[Episode] = field(default_factory=list)
    """The episodes chosen for the batch. They are taken once all of them are judged."""

    metrics: dict[str, float] = field(default_factory=lambda: {"time/wait_s": 0.0})

    @property
    def candidates(self) -> list[Episode]:
        """The chosen episodes that still need rewards of a model."""
        return [episode for episode in self.episodes if not episode.judged]


class EpisodePool:
    """Runs the episodes of a book, on this rank or on all generating ranks, and waits for their groups. Exists on rank 0.

    Public methods are for the caller's thread; another one has the event loop that runs the episodes.
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        config: RolloutConfig,
        max_head_offpolicyness: int,
        *,
        seed: int,
        deterministic: bool,
        group_filter: GroupFilter | None,
        max_draws: int,
        observer: GroupObserver | None,
        judges_later: Callable[[], bool],
        generators: Team | None = None,
        workers: RolloutWorkers | None = None,
    ):
        """``deterministic``: only the caller's thread starts episodes. ``judges_later``: true while groups wait for rewards
        of a model. Others: see `Rollout`."""
        self._engine, self._config, self._deterministic = engine, config, deterministic
        self.loop = BackgroundLoop(on_blocked=self.fail)
        self.runner = EpisodeRunner(engine, config, self.loop, seed=seed, deterministic=deterministic)
        self._others = workers or OtherRanks(generators, self.loop, self.fail)
        if workers is not None and engine is not None:
            workers.attach(self.loop, engine, self.fail, deterministic)

        # The lock of `_changed` guards the book. Its holder may schedule calls on the loop, but must not wait for it: the
        # loop may itself be waiting for the lock. Waiters are woken when there may be something for them.
        self._changed = threading.Condition()
        self._book = EpisodeBook(
            config,
            max_head_offpolicyness,
            group_filter=group_filter,
            max_draws=max_draws,
            observer=observer,
            judges_later=judges_later,
            version=self.version,
            stop=self._stop,
        )
        self.gate, self.ledger = self._book.gate, self._book.ledger

    @contextmanager
    def locked(self) -> Iterator[EpisodeBook]:
        """Context manager that yields the book. Inside, no episode starts, ends or takes a row, so keep the block short."""
        with self._changed:
            yield self._book

    def version(self) -> int:
        """Returns the version number of the engine's weights."""
        assert self._engine is not None, "ranks other than 0 have no engine; rank 0 makes the batches"
        return self._engine.version.number

    def start_admitted(self) -> None:
        """Starts the episodes that the gate admits, with the lock held. In a deterministic run `_wave` does this."""
        episodes = [] if self._deterministic else self._book.admit()
        if episodes:
            self.loop.call(self._spawn, episodes)

    def judge(self, wish: Wish, outcomes: Sequence[Group | DataFailure]) -> bool:
        """Judges the candidates by the scorer's outcomes. Returns True if too few groups are left for the batch."""
        scored = list(zip(wish.candidates, outcomes, strict=True))
        # without the lock, which the loop needs
        judged = self.loop.run(finish_groups(scored, self._config.episode_timeout_s))
        with self._changed:
            for (episode, _), outcome in zip(scored, judged, strict=True):
                self._book.judge(episode, outcome)
            return len(self._book.waiting) < wish.count

    def collect(self, wish: Wish) -> int:
        """Waits until there are enough groups. If all of them are judged, takes them into the batch. Otherwise takes none,
        and returns the number of groups that are not judged. Other ranks help if every rank collects with the same workflow.
        Raises `WaitTimeout`, `NoBatch`, or the cause that broke the pool, such as `EngineDied`.
        """
        began = time.monotonic() - wish.metrics["time/wait_s"]
        deadline = began + wish.patience_s
        try:
            with waiting(f"{wish.count} groups"), self._others.working(wish.workflow):
                with self._changed:
                    self._book.wanted = wish.count
                while True:
                    if self._deterministic:
                        self._wave(deadline)
                    with self._changed:
                        if self._try(wish):
                            break
                        if (waited_s := time.monotonic() - began) >= wish.patience_s:
                            raise WaitTimeout(f"waited {waited_s:.1f} s for {wish.count} groups; {self._book.describe()}")
                        if self._book.running:  # otherwise the next wave begins
                            self._changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))
        finally:
            wish.metrics["time/wait_s"] = time.monotonic() - began
            with self._changed:
                self._book.wanted = 0
        return len(wish.candidates)

    def close(self) -> None:
        """Aborts running episodes, whose prompts become pending again. Idempotent."""
        with self._changed:
            self._book.broken = self._book.broken or RuntimeError("the rollout is closed")
            self._book.abort_running()
            self._changed.notify_all()
        self._others.detach()
        self.loop.close()

    def _wave(self, deadline: float) -> None:
        """In deterministic runs: starts all episodes that the gate admits at the same time, while the engine is paused."""
        with self._changed:
            episodes = [] if self._book.running else self._book.admit()
        remote = [episode for episode in episodes if self._others.runs(episode.workflow)]
        if remote:
            self.loop.call(self._spawn, remote)
        if local := [episode for episode in episodes if episode not in remote]:
            self.runner.begin(local, self._spawn, deadline - time.monotonic())

    # ------------------------------------------------------------------ with the lock

    def _try(self, wish: Wish) -> bool:
        """Takes the groups of the batch if there are enough and all are judged, without waiting; raises if none can come."""
        book = self._book
        if book.broken is not None:
            raise book.broken
        self.start_admitted()
        chosen = book.choose(wish.count)
        if chosen is None and not book.running:
            if self._deterministic and book.may_start:
                return False  # the next wave
            self.start_admitted()  # expired groups have freed places
            if not book.running:
                chosen = book.give_up(wish.count, partial=wish.partial)
        if chosen is None:
            return False
        wish.episodes = chosen
        if not wish.candidates:
            wish.metrics |= book.take(chosen)
        return True

    def _stop(self, episode: Episode) -> None:
        """Cancels an episode that the book has removed."""
        self._others.cancel(episode)
        if episode.task is not None:
            self.loop.call(episode.task.cancel)

    # ------------------------------------------------------------------ on the loop's thread, without the lock

    def _spawn(self, episodes: Sequence[Episode]) -> None:
        """Runs admitted episodes, here or on other ranks."""
        loop, episodes = asyncio.get_running_loop(), [episode for episode in episodes if not episode.aborted]
        try:
            self._others.give(episodes)
        except Exception as error:  # the worker boundary: a row that cannot be sent must reach the waiting caller
            self.fail(error)
            return
        for episode in episodes:
            episode.task = loop.create_task(self._run(episode))
            episode.task.add_done_callback(partial(self._others.ended, episode))

    async def _run(self, episode: Episode) -> None:
        try:
            maker = self._others if episode.place else self.runner
            self._end(episode, await maker.group_of(episode))
        except EpisodeFailure as failure:
            self._end(episode, failure)
        except Exception as error:  # the worker boundary: a bug here must reach the waiting caller
            self.fail(error)

    def _end(self, episode: Episode, outcome: Group | EpisodeFailure) -> None:
        did(*GENERATING)
        try:
            with self._changed:
                book = self._book
                if episode.number not in book.running:  # it was aborted while this thread waited for the lock
                    return
                book.ended(episode, outcome)
                self.start_admitted()
                # Waking the caller is expensive compared with an episode, so it is woken only if it may be able to continue.
                full = book.wanted and len(book.waiting) >= book.wanted
                if full or not book.running or book.broken or self._deterministic or self._config.on_expiry != "mask":
                    self._changed.notify_all()
        except Exception as error:  # the worker boundary: an error of a filter or a loader must reach the waiting caller
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Breaks the pool: every waiting caller gets this error. May be called from any thread."""
        with self._changed:
            self._book.broken = self._book.broken or error
            self._changed.notify_all()
