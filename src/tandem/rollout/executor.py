"""The executor: keeps episodes under way as the staleness gate admits, and hands out batches, the oldest first.

Consumes rows; produces packed batches. Episodes run on one event loop in a background thread, so generation goes on
while the caller trains. A batch waits for its episodes, at most `rollout.wait_timeout_s`; `end_step` unblocks the gate.
"""

import asyncio
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tensordict import TensorDict

from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, EngineDied, EpisodeFailure, InfrastructureFailure, TandemError, WaitTimeout
from tandem.api.samples import Group
from tandem.api.workflow import RolloutWorkflow
from tandem.config.errors import ConfigError
from tandem.config.rollout import RolloutConfig
from tandem.rollout.collate import collate, expired
from tandem.rollout.collective import is_collector, share
from tandem.rollout.episodes import Episode, run_episode
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.gate import StalenessGate
from tandem.rollout.ledger import Ledger, Prompt
from tandem.rollout.statistics import batch_metrics

T = TypeVar("T")
Row = Mapping[str, Any]
GroupFilter = Callable[[Group], tuple[bool, str]]
"""``group -> (keep, reason)``; a group that is not kept is dropped as ``filter/<reason>``."""

logger = logging.getLogger("tandem.rollout")

NO_EPOCH = -2
"""Epoch of rows that bring no ``epoch`` and ``index``; they are numbered as they come. (-1 is evaluation's.)"""

MAX_DRAWS = 10
"""Times the batch size that are drawn for one batch before a filter that keeps too few ends the run."""


class NoBatch(TandemError, RuntimeError):
    """No batch can be made any more: the data ended, a filter keeps too little, or too many episodes failed."""


class Rollout:
    """``rollout_batch`` for given rows, ``prepare_batch`` for a loader, ``submit`` and ``wait`` for anything else.

    After each batch has been trained on and the new weights are published, call ``end_step``. ``max_head_offpolicyness``
    overrides the configuration's (null there means 0). What is older than that at consumption follows `on_expiry`:

    - ``mask``: those tokens are ``expired`` in the batch;
    - ``drop``: the group is dropped with reason ``expired`` and another takes its place;
    - ``wait``: a batch is handed out only when it holds every episode that would exceed η at the next one: those started
      at version ≤ now − η. By the gate's inequality they are at most B, and the oldest, so nothing ever expires.

    All methods are for one thread; under ``torch.distributed`` the batch methods are collective, and
    ranks other than 0 bring ``engine=None``. ``max_draws`` bounds what ``group_filter`` may turn down for one batch.
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
        max_head_offpolicyness: int | None = None,
    ):
        eta = config.max_head_offpolicyness if max_head_offpolicyness is None else max_head_offpolicyness
        self._eta = eta or 0
        if self._eta and (deterministic or config.oversample > 1):
            what = "deterministic=true" if deterministic else f"rollout.oversample={config.oversample:g}"
            raise ConfigError(f"{what} is for synchronous training, got rollout.max_head_offpolicyness={self._eta}")
        self._engine, self._config, self._seed = engine, config, seed
        self._deterministic, self._filter, self._max_draws = deterministic, group_filter, max_draws
        self.gate = StalenessGate(math.ceil(config.batch_size * config.oversample), self._eta, config.max_concurrent)
        self.ledger = Ledger()
        self.last_groups: tuple[Group, ...] = ()
        self._loop = BackgroundLoop()
        self._changed = threading.Condition()  # guards everything below
        self._running: dict[int, Episode] = {}
        self._waiting: dict[int, Episode] = {}  # in order of arrival
        self._taken: list[Episode] = []
        self._submitted: deque[tuple[Row, RolloutWorkflow]] = deque()
        self._source: tuple[Iterator[Row], RolloutWorkflow] | None = None
        self._count = 0
        self._wanted = 0  # groups that a caller is waiting for
        self._filtered: Counter[str] = Counter()  # since the last batch
        self._in_a_row = {"data": 0, "infrastructure": 0}
        self._failures: deque[str] = deque(maxlen=5)
        self._broken: Exception | None = None
        self._metrics: dict[str, float] = {}

    # ------------------------------------------------------------------ what a script calls

    def submit(self, data: Row, workflow: RolloutWorkflow) -> None:
        """Queues one episode; it starts as soon as the gate admits it. Rank 0 only."""
        with self._changed:
            self._submitted.append((data, workflow))
            if not self._deterministic:
                self._pump()

    def wait(self, count: int, timeout_s: float | None = None) -> TensorDict:
        """The oldest ``count`` groups of what was submitted. Collective.

        Raises:
            WaitTimeout: after ``timeout_s`` (default `rollout.wait_timeout_s`); says what it waited for.
            NoBatch: so many will never come.
            EngineDied: the engine is gone.
        """
        return share(lambda: self._batch(count, timeout_s=timeout_s))

    def rollout_batch(self, data: Sequence[Row], workflow: RolloutWorkflow) -> TensorDict:
        """Runs these rows, at most `rollout.batch_size` (times `oversample`), and returns their groups in order. Collective.

        Rows that are dropped are missing in the batch. Raises as `wait`; `NoBatch` if none came through.
        """

        def make() -> TensorDict:
            most = self.gate.batch_size
            if not 0 < len(data) <= most:
                raise ConfigError(f"rollout_batch takes 1 to {most} rows (rollout.batch_size), got {len(data)}")
            with self._changed:
                self._submitted.extend((row, workflow) for row in data)
            return self._batch(min(len(data), self._config.batch_size), partial=True)

        return share(make)

    def prepare_batch(self, loader: Iterator[Row], workflow: RolloutWorkflow) -> TensorDict:
        """The next batch of `rollout.batch_size` groups, rows drawn from the loader as the gate admits. Collective.

        At η > 0 episodes go on, and new ones start, while the caller trains. Raises as `wait`.
        """

        def make() -> TensorDict:
            with self._changed:
                self._source = (loader, workflow)
            return self._batch(self._config.batch_size)

        return share(make)

    def end_step(self) -> None:
        """The batch was trained on and its weights are published: its episodes make room for others."""
        if not is_collector():
            return
        with self._changed:
            for episode in self._taken:
                self.ledger.move(episode.prompt, "trained")
            self._taken = []
            self.gate.end_step()
            self.ledger.check(self.gate)
            if not self._deterministic:
                self._pump()

    def metrics(self) -> dict[str, float]:
        """Of the last batch, and counts of episodes since the start; empty on ranks other than 0."""
        if not is_collector():
            return {}
        with self._changed:
            counts = {"episodes/trained": float(self.ledger.total("trained"))}
            counts |= {f"episodes/dropped/{reason}": float(n) for reason, n in self.ledger.dropped.items()}
            return self._metrics | counts

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine (an evaluation, say) on the executor's loop, beside its episodes, and waits for it."""
        return self._loop.run(coroutine)

    def close(self) -> None:
        """Cancels what is under way; those prompts are pending again. Idempotent."""
        with self._changed:
            self._broken = self._broken or RuntimeError("the rollout is closed")
            for episode in list(self._running.values()):
                self._leave(episode, "pending")
                episode.aborted = True
            self._changed.notify_all()
        self._loop.close()

    def __enter__(self) -> "Rollout":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ starting episodes (lock held)

    def _next(self) -> tuple[Row, RolloutWorkflow] | None:
        """What starts next; rows of a loader only while someone waits, or training is asynchronous."""
        if self._submitted:
            return self._submitted.popleft()
        if self._source is None or not (self._wanted or self._eta):
            return None
        rows, workflow = self._source
        try:
            row = next(rows)
        except StopIteration:
            self._source = None
            return None
        dataset = getattr(rows, "dataset", None)
        if dataset is not None and "epoch" in row:
            self.ledger.begin_epoch(row["epoch"], len(dataset))
        return row, workflow

    def _admit(self) -> list[Episode]:
        """Registers as many episodes as the gate admits; they do not run yet."""
        assert self._engine is not None, "ranks other than 0 have no engine; episodes start on rank 0"
        episodes: list[Episode] = []
        if self._broken is not None:
            return episodes
        version = self._engine.version.number
        for _ in range(self.gate.capacity()):
            item = self._next()
            if item is None:
                break
            row, workflow = item
            numbered = isinstance(row.get("epoch"), int) and isinstance(row.get("index"), int)
            prompt = Prompt(row["epoch"], row["index"]) if numbered else Prompt(NO_EPOCH, self._count)
            self.ledger.move(prompt, "running")
            self.gate.submit()
            episode = Episode(self._count, prompt, row, workflow, version)
            self._running[self._count] = episode
            self._count += 1
            episodes.append(episode)
        return episodes

    def _pump(self) -> None:
        episodes = self._admit()
        if episodes:
            self._loop.call(self._spawn, episodes)

    def _spawn(self, episodes: Sequence[Episode]) -> None:
        """On the loop."""
        loop = asyncio.get_running_loop()
        for episode in episodes:
            if not episode.aborted:
                episode.task = loop.create_task(self._run(episode))

    def _wave(self, deadline: float) -> None:
        """Deterministic: all that the gate admits is queued while the engine stands still, and then begins at once."""
        assert self._engine is not None
        with self._changed:
            episodes = [] if self._running else self._admit()
        if not episodes:
            return
        self._engine.pause()
        try:
            self._loop.call(self._spawn, episodes)
            with self._changed:
                ready = self._changed.wait_for(
                    lambda: self._broken or all(_settled(e, self._running) for e in episodes),
                    deadline - time.monotonic(),
                )
                if not ready:
                    raise WaitTimeout(f"waited for {len(episodes)} episodes to issue their requests; {self._describe()}")
        finally:
            self._engine.resume()

    # ------------------------------------------------------------------ ends of episodes (on the loop)

    async def _run(self, episode: Episode) -> None:
        assert self._engine is not None
        config = self._config
        try:
            group = await run_episode(
                episode,
                self._engine,
                seed=self._seed,
                timeout_s=config.episode_timeout_s,
                max_retries=config.max_retries,
                on_issue=self._notify if self._deterministic else None,
            )
        except EpisodeFailure as failure:
            self._end(episode, failure)
        except asyncio.CancelledError:
            self._end(episode, DataFailure("cancelled", "the workflow was cancelled, not by the executor"))
            raise
        except Exception as error:  # the worker boundary: a bug here must reach whoever waits
            self._break(error)
        else:
            self._end(episode, group)

    def _end(self, episode: Episode, outcome: Group | EpisodeFailure) -> None:
        try:
            with self._changed:
                if episode.number not in self._running:  # it was aborted meanwhile
                    return
                if isinstance(outcome, EpisodeFailure):
                    self._failed(episode, outcome)
                else:
                    self._finished(episode, outcome)
                if not self._deterministic:
                    self._pump()
                # Waking the caller costs more than an episode: only when there may be something for it.
                full = self._wanted and len(self._waiting) >= self._wanted
                if full or not self._running or self._broken or self._deterministic or self._config.on_expiry != "mask":
                    self._changed.notify_all()
        except Exception as error:  # a filter or a loader that raised
            self._break(error)

    def _finished(self, episode: Episode, group: Group) -> None:
        self._in_a_row = dict.fromkeys(self._in_a_row, 0)
        keep, reason = (True, "") if self._filter is None else self._filter(group)
        if keep:
            del self._running[episode.number]
            episode.group = group
            self._waiting[episode.number] = episode
            self.gate.finish()
            self.ledger.move(episode.prompt, "waiting")
        else:
            self._filtered[reason] += 1
            self._leave(episode, "dropped", f"filter/{reason}")
            drawn, most = self._filtered.total() + len(self._waiting), self._max_draws * self._config.batch_size
            if self._broken is None and self._wanted > len(self._waiting) and drawn >= most:
                self._broken = NoBatch(
                    f"the filter of groups kept {len(self._waiting)} of {drawn} groups, and {self._wanted} are needed; "
                    f"at most {self._max_draws} × rollout.batch_size are drawn for a batch. Turned down: "
                    f"{dict(self._filtered)}. Use easier or harder prompts, or another algorithm.filter"
                )

    def _failed(self, episode: Episode, failure: EpisodeFailure) -> None:
        self._failures.append(f"prompt {episode.prompt.index} of epoch {episode.prompt.epoch}: {failure}")
        if isinstance(failure, EngineDied):
            self._broken = self._broken or failure
            self._leave(episode, "pending")
            return
        if failure.reason not in self.ledger.dropped:
            logger.warning("an episode was dropped (%s)", self._failures[-1], exc_info=failure)
        self._leave(episode, "dropped", failure.reason)
        kind = "infrastructure" if isinstance(failure, InfrastructureFailure) else "data"
        self._in_a_row[kind] += 1
        if self._in_a_row[kind] >= self._config.max_data_failures:
            self._broken = self._broken or NoBatch(
                f"{self._in_a_row[kind]} episodes in a row were dropped by {kind} failures (rollout.max_data_failures); the "
                f"last: {'; '.join(self._failures)}"
            )

    def _leave(self, episode: Episode, state: str, reason: str = "") -> None:
        """Out of `running` without a group."""
        del self._running[episode.number]
        self.gate.drop()
        self.ledger.move(episode.prompt, "dropped" if state == "dropped" else "pending", reason)

    def _break(self, error: Exception) -> None:
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------ batches

    def _batch(self, count: int, *, timeout_s: float | None = None, partial: bool = False) -> TensorDict:
        """Waits for ``count`` groups, takes them, packs them. ``partial``: for fewer, when no more can come."""
        assert self._engine is not None, "rank 0 needs an engine"
        began = time.monotonic()
        deadline = began + (self._config.wait_timeout_s if timeout_s is None else timeout_s)
        with self._changed:
            self._wanted = count
        try:
            while True:
                if self._deterministic:
                    self._wave(deadline)
                with self._changed:
                    episodes = self._try(count, partial)
                    if episodes is not None:
                        break
                    if time.monotonic() >= deadline:
                        raise WaitTimeout(f"waited {time.monotonic() - began:.1f} s for {count} groups; {self._describe()}")
                    if self._running:  # else the next wave begins
                        self._changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))
        finally:
            with self._changed:
                self._wanted = 0
        return self._pack(episodes, time.monotonic() - began)

    def _try(self, count: int, partial: bool) -> list[Episode] | None:
        """One look: the episodes of the batch, taken; None to wait on. Raises where waiting is in vain."""
        if self._broken is not None:
            raise self._broken
        if not self._deterministic:
            self._pump()
        chosen = self._choose(count)
        if chosen is None and not self._running:
            if self._deterministic and self.gate.capacity() and (self._submitted or self._source):
                return None  # the next wave
            if not self._deterministic:
                self._pump()  # what expired has made room
            if not self._running:
                chosen = self._give_up(count, partial)
        if chosen is not None:
            self._take(chosen)
        return chosen

    def _choose(self, count: int) -> list[Episode] | None:
        assert self._engine is not None
        oldest = self._engine.version.number - self._eta
        if self._config.on_expiry == "drop":
            for episode in [e for e in self._waiting.values() if _has_expired(e, oldest)]:
                self._discard(episode, "expired")
        if self._config.on_expiry == "wait" and self._eta and any(e.version <= oldest for e in self._running.values()):
            return None
        if len(self._waiting) < count:
            return None
        if self._config.oversample > 1:
            return sorted(list(self._waiting.values())[:count], key=lambda episode: episode.number)
        return [self._waiting[number] for number in sorted(self._waiting)[:count]]

    def _give_up(self, count: int, partial: bool) -> list[Episode]:
        if partial and self._waiting and not self._submitted:
            return [self._waiting[number] for number in sorted(self._waiting)[:count]]
        if self._taken and not self.gate.capacity():
            raise NoBatch(f"call end_step() after each batch: the last one is still being trained on; {self._describe()}")
        if not self.gate.capacity():
            raise NoBatch(f"{count} groups are more than the staleness gate ever admits; {self._describe()}")
        raise NoBatch(f"the data ended with {len(self._waiting)} of {count} groups; {self._describe()}")

    def _take(self, chosen: Sequence[Episode]) -> None:
        self._metrics = {
            "episodes/running": float(len(self._running)),
            "episodes/waiting": float(len(self._waiting) - len(chosen)),
        }
        for episode in chosen:
            del self._waiting[episode.number]
            self.gate.consume()
            self.ledger.move(episode.prompt, "taken")
        self._taken += chosen
        self._filtered.clear()
        if self._config.oversample > 1:
            self._abort_rest()

    def _abort_rest(self) -> None:
        for episode in list(self._running.values()):
            episode.aborted = True
            self._leave(episode, "dropped", "oversampled")
            if episode.task is not None:
                self._loop.call(episode.task.cancel)
        for episode in list(self._waiting.values()):
            self._discard(episode, "oversampled")

    def _discard(self, episode: Episode, reason: str) -> None:
        del self._waiting[episode.number]
        self.gate.discard()
        self.ledger.move(episode.prompt, "dropped", reason)

    def _pack(self, episodes: Sequence[Episode], waited_s: float) -> TensorDict:
        assert self._engine is not None
        version = self._engine.version.number
        self.last_groups = tuple(episode.group for episode in episodes if episode.group is not None)
        batch = collate(self.last_groups, version=version, max_head_offpolicyness=self._eta)
        self._metrics |= batch_metrics(self.last_groups, batch, version=version) | {"time/wait_s": waited_s}
        return batch

    def _describe(self) -> str:
        """Where everything is, for errors."""
        ages = [time.monotonic() - episode.started for episode in self._running.values()]
        oldest = f", the oldest for {max(ages):.1f} s" if ages else ""
        failures = f"; last failures: {'; '.join(self._failures)}" if self._failures else "; no failures"
        gate = self.gate
        return f"running {gate.running}{oldest}, waiting {gate.waiting}, taken {gate.taken}{failures}"


def _settled(episode: Episode, running: Mapping[int, Episode]) -> bool:
    return episode.number not in running or (episode.engine is not None and episode.engine.settled)


def _has_expired(episode: Episode, oldest: int) -> bool:
    group = episode.group
    return group is not None and any(bool(expired(t, oldest).any()) for s in group.samples for t in s.trajectories)
