"""The book of all episodes: which of them may start, run, wait, and are taken for a batch, and what became of the others.

Plain bookkeeping without threads, locks or waiting: `tandem.rollout.pool` runs the episodes, and calls it under its lock.
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tandem.api.failures import DataFailure, EngineDied, EpisodeFailure
from tandem.api.samples import Dropped, Group
from tandem.api.workflow import RolloutWorkflow
from tandem.config.data import EPOCH, INDEX
from tandem.config.rollout import RolloutConfig
from tandem.rollout.episodes import Episode
from tandem.rollout.failure_budget import FailureBudget, NoBatch
from tandem.rollout.gate import StalenessGate
from tandem.rollout.ledger import NO_EPOCH, Ledger, PromptId

Row = Mapping[str, Any]
GroupFilter = Callable[[Group], tuple[bool, str]]
"""``group -> (keep, reason)``; a group that is not kept is dropped as ``filter/<reason>``."""

GroupObserver = Callable[[Group], None]
"""Called with each group once, when it enters a batch or is dropped: from then on it is never made again."""

MAX_DROPPED = 256
"""Dropped prompts that are remembered for the record of the step; all are counted."""

logger = logging.getLogger("tandem.rollout")


class EpisodeBook:
    """An episode is *running* from `admit` until it `ended`, *waiting* with its group until `take`, and *taken* until
    `end_step`; or it is dropped on the way. The gate and the ledger count the same, and are compared each step."""

    def __init__(
        self,
        config: RolloutConfig,
        max_head_offpolicyness: int,
        *,
        group_filter: GroupFilter | None,
        max_draws: int,
        observer: GroupObserver | None,
        judges_later: Callable[[], bool],
        version: Callable[[], int],
        stop: Callable[[Episode], None],
    ):
        """``judges_later``: says whether groups wait for rewards that need a model, and are filtered behind them.
        ``version``: number of the engine's weights. ``stop``: ends an episode that is under way."""
        self._config, self._filter, self._observer, self._judges_later = config, group_filter, observer, judges_later
        self._version, self._stop = version, stop
        batch_size = math.ceil(config.batch_size * config.oversample)
        self.gate, self.ledger = StalenessGate(batch_size, max_head_offpolicyness, config.max_concurrent), Ledger()
        self._budget = FailureBudget(config.max_data_failures, config.batch_size, max_draws)
        self._submitted: deque[tuple[Row, RolloutWorkflow]] = deque()
        self._source: tuple[Iterator[Row], RolloutWorkflow] | None = None
        self._again: deque[PromptId] = deque()  # of the source, before its next rows: under way when a run was cut off
        self._begun_again = 0  # such prompts since the start
        self.running: dict[int, Episode] = {}
        self.waiting: dict[int, Episode] = {}  # in order of arrival
        self._taken: list[Episode] = []  # of steps that have not ended
        self._count = 0  # episodes since the start
        self.wanted = 0  # groups that the caller is waiting for
        self.broken: Exception | None = None
        self._dropped: deque[Dropped] = deque(maxlen=MAX_DROPPED)

    # ------------------------------------------------------------------ starting

    def submit(self, rows: Sequence[Row], workflow: RolloutWorkflow) -> None:
        """Queues one episode on each row."""
        self._submitted.extend((row, workflow) for row in rows)

    def draw_from(self, loader: Iterator[Row], workflow: RolloutWorkflow) -> None:
        """Rows that follow when no submitted ones are left."""
        self._source = (loader, workflow)

    @property
    def may_start(self) -> bool:
        """True if the gate is open and rows may be left."""
        return bool(self.gate.capacity() and (self._submitted or self._source))

    def admit(self) -> list[Episode]:
        """Registers as many episodes as the gate admits; they do not run yet."""
        episodes: list[Episode] = []
        if self.broken is not None:
            return episodes
        # read once, so that all episodes of one call begin with the same version
        version = self._version()
        for _ in range(self.gate.capacity()):
            item = self._next()
            if item is None:
                break
            row, workflow = item
            # the ledger first: it raises for a prompt that would be used twice, before the gate has counted it
            prompt = PromptId.of(row, self._count)
            self.ledger.move(prompt, "running")
            self.gate.submit()
            episode = Episode(self._count, prompt, row, workflow, version)
            self.running[self._count] = episode
            self._count += 1
            episodes.append(episode)
        return episodes

    def _next(self) -> tuple[Row, RolloutWorkflow] | None:
        """The episode that starts next; rows of a loader only while someone waits, or training is asynchronous."""
        if self._submitted:
            return self._submitted.popleft()
        # Synchronous training draws rows only for a batch that is wanted, so that a checkpoint has no prompts under way.
        if self._source is None or not (self.wanted or self.gate.max_head_offpolicyness):
            return None
        rows, workflow = self._source
        dataset = getattr(rows, "dataset", None)
        if self._again:
            prompt = self._again.popleft()
            assert dataset is not None, "prompts that begin anew are those of a loader's data set"
            row: Row | None = {**dataset.rows[prompt.index], EPOCH: prompt.epoch, INDEX: prompt.index}
        else:
            row = next(rows, None)
        if row is None:
            self._source = None
            return None
        if dataset is not None and EPOCH in row:
            self.ledger.begin_epoch(row[EPOCH], getattr(rows, "epoch_size", len(dataset)))
        return row, workflow

    # ------------------------------------------------------------------ ending

    def ended(self, episode: Episode, outcome: Group | EpisodeFailure) -> None:
        """A running episode has its group, which waits to be taken, or there is none. Where a model's rewards are to come,
        the candidates of a batch are judged later."""
        if isinstance(outcome, EpisodeFailure):
            self._failed(episode, outcome)
            return
        # failures count in a row: one success shows that the machines are well
        self._budget.restore("infrastructure")
        del self.running[episode.number]
        episode.group = outcome
        self.waiting[episode.number] = episode
        self.gate.finish()
        self.ledger.move(episode.prompt, "waiting")
        if not self._judges_later():
            self.judge(episode, outcome)

    def judge(self, episode: Episode, outcome: Group | DataFailure) -> None:
        """All rewards of a waiting group are there, or could not be had: it goes on waiting, or is dropped."""
        if isinstance(outcome, DataFailure):
            self._failed(episode, outcome)
            return
        self._budget.beginning.well()
        failed, n = len(outcome.failures), len(outcome.failures) + len(outcome.samples)
        if 2 * failed > n:  # it may be trained on (rollout.min_group_size), and yet the judge or the data is at fault
            self._budget.remember(episode.prompt, f"{failed} of {n} samples failed: {dict(Counter(outcome.failures))}")
            self.broken = self.broken or self._budget.spend("data")
        else:
            self._budget.restore("data")
        episode.group, episode.judged = outcome, True
        keep, reason = (True, "") if self._filter is None else self._filter(outcome)
        if not keep:
            self._discard(episode, f"filter/{reason}")
            kept = sum(episode.judged for episode in self.waiting.values())
            error = self._budget.turn_down(reason, kept, self.wanted)
            if self._judges_later() or self.wanted > kept:  # else the batch is full already
                self.broken = self.broken or error

    def _failed(self, episode: Episode, failure: EpisodeFailure) -> None:
        """There is no group: its episode failed, or its rewards did."""
        message = self._budget.remember(episode.prompt, str(failure))
        # not the prompt's fault: it is pending again, and a resumed run trains it
        if isinstance(failure, EngineDied):
            self.broken = self.broken or failure
            self._leave(episode, None)
            return
        if failure.reason not in self.ledger.dropped:
            logger.warning("an episode was dropped (%s)", message)
            logger.info("cause", exc_info=failure)  # to log.txt
        self._leave(episode, failure.reason, str(failure))
        self.ledger.failed_samples.update(failure.failed_samples)
        self.broken = self.broken or self._budget.lose(failure)

    def _settle(self, episode: Episode) -> None:
        """The group enters a batch or is dropped; from now on it counts."""
        assert episode.group is not None, "it waits, so it has finished"
        self.ledger.failed_samples.update(episode.group.failures)
        # only now: metrics must count each group once, and a group that is scored again would count twice
        if self._observer is not None:
            self._observer(episode.group)

    def _discard(self, episode: Episode, reason: str) -> None:
        """A finished group is dropped before it is consumed."""
        self._settle(episode)
        self._leave(episode, reason)

    def _abort(self, episode: Episode, reason: str | None) -> None:
        episode.aborted = True
        self._leave(episode, reason)
        self._stop(episode)

    def _leave(self, episode: Episode, reason: str | None, words: str = "") -> None:
        """The episode goes without a batch: its prompt is dropped for this reason, or without one pending again."""
        if self.running.pop(episode.number, None) is not None:
            self.gate.drop()
        else:
            del self.waiting[episode.number]
            self.gate.discard()
        self.ledger.move(episode.prompt, "dropped" if reason else "pending", reason or "")
        if reason:
            self._dropped.append(episode.dropped(reason, words))

    def begin_again(self) -> None:
        """Episodes that are not judged whole are queued again."""
        for _, episode in sorted({**self.running, **self.waiting}.items()):
            if not episode.judged:
                self._abort(episode, None)
                self._submitted.append((episode.row, episode.workflow))

    def abort_running(self) -> None:
        """All that runs is stopped; its prompts are pending again."""
        for episode in list(self.running.values()):
            self._abort(episode, None)

    # ------------------------------------------------------------------ taking

    def choose(self, count: int) -> list[Episode] | None:
        """The oldest groups, as `on_expiry` says; with `oversample` those that finished first. None: too few."""
        eta = self.gate.max_head_offpolicyness
        # the oldest version that a group of this batch may have begun with
        oldest = self._version() - eta
        if self._config.on_expiry == "drop":
            for episode in [e for e in self.waiting.values() if e.has_expired(oldest)]:
                self._discard(episode, "expired")
        # A running episode this old expires with the next version: take no younger group before it has ended.
        if self._config.on_expiry == "wait" and eta and any(e.version <= oldest for e in self.running.values()):
            return None
        if len(self.waiting) < count:
            return None
        if self._config.oversample > 1:
            # chosen by arrival, but ordered by number, so that the batch does not depend on the race itself
            return sorted(list(self.waiting.values())[:count], key=lambda episode: episode.number)
        return self._oldest(count)

    def _oldest(self, count: int) -> list[Episode]:
        return [self.waiting[number] for number in sorted(self.waiting)[:count]]

    def give_up(self, count: int, *, partial: bool) -> list[Episode]:
        """Nothing runs and nothing can start: the smaller batch that will do as well (``partial``).

        Raises:
            NoBatch: there is none; says why.
        """
        if partial and self.waiting and not self._submitted:
            return self._oldest(count)
        # Taken groups keep the gate shut until `end_step`; waiting for more would never end.
        if self._taken and not self.gate.capacity():
            raise NoBatch(f"call end_step() after each batch: the last one is still being trained on; {self.describe()}")
        if not self.gate.capacity():
            raise NoBatch(f"{count} groups are more than the staleness gate ever admits; {self.describe()}")
        raise NoBatch(f"the data ended with {len(self.waiting)} of {count} groups; {self.describe()}")

    def take(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """These episodes enter a batch. Returns metrics: the number of the others."""
        left = float(len(self.waiting) - len(episodes))
        metrics = {"episodes/running": float(len(self.running)), "episodes/waiting": left}
        for episode in episodes:
            del self.waiting[episode.number]
            self._settle(episode)
            self.gate.consume()
            self.ledger.move(episode.prompt, "taken")
        self._taken += episodes
        # a batch was filled, so the filter leaves enough
        self._budget.filtered.clear()
        if self._config.oversample > 1:  # the others lost the race
            for episode in list(self.running.values()):
                self._abort(episode, "oversampled")
            for episode in list(self.waiting.values()):
                self._discard(episode, "oversampled")
        return metrics

    def end_step(self) -> None:
        """Ends the step: the episodes that were taken are trained, and make room for others."""
        for episode in self._taken:
            self.ledger.move(episode.prompt, "trained")
        self._taken = []
        self.gate.end_step()
        self.ledger.check(self.gate)

    # ------------------------------------------------------------------ telling

    def take_dropped(self) -> tuple[Dropped, ...]:
        """Takes the dropped prompts, the newest `MAX_DROPPED`."""
        dropped, self._dropped = tuple(self._dropped), deque(maxlen=MAX_DROPPED)
        return dropped

    def counts(self) -> dict[str, float]:
        """Episodes and failed samples since the start, as metrics."""
        counts = {"episodes/trained": float(self.ledger.total("trained"))}
        counts |= {f"episodes/dropped/{reason}": float(n) for reason, n in self.ledger.dropped.items()}
        counts |= {f"samples/failed/{reason}": float(n) for reason, n in self.ledger.failed_samples.items()}
        return counts | ({"episodes/begun_again": float(self._begun_again)} if self._begun_again else {})

    def describe(self) -> str:
        """The place of every episode in words, for errors."""
        ages = [time.monotonic() - episode.started for episode in self.running.values()]
        oldest = f", the oldest for {max(ages):.1f} s" if ages else ""
        gate = self.gate
        return f"running {gate.running}{oldest}, waiting {gate.waiting}, taken {gate.taken}; {self._budget.describe()}"

    def state_dict(self) -> dict[str, Any]:
        """The state: counters, and the prompts of a data set that have begun and not ended."""
        # Also groups that wait: their tokens are not saved, so their prompts must begin again.
        begun = {**self.running, **self.waiting}
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
        self._count = int(state["count"])
        self._budget.load_state_dict(state)
        self.ledger.failed_samples = Counter(state.get("failed_samples", {}))
        self._again = deque(PromptId(int(epoch), int(index)) for epoch, index in state["again"])
        self._begun_again = int(state.get("begun_again", 0)) + len(self._again)
        if self._again:
            logger.info("%d episodes that were under way when the checkpoint was written begin anew", len(self._again))
        for epoch, size in state["sizes"]:
            self.ledger.begin_epoch(int(epoch), int(size))
