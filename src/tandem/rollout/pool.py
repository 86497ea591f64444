"""The episodes under way: started as the staleness gate admits, ended with a group or a reason, taken for a batch."""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tandem.api.activity import GENERATING, did, waiting
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, EngineDied, EpisodeFailure, InfrastructureFailure, WaitTimeout
from tandem.api.samples import Dropped, Group
from tandem.api.team import Team
from tandem.api.workflow import RolloutWorkflow
from tandem.config.rollout import RolloutConfig
from tandem.rollout.episodes import Episode, EpisodeRunner, finish_groups
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.failure_budget import FailureBudget, NoBatch
from tandem.rollout.gate import StalenessGate
from tandem.rollout.ledger import NO_EPOCH, Ledger, PromptId
from tandem.rollout.ranks import OtherRanks

Row = Mapping[str, Any]
GroupFilter = Callable[[Group], tuple[bool, str]]
"""``group -> (keep, reason)``; a group that is not kept is dropped as ``filter/<reason>``."""

GroupObserver = Callable[[Group], None]
"""Called with each group once, when it enters a batch or is dropped: from then on it is never made again."""

MAX_DROPPED = 256
"""Dropped prompts that are remembered for the record of the step; all are counted."""

logger = logging.getLogger("tandem.rollout")


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


class EpisodePool:
    """All episodes that are queued, running, waiting and taken, with the gate and the ledger that count them. On rank 0.

    Two threads meet here: the caller's, and the loop's on which episodes run. Public methods are for the caller's thread.
    ``deterministic``: the caller alone starts episodes.
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        config: RolloutConfig,
        gate: StalenessGate,
        *,
        seed: int,
        deterministic: bool,
        group_filter: GroupFilter | None,
        max_draws: int,
        observer: GroupObserver | None,
        judges_later: Callable[[], bool],
        generators: Team | None = None,
    ):
        """``judges_later``: says whether groups wait for rewards that need a model, and are filtered behind them.
        ``generators``: the ranks that run episodes; None: rank 0 alone."""
        self._engine, self._config, self._deterministic = engine, config, deterministic
        self._filter, self._observer, self._judges_later = group_filter, observer, judges_later
        self.loop = BackgroundLoop()
        self.runner = EpisodeRunner(engine, config, self.loop, seed=seed, deterministic=deterministic)
        self._others = None if generators is None else OtherRanks(generators, self.loop, self._break)

        # The lock of `changed` guards everything below. Its holder may schedule calls on the loop, but must not wait for it:
        # the loop may itself be waiting for the lock. Waiters are woken when there may be something for them.
        self.changed = threading.Condition()
        self.gate, self.ledger = gate, Ledger()
        self._budget = FailureBudget(config.max_data_failures, config.batch_size, max_draws)
        self._submitted: deque[tuple[Row, RolloutWorkflow]] = deque()
        self._source: tuple[Iterator[Row], RolloutWorkflow] | None = None
        self._again: deque[PromptId] = deque()  # of the source, before its next rows: under way when a run was cut off
        self._begun_again = 0  # such prompts since the start
        self._running: dict[int, Episode] = {}
        self._waiting: dict[int, Episode] = {}  # in order of arrival
        self._taken: list[Episode] = []  # of steps that have not ended
        self._count = 0  # episodes since the start
        self._wanted = 0  # groups that the caller is waiting for
        self._broken: Exception | None = None
        self._dropped: deque[Dropped] = deque(maxlen=MAX_DROPPED)

    # ------------------------------------------------------------------ for the caller

    def submit(self, rows: Sequence[Row], workflow: RolloutWorkflow, *, start: bool = False) -> None:
        """Queues one episode on each row. ``start``: what the gate admits begins now, not when a batch is wanted."""
        with self.changed:
            self._submitted.extend((row, workflow) for row in rows)
            if start:
                self._pump()

    def draw_from(self, loader: Iterator[Row], workflow: RolloutWorkflow) -> None:
        """Rows that follow when no submitted ones are left."""
        with self.changed:
            self._source = (loader, workflow)

    def judge(self, wish: Wish) -> bool:
        """Judges the candidates that were scored. True if too few groups are left, so that more have to be generated."""
        scored = list(zip(wish.candidates, wish.outcomes, strict=True))
        # without the lock, which the loop needs
        judged = self.loop.run(finish_groups(scored, self._config.episode_timeout_s))
        with self.changed:
            for (episode, _), outcome in zip(scored, judged, strict=True):
                self._judge(episode, outcome)
            return len(self._waiting) < wish.count

    def collect(self, wish: Wish) -> int:
        """Waits until enough groups stand. Takes them if all are judged; otherwise takes none and returns how many are not.
        Other ranks help where all of them call for the same workflow.

        Raises:
            WaitTimeout: after the patience of the wish; says what it waited for.
            NoBatch: so many will never come.
            Exception: what broke the pool, such as `EngineDied`.
        """
        began = time.monotonic() - wish.metrics["time/wait_s"]
        try:
            with waiting(f"{wish.count} groups"), self._others_working(wish):
                self._wait(wish, began)
        finally:
            wish.metrics["time/wait_s"] = time.monotonic() - began
            with self.changed:
                self._wanted = 0
        return len(wish.candidates)

    def end_step(self) -> None:
        """Ends the step: the episodes that were taken are trained, and make room for others."""
        with self.changed:
            for episode in self._taken:
                self.ledger.move(episode.prompt, "trained")
            self._taken = []
            self.gate.end_step()
            self.ledger.check(self.gate)
            self._pump()

    def begin_again(self) -> None:
        """Begins episodes again, so that all samples of a group are judged by the same reward."""
        with self.changed:
            for _, episode in sorted({**self._running, **self._waiting}.items()):
                if not episode.judged:
                    self._abort(episode, None)
                    self._submitted.append((episode.row, episode.workflow))

    def take_dropped(self) -> tuple[Dropped, ...]:
        """Takes the dropped prompts, the newest `MAX_DROPPED`."""
        with self.changed:
            dropped, self._dropped = tuple(self._dropped), deque(maxlen=MAX_DROPPED)
        return dropped

    def counts(self) -> dict[str, float]:
        """Episodes and failed samples since the start, as metrics."""
        with self.changed:
            counts = {"episodes/trained": float(self.ledger.total("trained"))}
            counts |= {f"episodes/dropped/{reason}": float(n) for reason, n in self.ledger.dropped.items()}
            counts |= {f"samples/failed/{reason}": float(n) for reason, n in self.ledger.failed_samples.items()}
            counts |= {"episodes/begun_again": float(self._begun_again)} if self._begun_again else {}
            return counts

    def state_dict(self) -> dict[str, Any]:
        """The state: counters, and the prompts of a data set that have begun and not ended."""
        with self.changed:
            begun = {**self._running, **self._waiting}
            unfinished = [*(begun[number].prompt for number in sorted(begun)), *self.ledger.pending(), *self._again]
            return {
                "count": self._count,
                **self._budget.state_dict(),
                "failed_samples": dict(self.ledger.failed_samples),
                "again": [[p.epoch, p.index] for p in unfinished if p.epoch != NO_EPOCH],
                "begun_again": self._begun_again,
                "sizes": [[epoch, size] for epoch, size in self.ledger.sizes.items()],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first episode. What ended is the ledger's to know."""
        with self.changed:
            self._count = int(state["count"])
            self._budget.load_state_dict(state)
            self.ledger.failed_samples = Counter(state.get("failed_samples", {}))
            self._again = deque(PromptId(int(epoch), int(index)) for epoch, index in state["again"])
            self._begun_again = int(state.get("begun_again", 0)) + len(self._again)
            if self._again:
                logger.info("%d episodes that were under way when the checkpoint was written begin anew", len(self._again))
            for epoch, size in state["sizes"]:
                self.ledger.begin_epoch(int(epoch), int(size))

    def close(self) -> None:
        """Aborts what runs; those prompts are pending again. Idempotent."""
        with self.changed:
            self._broken = self._broken or RuntimeError("the rollout is closed")
            for episode in list(self._running.values()):
                self._abort(episode, None)
            self.changed.notify_all()
        self.loop.close()

    # ------------------------------------------------------------------ waiting

    def _wait(self, wish: Wish, began: float) -> None:
        deadline = began + wish.patience_s
        with self.changed:
            self._wanted = wish.count
        while True:
            if self._deterministic:
                self._wave(deadline)
            with self.changed:
                if self._try(wish):
                    return
                if time.monotonic() >= deadline:
                    waited_s = time.monotonic() - began
                    raise WaitTimeout(f"waited {waited_s:.1f} s for {wish.count} groups; {self._describe()}")
                if self._running:  # else the next wave begins
                    self.changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))

    def _others_working(self, wish: Wish) -> AbstractContextManager[None]:
        return nullcontext() if self._others is None or wish.workflow is None else self._others.working(wish.workflow)

    def _wave(self, deadline: float) -> None:
        """Deterministic: all that the gate admits is queued while the engine stands still, and then begins at once."""
        with self.changed:
            episodes = [] if self._running else self._admit()
        if episodes:
            self.runner.begin(episodes, self._spawn, deadline - time.monotonic())

    # ------------------------------------------------------------------ taking; from here on the lock is held

    def _try(self, wish: Wish) -> bool:
        """One look: whether the groups of the batch stand. Takes them if all are judged. Raises if waiting is in vain."""
        if self._broken is not None:
            raise self._broken
        self._pump()
        chosen = self._choose(wish.count)
        if chosen is None and not self._running:
            if self._deterministic and self.gate.capacity() and (self._submitted or self._source):
                return False  # the next wave
            self._pump()  # what expired has made room
            if not self._running:
                chosen = self._give_up(wish)
        if chosen is None:
            return False
        wish.episodes = chosen
        if not wish.candidates:
            self._take(wish)
        return True

    def _choose(self, count: int) -> list[Episode] | None:
        """The oldest groups, as `on_expiry` says; with `oversample` those that finished first. None: too few."""
        eta = self.gate.max_head_offpolicyness
        oldest = self._version() - eta
        if self._config.on_expiry == "drop":
            for episode in [e for e in self._waiting.values() if e.has_expired(oldest)]:
                self._discard(episode, "expired")
        if self._config.on_expiry == "wait" and eta and any(e.version <= oldest for e in self._running.values()):
            return None
        if len(self._waiting) < count:
            return None
        if self._config.oversample > 1:
            return sorted(list(self._waiting.values())[:count], key=lambda episode: episode.number)
        return self._oldest(count)

    def _oldest(self, count: int) -> list[Episode]:
        return [self._waiting[number] for number in sorted(self._waiting)[:count]]

    def _give_up(self, wish: Wish) -> list[Episode]:
        """Nothing runs and nothing can start: the smaller batch that will do as well, or the reason why there is none."""
        if wish.partial and self._waiting and not self._submitted:
            return self._oldest(wish.count)
        if self._taken and not self.gate.capacity():
            raise NoBatch(f"call end_step() after each batch: the last one is still being trained on; {self._describe()}")
        if not self.gate.capacity():
            raise NoBatch(f"{wish.count} groups are more than the staleness gate ever admits; {self._describe()}")
        raise NoBatch(f"the data ended with {len(self._waiting)} of {wish.count} groups; {self._describe()}")

    def _take(self, wish: Wish) -> None:
        left = len(self._waiting) - len(wish.episodes)
        wish.metrics |= {"episodes/running": float(len(self._running)), "episodes/waiting": float(left)}
        for episode in wish.episodes:
            del self._waiting[episode.number]
            self._settle(episode)
            self.gate.consume()
            self.ledger.move(episode.prompt, "taken")
        self._taken += wish.episodes
        self._budget.filtered.clear()
        if self._config.oversample > 1:  # the others lost the race
            for episode in list(self._running.values()):
                self._abort(episode, "oversampled")
            for episode in list(self._waiting.values()):
                self._discard(episode, "oversampled")

    # ------------------------------------------------------------------ starting

    def _pump(self) -> None:
        """Starts what the gate admits; in a deterministic run `_wave` does."""
        episodes = [] if self._deterministic else self._admit()
        if episodes:
            self.loop.call(self._spawn, episodes)

    def _admit(self) -> list[Episode]:
        """Registers as many episodes as the gate admits; they do not run yet."""
        episodes: list[Episode] = []
        if self._broken is not None:
            return episodes
        version = self._version()
        for _ in range(self.gate.capacity()):
            item = self._next()
            if item is None:
                break
            row, workflow = item
            prompt = PromptId.of(row, self._count)
            self.ledger.move(prompt, "running")
            self.gate.submit()
            episode = Episode(self._count, prompt, row, workflow, version)
            self._running[self._count] = episode
            self._count += 1
            episodes.append(episode)
        return episodes

    def _next(self) -> tuple[Row, RolloutWorkflow] | None:
        """The episode that starts next; rows of a loader only while someone waits, or training is asynchronous."""
        if self._submitted:
            return self._submitted.popleft()
        if self._source is None or not (self._wanted or self.gate.max_head_offpolicyness):
            return None
        rows, workflow = self._source
        dataset = getattr(rows, "dataset", None)
        if self._again:
            prompt = self._again.popleft()
            assert dataset is not None, "prompts that begin anew are those of a loader's data set"
            row: Row | None = {**dataset.rows[prompt.index], "epoch": prompt.epoch, "index": prompt.index}
        else:
            row = next(rows, None)
        if row is None:
            self._source = None
            return None
        if dataset is not None and "epoch" in row:
            self.ledger.begin_epoch(row["epoch"], getattr(rows, "epoch_size", len(dataset)))
        return row, workflow

    # ------------------------------------------------------------------ ending

    def _finished(self, episode: Episode, group: Group) -> None:
        """The group waits to be taken. Where a model's rewards are to come, the candidates of a batch are judged later."""
        self._budget.restore("infrastructure")
        del self._running[episode.number]
        episode.group = group
        self._waiting[episode.number] = episode
        self.gate.finish()
        self.ledger.move(episode.prompt, "waiting")
        if not self._judges_later():
            self._judge(episode, group)

    def _judge(self, episode: Episode, outcome: Group | DataFailure) -> None:
        """All rewards of a waiting group are there, or could not be had: it goes on waiting, or is dropped."""
        if isinstance(outcome, DataFailure):
            self._failed(episode, outcome)
            return
        failed, n = len(outcome.failures), len(outcome.failures) + len(outcome.samples)
        if 2 * failed > n:  # it may be trained on (rollout.min_group_size), and yet the judge or the data is at fault
            self._budget.remember(episode.prompt, f"{failed} of {n} samples failed: {dict(Counter(outcome.failures))}")
            self._broken = self._broken or self._budget.spend("data")
        else:
            self._budget.restore("data")
        episode.group, episode.judged = outcome, True
        keep, reason = (True, "") if self._filter is None else self._filter(outcome)
        if not keep:
            self._discard(episode, f"filter/{reason}")
            kept = sum(episode.judged for episode in self._waiting.values())
            error = self._budget.turn_down(reason, kept, self._wanted)
            if self._judges_later() or self._wanted > kept:  # else the batch is full already
                self._broken = self._broken or error

    def _failed(self, episode: Episode, failure: EpisodeFailure) -> None:
        """There is no group: its episode failed, or its rewards did."""
        message = self._budget.remember(episode.prompt, str(failure))
        if isinstance(failure, EngineDied):
            self._broken = self._broken or failure
            self._leave(episode, None)
            return
        if failure.reason not in self.ledger.dropped:
            logger.warning("an episode was dropped (%s)", message, exc_info=failure)
        self._leave(episode, failure.reason, str(failure))
        self.ledger.failed_samples.update(failure.failed_samples)
        kind = "infrastructure" if isinstance(failure, InfrastructureFailure) else "data"
        self._broken = self._broken or self._budget.spend(kind)

    def _settle(self, episode: Episode) -> None:
        """The group enters a batch or is dropped; from now on it counts."""
        assert episode.group is not None, "it waits, so it has finished"
        self.ledger.failed_samples.update(episode.group.failures)
        if self._observer is not None:
            self._observer(episode.group)

    def _discard(self, episode: Episode, reason: str) -> None:
        """A finished group is dropped before it is consumed."""
        self._settle(episode)
        self._leave(episode, reason)

    def _abort(self, episode: Episode, reason: str | None) -> None:
        """Stops an episode."""
        episode.aborted = True
        if self._others is not None:
            self._others.cancel(episode)
        self._leave(episode, reason)
        if episode.task is not None:
            self.loop.call(episode.task.cancel)

    def _leave(self, episode: Episode, reason: str | None, words: str = "") -> None:
        """The episode goes without a batch: its prompt is dropped for this reason, or without one pending again."""
        if self._running.pop(episode.number, None) is not None:
            self.gate.drop()
        else:
            del self._waiting[episode.number]
            self.gate.discard()
        self.ledger.move(episode.prompt, "dropped" if reason else "pending", reason or "")
        if reason:
            self._dropped.append(episode.dropped(reason, words))

    def _version(self) -> int:
        """Number of the engine's weights."""
        assert self._engine is not None, "ranks other than 0 have no engine; rank 0 makes the batches"
        return self._engine.version.number

    def _describe(self) -> str:
        """The place of every episode in words, for errors."""
        ages = [time.monotonic() - episode.started for episode in self._running.values()]
        oldest = f", the oldest for {max(ages):.1f} s" if ages else ""
        gate = self.gate
        return f"running {gate.running}{oldest}, waiting {gate.waiting}, taken {gate.taken}; {self._budget.describe()}"

    # ------------------------------------------------------------------ on the loop's thread, without the lock

    def _spawn(self, episodes: Sequence[Episode]) -> None:
        """Runs episodes that were admitted, here or on other ranks."""
        loop, episodes = asyncio.get_running_loop(), [episode for episode in episodes if not episode.aborted]
        if self._others is not None:
            try:
                self._others.give(episodes)
            except Exception as error:  # the worker boundary: a row that cannot travel must reach whoever waits
                self._break(error)
                return
        for episode in episodes:
            episode.task = loop.create_task(self._run(episode))
            if self._others is not None:
                episode.task.add_done_callback(partial(self._others.ended, episode))

    async def _run(self, episode: Episode) -> None:
        try:
            made = self._others.group_of(episode) if episode.place and self._others else self.runner.group_of(episode)
            self._end(episode, await made)
        except EpisodeFailure as failure:
            self._end(episode, failure)
        except Exception as error:  # the worker boundary: a bug here must reach whoever waits
            self._break(error)

    def _end(self, episode: Episode, outcome: Group | EpisodeFailure) -> None:
        did(*GENERATING)
        try:
            with self.changed:
                if episode.number not in self._running:  # it was aborted while this thread waited for the lock
                    return
                if isinstance(outcome, EpisodeFailure):
                    self._failed(episode, outcome)
                else:
                    self._finished(episode, outcome)
                self._pump()
                # Waking the caller costs more than an episode: only when there may be something for it.
                full = self._wanted and len(self._waiting) >= self._wanted
                if full or not self._running or self._broken or self._deterministic or self._config.on_expiry != "mask":
                    self.changed.notify_all()
        except Exception as error:  # the worker boundary: a filter or a loader that raised must reach whoever waits
            self._break(error)

    def _break(self, error: Exception) -> None:
        with self.changed:
            self._broken = self._broken or error
            self.changed.notify_all()
