"""The executor: hands out batches, the oldest first, of episodes that are kept under way as the staleness gate admits.

Consumes rows; produces packed batches. Episodes run on one event loop in a background thread, so generation goes on
while the caller trains. A batch waits for its episodes, at most `rollout.wait_timeout_s`; `end_step` unblocks the gate.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensordict import TensorDict

from tandem.api.activity import GENERATING, did, waiting
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, EpisodeFailure, WaitTimeout
from tandem.api.samples import Dropped, Group
from tandem.api.scoring import GroupScorer
from tandem.api.team import Team
from tandem.api.workflow import RolloutWorkflow
from tandem.config.errors import ConfigError
from tandem.config.rollout import RolloutConfig
from tandem.rollout.book import EpisodeBook, GroupFilter, GroupObserver, Row
from tandem.rollout.collate import collate
from tandem.rollout.episodes import Episode, EpisodeRunner, finish_groups
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.ranks import Helper, OtherRanks
from tandem.rollout.replay import Replay
from tandem.rollout.statistics import batch_metrics

MAX_DRAWS = 10
"""Times the batch size that are drawn for one batch before a filter that keeps too few ends the run."""


@dataclass
class Wish:
    """One batch that is asked for."""

    count: int
    partial: bool
    """Fewer groups will do when no more can come."""

    patience_s: float
    workflow: RolloutWorkflow | None = None
    """The workflow of its rows, which every rank has."""

    episodes: list[Episode] = field(default_factory=list)
    """Those whose groups would make the batch; they are taken once each of them is judged."""

    outcomes: list[Group | DataFailure] = field(default_factory=list)
    """The scorer's result for each candidate."""

    metrics: dict[str, float] = field(default_factory=lambda: {"time/wait_s": 0.0})
    """Seconds that were waited, and the number of other episodes when these were taken."""

    @property
    def candidates(self) -> list[Episode]:
        """The episodes that still need the rewards of a model."""
        return [episode for episode in self.episodes if not episode.judged]


class Rollout:
    """``rollout_batch`` for given rows, ``prepare_batch`` for a loader, ``submit`` and ``wait`` for anything else.

    After each batch has been trained on and the new weights are published, call ``end_step``. ``max_head_offpolicyness``
    overrides the configuration's (null there means 0). What is older than that at consumption follows `on_expiry`:

    - ``mask``: those tokens are ``expired`` in the batch;
    - ``drop``: the group is dropped with reason ``expired`` and another takes its place;
    - ``wait``: a batch is handed out only when it holds every episode that would exceed η at the next one: those started
      at version ≤ now − η. By the gate's inequality they are at most B, and the oldest, so nothing ever expires.

    With `replay.groups`, groups of earlier batches join each batch; gate and ledger count their first use alone.

    All methods but `fail` are for one thread, the caller's; episodes run on the thread of the loop. Under
    ``torch.distributed`` the batch methods are collective, and ranks other than 0 bring ``engine=None``. ``max_draws``
    bounds what ``group_filter`` may turn down for one batch; ``observer`` is told of each group when it enters a batch or
    is dropped.
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        config: RolloutConfig,
        *,
        seed: int = 0,
        deterministic: bool = False,
        group_filter: GroupFilter | None = None,
        max_draws: int = MAX_DRAWS,
        observer: GroupObserver | None = None,
        max_head_offpolicyness: int | None = None,
        scorer: GroupScorer | None = None,
        team: Team | None = None,
        generators: Team | None = None,
    ):
        """``scorer``: gives finished groups the rewards that need a model, while it is true. ``team``: the ranks that get
        batches, or all. ``generators``: those that run episodes, each with an ``engine``; None: rank 0 alone."""
        self._eta = (config.max_head_offpolicyness if max_head_offpolicyness is None else max_head_offpolicyness) or 0
        if self._eta and (deterministic or config.oversample > 1):
            what = "deterministic=true" if deterministic else f"rollout.oversample={config.oversample:g}"
            raise ConfigError(f"{what} is for synchronous training, got rollout.max_head_offpolicyness={self._eta}")
        self._engine, self._config, self._scorer, self._team = engine, config, scorer, team or Team()
        self._deterministic = deterministic  # the caller alone starts episodes, in waves
        self.loop = BackgroundLoop(on_blocked=self.fail)
        self._runner = EpisodeRunner(engine, config, self.loop, seed=seed, deterministic=deterministic)
        self._others = OtherRanks(generators if self._team.main else None, self.loop, self.fail)
        self._helper: Helper | None = None
        if generators is not None and generators.member and not generators.main:
            self._helper = Helper(generators, self.loop, self._runner, config.wait_timeout_s)

        # The lock of `_changed` guards the book. Its holder may schedule calls on the loop, but must not wait for it: the
        # loop may itself be waiting for the lock. Waiters are woken when there may be something for them.
        self._changed = threading.Condition()
        self._book = EpisodeBook(
            config,
            self._eta,
            group_filter=group_filter,
            max_draws=max_draws,
            observer=observer,
            judges_later=lambda: bool(scorer),
            version=self._version,
            stop=self._stop,
        )
        self.gate, self.ledger = self._book.gate, self._book.ledger
        self.replay = Replay(config.replay, seed=seed)
        self.last_groups: tuple[Group, ...] = ()
        self._metrics: dict[str, float] = {}

    def submit(self, data: Row, workflow: RolloutWorkflow) -> None:
        """Queues one episode; it starts as soon as the gate admits it. Rank 0 only."""
        with self._changed:
            self._book.submit([data], workflow)
            self._pump()

    def wait(self, count: int, timeout_s: float | None = None) -> TensorDict:
        """The oldest ``count`` groups of what was submitted. Collective.

        Raises:
            WaitTimeout: after ``timeout_s`` (default `rollout.wait_timeout_s`); says what it waited for.
            NoBatch: so many will never come.
            EngineDied: the engine is gone.
        """
        return self._batch(lambda: count, timeout_s=timeout_s)

    def rollout_batch(self, data: Sequence[Row], workflow: RolloutWorkflow) -> TensorDict:
        """Runs these rows, at most `rollout.batch_size` (times `oversample`), and returns their groups in order. Collective.

        Rows that are dropped are missing in the batch. Raises as `wait`; `NoBatch` if none came through.
        """

        def begin() -> int:
            most = self.gate.batch_size
            if not 0 < len(data) <= most:
                raise ConfigError(f"rollout_batch takes 1 to {most} rows (rollout.batch_size), got {len(data)}")
            with self._changed:
                self._book.submit(data, workflow)
            return min(len(data), self._config.batch_size)

        return self._batch(begin, workflow, partial=True)

    def prepare_batch(self, loader: Iterator[Row], workflow: RolloutWorkflow) -> TensorDict:
        """The next batch of `rollout.batch_size` groups, rows drawn from the loader as the gate admits. Collective.

        At η > 0 episodes go on, and new ones start, while the caller trains. Raises as `wait`.
        """

        def begin() -> int:
            with self._changed:
                self._book.draw_from(loader, workflow)
            return self._config.batch_size

        return self._batch(begin, workflow)

    def _batch(
        self,
        begin: Callable[[], int],
        workflow: RolloutWorkflow | None = None,
        *,
        timeout_s: float | None = None,
        partial: bool = False,
    ) -> TensorDict:
        """Rank 0 queues rows and collects as many groups as ``begin`` says. While some of them need the rewards of a model,
        all ranks score these, and rank 0 collects again. Then it packs the batch. Collective. ``workflow``: of the rows."""
        patience_s = self._config.wait_timeout_s if timeout_s is None else timeout_s
        wish = Wish(self._team.share(begin), partial, patience_s, workflow)
        while self._collected(wish):
            assert self._scorer is not None, "without a scorer every group is judged as it ends"
            wish.outcomes = self._scorer([episode.group for episode in wish.candidates if episode.group is not None])
            if self._team.share(lambda: self._judge(wish)):
                self._scorer.generate_again()
        return self._team.share(lambda: self._packed(wish))

    def _collected(self, wish: Wish) -> int:
        """Number of groups that still need a model's rewards. While rank 0 collects, others run episodes. Collective."""
        if self._helper is not None and wish.workflow is not None:
            self._helper.serve(wish.workflow)
        return self._team.share(lambda: self._collect(wish))

    def _collect(self, wish: Wish) -> int:
        """Waits until enough groups stand. Takes them if all are judged; otherwise takes none and returns how many are not.
        Other ranks help where all of them call for the same workflow. Raises as `wait`, or what broke the loop."""
        began = time.monotonic() - wish.metrics["time/wait_s"]
        try:
            with waiting(f"{wish.count} groups"), self._others.working(wish.workflow):
                self._wait(wish, began)
        finally:
            wish.metrics["time/wait_s"] = time.monotonic() - began
            with self._changed:
                self._book.wanted = 0
        return len(wish.candidates)

    def _judge(self, wish: Wish) -> bool:
        """Judges the candidates that were scored. True if too few groups are left, so that more have to be generated."""
        scored = list(zip(wish.candidates, wish.outcomes, strict=True))
        # without the lock, which the loop needs
        judged = self.loop.run(finish_groups(scored, self._config.episode_timeout_s))
        with self._changed:
            for (episode, _), outcome in zip(scored, judged, strict=True):
                self._book.judge(episode, outcome)
            return len(self._book.waiting) < wish.count

    def _packed(self, wish: Wish) -> TensorDict:
        """Rank 0: makes a batch of the groups that were taken."""
        assert self._engine is not None
        version = self._engine.version.number
        self.last_groups = tuple(episode.group for episode in wish.episodes if episode.group is not None)
        replayed, max_age = self.replay.draw(version), self._config.replay.max_age
        batch = collate(
            self.last_groups, version=version, max_head_offpolicyness=self._eta, replayed=replayed, max_age=max_age
        )
        self.replay.add(self.last_groups)
        self._metrics = wish.metrics | batch_metrics(self.last_groups, batch, version=version) | self.replay.metrics(version)
        return batch

    def end_step(self) -> None:
        """The batch was trained on and its weights are published: its episodes make room for others."""
        if self._team.main:
            with self._changed:
                self._book.end_step()
                self._pump()

    def fail(self, error: Exception) -> None:
        """Whoever waits for a batch, now or later, gets this error. For any thread."""
        with self._changed:
            self._book.broken = self._book.broken or error
            self._changed.notify_all()

    def begin_again(self) -> None:
        """Begins episodes that run, and groups that are not judged whole, again, because the reward has changed."""
        with self._changed:
            self._book.begin_again()

    def take_dropped(self) -> tuple[Dropped, ...]:
        """The prompts that were dropped since the last call, for the record of a step; none on ranks other than 0."""
        with self._changed:
            return self._book.take_dropped()

    def metrics(self) -> dict[str, float]:
        """Metrics of the last batch, and counts of episodes and failed samples since the start; empty but on rank 0."""
        with self._changed:
            return self._metrics | self._book.counts() if self._team.main else {}

    def standing_still(self) -> AbstractContextManager[object]:
        """A block in which no episode starts, ends or takes a row: what is read inside belongs together. Keep it short."""
        return self._changed

    def state_dict(self) -> dict[str, Any]:
        """The state (`Stateful`). Called between two steps, and where episodes go on, inside `standing_still`.

        Prompts that have begun and not ended are those that begin anew; what ended stands in `ledger`, which is saved apart.
        """
        with self._changed:
            return {"pool": self._book.state_dict(), "replay": self.replay.state_dict()} if self._team.main else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch."""
        if self._team.main:
            with self._changed:
                self._book.load_state_dict(state["pool"])
            self.replay.load_state_dict(state["replay"])

    def close(self) -> None:
        """Cancels what is under way; those prompts are pending again. Idempotent."""
        with self._changed:
            self._book.broken = self._book.broken or RuntimeError("the rollout is closed")
            self._book.abort_running()
            self._changed.notify_all()
        self.loop.close()

    def __enter__(self) -> "Rollout":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ waiting

    def _wait(self, wish: Wish, began: float) -> None:
        deadline = began + wish.patience_s
        with self._changed:
            self._book.wanted = wish.count
        while True:
            if self._deterministic:
                self._wave(deadline)
            with self._changed:
                if self._try(wish):
                    return
                if time.monotonic() >= deadline:
                    waited_s = time.monotonic() - began
                    raise WaitTimeout(f"waited {waited_s:.1f} s for {wish.count} groups; {self._book.describe()}")
                if self._book.running:  # else the next wave begins
                    self._changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))

    def _wave(self, deadline: float) -> None:
        """Deterministic: all that the gate admits is queued while the engine stands still, and then begins at once."""
        with self._changed:
            episodes = [] if self._book.running else self._book.admit()
        if episodes:
            self._runner.begin(episodes, self._spawn, deadline - time.monotonic())

    # ------------------------------------------------------------------ with the lock

    def _try(self, wish: Wish) -> bool:
        """One look: whether the groups of the batch stand. Takes them if all are judged. Raises if waiting is in vain."""
        book = self._book
        if book.broken is not None:
            raise book.broken
        self._pump()
        chosen = book.choose(wish.count)
        if chosen is None and not book.running:
            if self._deterministic and book.may_start:
                return False  # the next wave
            self._pump()  # what expired has made room
            if not book.running:
                chosen = book.give_up(wish.count, partial=wish.partial)
        if chosen is None:
            return False
        wish.episodes = chosen
        if not wish.candidates:
            wish.metrics |= book.take(chosen)
        return True

    def _pump(self) -> None:
        """Starts what the gate admits; in a deterministic run `_wave` does."""
        episodes = [] if self._deterministic else self._book.admit()
        if episodes:
            self.loop.call(self._spawn, episodes)

    def _stop(self, episode: Episode) -> None:
        """Ends an episode that the book has let go."""
        self._others.cancel(episode)
        if episode.task is not None:
            self.loop.call(episode.task.cancel)

    def _version(self) -> int:
        """Number of the engine's weights."""
        assert self._engine is not None, "ranks other than 0 have no engine; rank 0 makes the batches"
        return self._engine.version.number

    # ------------------------------------------------------------------ on the loop's thread, without the lock

    def _spawn(self, episodes: Sequence[Episode]) -> None:
        """Runs episodes that were admitted, here or on other ranks."""
        loop, episodes = asyncio.get_running_loop(), [episode for episode in episodes if not episode.aborted]
        try:
            self._others.give(episodes)
        except Exception as error:  # the worker boundary: a row that cannot travel must reach whoever waits
            self.fail(error)
            return
        for episode in episodes:
            episode.task = loop.create_task(self._run(episode))
            episode.task.add_done_callback(partial(self._others.ended, episode))

    async def _run(self, episode: Episode) -> None:
        try:
            maker = self._others if episode.place else self._runner
            self._end(episode, await maker.group_of(episode))
        except EpisodeFailure as failure:
            self._end(episode, failure)
        except Exception as error:  # the worker boundary: a bug here must reach whoever waits
            self.fail(error)

    def _end(self, episode: Episode, outcome: Group | EpisodeFailure) -> None:
        did(*GENERATING)
        try:
            with self._changed:
                book = self._book
                if episode.number not in book.running:  # it was aborted while this thread waited for the lock
                    return
                book.ended(episode, outcome)
                self._pump()
                # Waking the caller costs more than an episode: only when there may be something for it.
                full = book.wanted and len(book.waiting) >= book.wanted
                if full or not book.running or book.broken or self._deterministic or self._config.on_expiry != "mask":
                    self._changed.notify_all()
        except Exception as error:  # the worker boundary: a filter or a loader that raised must reach whoever waits
            self.fail(error)
