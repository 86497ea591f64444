"""The episodes under way: started as the staleness gate admits, ended with a group or a reason."""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tandem.api.activity import GENERATING, did
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, EngineDied, EpisodeFailure, InfrastructureFailure, TandemError
from tandem.api.samples import Group
from tandem.api.workflow import RolloutWorkflow
from tandem.config.rollout import RolloutConfig
from tandem.rollout.episodes import Episode, run_episode
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.gate import StalenessGate
from tandem.rollout.ledger import Ledger, Prompt

Row = Mapping[str, Any]
GroupFilter = Callable[[Group], tuple[bool, str]]
"""``group -> (keep, reason)``; a group that is not kept is dropped as ``filter/<reason>``."""

GroupObserver = Callable[[Group], None]
"""Called with each group once, when it enters a batch or is dropped: from then on it is never made again."""

logger = logging.getLogger("tandem.rollout")

NO_EPOCH = -2
"""Epoch of rows that bring no ``epoch`` and ``index``; they are numbered as they come. (-1 is evaluation's.)"""


class NoBatch(TandemError, RuntimeError):
    """No batch can be made any more: the data ended, a filter keeps too little, or too many episodes failed."""


class EpisodePool:
    """What is queued, running and waiting, with the gate and the ledger that count it.

    Everything here is guarded by ``changed``, whose waiters are woken when there may be something for them. Methods are
    called with it held, but for those that run on the loop and say so. ``deterministic``: the caller alone starts episodes.
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
        judges_later: bool = False,
    ):
        """``judges_later``: groups wait for rewards that need a model, and are filtered behind them (`judge`)."""
        self._engine, self._config, self._seed, self._deterministic = engine, config, seed, deterministic
        self._filter, self._max_draws, self._observer = group_filter, max_draws, observer
        self._judges_later = judges_later
        self.gate, self.ledger, self.loop = gate, Ledger(), BackgroundLoop()
        self.changed = threading.Condition()
        self.submitted: deque[tuple[Row, RolloutWorkflow]] = deque()
        self.source: tuple[Iterator[Row], RolloutWorkflow] | None = None
        self.again: deque[Prompt] = deque()  # of the source, before its next rows: under way when a run was cut off
        self.running: dict[int, Episode] = {}
        self.waiting: dict[int, Episode] = {}  # in order of arrival
        self.wanted = 0  # groups that a caller is waiting for
        self.filtered: Counter[str] = Counter()  # since the last batch
        self.broken: Exception | None = None
        self._count = 0
        self._in_a_row = {"data": 0, "infrastructure": 0}
        self._failures: deque[tuple[str, str]] = deque(maxlen=5)  # which prompt, and why

    # ------------------------------------------------------------------ starting

    def _next(self) -> tuple[Row, RolloutWorkflow] | None:
        """What starts next; rows of a loader only while someone waits, or training is asynchronous."""
        if self.submitted:
            return self.submitted.popleft()
        if self.source is None or not (self.wanted or self.gate.max_head_offpolicyness):
            return None
        rows, workflow = self.source
        try:
            row = self._once_more(rows) if self.again else next(rows)
        except StopIteration:
            self.source = None
            return None
        dataset = getattr(rows, "dataset", None)
        if dataset is not None and "epoch" in row:
            self.ledger.begin_epoch(row["epoch"], getattr(rows, "epoch_size", len(dataset)))
        return row, workflow

    def _once_more(self, rows: Any) -> Row:
        prompt = self.again.popleft()
        return {**rows.dataset.rows[prompt.index], "epoch": prompt.epoch, "index": prompt.index}

    def admit(self) -> list[Episode]:
        """Registers as many episodes as the gate admits; they do not run yet."""
        assert self._engine is not None, "ranks other than 0 have no engine; episodes start on rank 0"
        episodes: list[Episode] = []
        if self.broken is not None:
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
            self.running[self._count] = episode
            self._count += 1
            episodes.append(episode)
        return episodes

    def pump(self) -> None:
        """Starts what the gate admits."""
        episodes = self.admit()
        if episodes:
            self.loop.call(self.spawn, episodes)

    def spawn(self, episodes: Sequence[Episode]) -> None:
        """Runs episodes that were admitted. On the loop."""
        loop = asyncio.get_running_loop()
        for episode in episodes:
            if not episode.aborted:
                episode.task = loop.create_task(self._run(episode))

    def state_dict(self) -> dict[str, Any]:
        """See `tandem.api.state.Stateful`: counters, and which prompts of a data set have begun and not ended. With
        ``changed`` held."""
        begun = {**self.running, **self.waiting}
        unfinished = [*(begun[number].prompt for number in sorted(begun)), *self.ledger.pending(), *self.again]
        return {
            "count": self._count,
            "in_a_row": dict(self._in_a_row),
            "filtered": dict(self.filtered),
            "failed_samples": dict(self.ledger.failed_samples),
            "again": [[p.epoch, p.index] for p in unfinished if p.epoch != NO_EPOCH],
            "sizes": [[epoch, size] for epoch, size in self.ledger.sizes.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first episode, with ``changed`` held. What ended is the ledger's to know."""
        self._count, self.filtered = int(state["count"]), Counter(state["filtered"])
        self._in_a_row = {kind: int(state["in_a_row"][kind]) for kind in self._in_a_row}
        self.ledger.failed_samples = Counter(state.get("failed_samples", {}))
        self.again = deque(Prompt(int(epoch), int(index)) for epoch, index in state["again"])
        for epoch, size in state["sizes"]:
            self.ledger.begin_epoch(int(epoch), int(size))

    # ------------------------------------------------------------------ ending

    async def _run(self, episode: Episode) -> None:
        """On the loop."""
        assert self._engine is not None
        config = self._config
        try:
            group = await run_episode(
                episode,
                self._engine,
                seed=self._seed,
                timeout_s=config.episode_timeout_s,
                max_retries=config.max_retries,
                on_issue=self.notify if self._deterministic else None,
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
        did(*GENERATING)
        try:
            with self.changed:
                if episode.number not in self.running:  # it was aborted meanwhile
                    return
                if isinstance(outcome, EpisodeFailure):
                    self._failed(episode, outcome)
                else:
                    self._finished(episode, outcome)
                if not self._deterministic:
                    self.pump()
                # Waking the caller costs more than an episode: only when there may be something for it.
                full = self.wanted and len(self.waiting) >= self.wanted
                if full or not self.running or self.broken or self._deterministic or self._config.on_expiry != "mask":
                    self.changed.notify_all()
        except Exception as error:  # the worker boundary: a filter or a loader that raised must reach whoever waits
            self._break(error)

    def _finished(self, episode: Episode, group: Group) -> None:
        self._in_a_row["infrastructure"] = 0
        if not self._judges_later:
            self._count_failed(episode, group)
        keep, reason = (True, "") if self._judges_later else self._verdict(group)
        if keep:
            del self.running[episode.number]
            episode.group, episode.judged = group, not self._judges_later
            self.waiting[episode.number] = episode
            self.gate.finish()
            self.ledger.move(episode.prompt, "waiting")
        else:
            self.settle(group)
            self.leave(episode, "dropped", f"filter/{reason}")
            self._turned_down(reason)

    def judge(self, episode: Episode, outcome: Group | DataFailure) -> None:
        """The rewards that need a model are there, or could not be had: the group goes on waiting, or is dropped."""
        if isinstance(outcome, DataFailure):
            self._remember(episode, str(outcome))
            if outcome.reason not in self.ledger.dropped:
                logger.warning("an episode was dropped (%s)", ": ".join(self._failures[-1]))
            self.ledger.failed_samples.update(outcome.failed_samples)
            self.discard(episode, outcome.reason, counts=False)
            self._spend("data")
            return
        self._count_failed(episode, outcome)
        episode.group, episode.judged = outcome, True
        keep, reason = self._verdict(outcome)
        if not keep:
            self.discard(episode, f"filter/{reason}")
            self._turned_down(reason)

    def _count_failed(self, episode: Episode, group: Group) -> None:
        """A group stands: it ends a row of data failures, unless it lost most of its samples."""
        failed, n = len(group.failures), len(group.failures) + len(group.samples)
        if 2 * failed > n:  # it may be trained on (rollout.min_group_size), and yet the judge or the data is at fault
            self._remember(episode, f"{failed} of {n} samples failed: {dict(Counter(group.failures))}")
            self._spend("data")
        else:
            self._in_a_row["data"] = 0

    def _verdict(self, group: Group) -> tuple[bool, str]:
        return (True, "") if self._filter is None else self._filter(group)

    def _turned_down(self, reason: str) -> None:
        """One more group was dropped by the filter; too many of them end the run."""
        self.filtered[reason] += 1
        kept = sum(episode.judged for episode in self.waiting.values())
        drawn, most = self.filtered.total() + kept, self._max_draws * self._config.batch_size
        needed = self.wanted or self._config.batch_size
        if self.broken is None and (self._judges_later or self.wanted > kept) and drawn >= most:
            self.broken = NoBatch(
                f"the filter of groups kept {kept} of {drawn} groups, and {needed} are needed; "
                f"at most {self._max_draws} × rollout.batch_size are drawn for a batch. Turned down: "
                f"{dict(self.filtered)}. Use easier or harder prompts, or another algorithm.filter"
            )

    def _failed(self, episode: Episode, failure: EpisodeFailure) -> None:
        self._remember(episode, str(failure))
        if isinstance(failure, EngineDied):
            self.broken = self.broken or failure
            self.leave(episode, "pending")
            return
        if failure.reason not in self.ledger.dropped:
            logger.warning("an episode was dropped (%s)", ": ".join(self._failures[-1]), exc_info=failure)
        self.leave(episode, "dropped", failure.reason)
        self.ledger.failed_samples.update(failure.failed_samples)
        self._spend("infrastructure" if isinstance(failure, InfrastructureFailure) else "data")

    def _remember(self, episode: Episode, failure: str) -> None:
        self._failures.append((f"prompt {episode.prompt.index} of epoch {episode.prompt.epoch}", failure))

    def _last_failures(self) -> str:
        """Each reason once, with the prompt that it befell first."""
        first = {why: prompt for prompt, why in reversed(self._failures)}
        counts = Counter(why for _, why in self._failures)
        more = {why: f" (and {count - 1} more by the same)" if count > 1 else "" for why, count in counts.items()}
        return "; ".join(f"{first[why]}: {why}{more[why]}" for why in counts)

    def _spend(self, kind: str) -> None:
        """One more in a row of the budget of ``data`` or of ``infrastructure`` failures."""
        self._in_a_row[kind] += 1
        if self._in_a_row[kind] >= self._config.max_data_failures:
            self.broken = self.broken or NoBatch(
                f"{self._in_a_row[kind]} episodes in a row were dropped, or lost most of their samples, by {kind} failures "
                f"(rollout.max_data_failures); the last: {self._last_failures()}"
            )

    def settle(self, group: Group) -> None:
        """The group enters a batch or is dropped; from now on it counts."""
        self.ledger.failed_samples.update(group.failures)
        if self._observer is not None:
            self._observer(group)

    def leave(self, episode: Episode, state: str, reason: str = "") -> None:
        """Out of `running` without a group."""
        del self.running[episode.number]
        self.gate.drop()
        self.ledger.move(episode.prompt, "dropped" if state == "dropped" else "pending", reason)

    def _break(self, error: Exception) -> None:
        with self.changed:
            self.broken = self.broken or error
            self.changed.notify_all()

    def notify(self) -> None:
        """Wakes the waiters. On the loop."""
        with self.changed:
            self.changed.notify_all()

    def discard(self, episode: Episode, reason: str, *, counts: bool = True) -> None:
        """A finished group is dropped before it is consumed. ``counts``: its samples enter the figures of the run."""
        del self.waiting[episode.number]
        assert episode.group is not None, "it waits, so it has finished"
        if counts:
            self.settle(episode.group)
        self.gate.discard()
        self.ledger.move(episode.prompt, "dropped", reason)

    def abort(self, episode: Episode, reason: str | None) -> None:
        """Stops an episode; without a reason its prompt is pending again."""
        episode.aborted = True
        self.leave(episode, "dropped" if reason else "pending", reason or "")
        if episode.task is not None:
            self.loop.call(episode.task.cancel)

    def describe(self) -> str:
        """Where everything is, for errors."""
        ages = [time.monotonic() - episode.started for episode in self.running.values()]
        oldest = f", the oldest for {max(ages):.1f} s" if ages else ""
        failures = f"; last failures: {self._last_failures()}" if self._failures else "; no failures"
        gate = self.gate
        return f"running {gate.running}{oldest}, waiting {gate.waiting}, taken {gate.taken}{failures}"
