"""Bookkeeping of all episodes: which may start, run, wait, or are taken for a batch, and why the others were dropped.

Has no threads, locks or waits: `tandem.rollout.episode_pool` runs the episodes and calls this module while it holds its
lock. The `FailureBudget` limits failed episodes, and names the failures.
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tandem.api.failures import BROKEN, DataFailure, EngineDied, EpisodeFailure, InfrastructureFailure
from tandem.api.workflow import Dropped, Group, RolloutWorkflow
from tandem.config.data import EPOCH, INDEX
from tandem.config.errors import TandemError
from tandem.config.rollout import RolloutConfig
from tandem.rollout.episodes import Episode
from tandem.rollout.gate import NO_EPOCH, Ledger, PromptId, StalenessGate

logger = logging.getLogger("tandem.rollout")

NUM_REMEMBERED = 5
"""Number of failed episodes that are kept for error messages."""

EARLY_GROUPS = 3
"""Number of first groups that must all fail in the user's code to end the run early."""

REMEDY = "Mend it and start again; `tandem check-reward REWARD DATA` tries a reward alone, and log.txt has the whole trace"


class NoBatch(TandemError, RuntimeError):
    """No further batch is possible: the data ended, the filter keeps too few groups, or too many episodes failed."""


class Beginning:
    """Ends a run early if its first ``most`` groups or samples (``what``) all fail for `BROKEN` reasons, which would fail
    every time. Failures for other reasons do not count, and after the first success no failure does."""

    def __init__(self, most: int, what: str):
        self._remaining, self._what = most, f"the first {most} {what}"

    def succeed(self) -> None:
        """Records a success: from now on no failure ends the run early."""
        self._remaining = 0

    def lose(self, reasons: Iterable[str], words: str) -> NoBatch | None:
        """Records the failure of a whole group or sample, with its reasons. Returns the error that ends the run, or None."""
        if not self._remaining or not BROKEN.issuperset(reasons):
            return None
        self._remaining -= 1
        return None if self._remaining else NoBatch(f"{self._what} all failed, so the next would too: {words}. {REMEDY}")


class FailureBudget:
    """Decides when a run cannot continue: after too many consecutive failures of one kind (``data`` or ``infrastructure``),
    or when the group filter rejects so many groups that one batch needs more than ``max_draws`` times the groups of a
    batch."""

    def __init__(self, max_in_a_row: int, batch_size: int, max_draws: int):
        self._max_in_a_row, self._batch_size, self._max_draws = max_in_a_row, batch_size, max_draws
        self._in_a_row = {"data": 0, "infrastructure": 0}
        self.beginning = Beginning(EARLY_GROUPS, "groups")
        self.filtered: Counter[str] = Counter()  # since the last batch
        self._last: deque[tuple[str, str]] = deque(maxlen=NUM_REMEMBERED)  # (prompt, reason)

    def remember(self, prompt: PromptId, reason: str) -> str:
        """Keeps a failure for error messages. Returns its text with the prompt's name."""
        self._last.append((f"prompt {prompt.index} of epoch {prompt.epoch}", reason))
        return ": ".join(self._last[-1])

    def spend(self, kind: str) -> NoBatch | None:
        """Counts one more consecutive failure of this kind. Returns the error that ends the run if there are too many, else
        None."""
        self._in_a_row[kind] += 1
        if self._in_a_row[kind] < self._max_in_a_row:
            return None
        return NoBatch(
            f"{self._in_a_row[kind]} episodes in a row were dropped, or lost most of their samples, by {kind} failures "
            f"(rollout.max_data_failures); the last: {self._named()}"
        )

    def lose(self, failure: EpisodeFailure) -> NoBatch | None:
        """Counts a failed group. Returns the error that ends the run, or None."""
        if failure.num_left:
            self.beginning.succeed()
        early = self.beginning.lose((failure.reason, *failure.failed_samples), f"{failure.reason}: {failure.words}")
        return early or self.spend("infrastructure" if isinstance(failure, InfrastructureFailure) else "data")

    def restore(self, kind: str) -> None:
        """Resets the count of consecutive failures of this kind, after a success."""
        self._in_a_row[kind] = 0

    def turn_down(self, reason: str, kept: int, wanted: int) -> NoBatch | None:
        """Counts one more group that the filter rejected. Returns the error that ends the run if too many were drawn, else
        None."""
        self.filtered[reason] += 1
        drawn = self.filtered.total() + kept
        if drawn < self._max_draws * self._batch_size:
            return None
        return NoBatch(
            f"the filter of groups kept {kept} of {drawn} groups, and {wanted or self._batch_size} are needed; "
            f"at most {self._max_draws} × rollout.batch_size are drawn for a batch. Turned down: "
            f"{dict(self.filtered)}. Use easier or harder prompts, or another algorithm.filter"
        )

    def describe(self) -> str:
        """Describes the last failures, for error messages."""
        return f"last failures: {self._named()}" if self._last else "no failures"

    def _named(self) -> str:
        """Returns each of the last failure messages once, with the first prompt that failed with it."""
        first = {why: prompt for prompt, why in reversed(self._last)}
        counts = Counter(why for _, why in self._last)
        repeats = {
            why: f" (and {count - 1} more prompts with the same failure)" if count > 1 else ""
            for why, count in counts.items()
        }
        return "; ".join(f"{first[why]}: {why}{repeats[why]}" for why in counts)

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts. The kept messages are not saved."""
        return {"in_a_row": dict(self._in_a_row), "filtered": dict(self.filtered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the counts. Must be called before the first episode."""
        self._in_a_row = {kind: int(state["in_a_row"][kind]) for kind in self._in_a_row}
        self.filtered = Counter(state["filtered"])


Row = Mapping[str, Any]
GroupFilter = Callable[[Group], tuple[bool, str]]
"""``group -> (keep, reason)``; a group that is not kept is dropped as ``filter/<reason>``."""

GroupObserver = Callable[[Group], None]
"""Called once with each group, when the group enters a batch or is dropped; its episode is never repeated after that
call."""

MAX_DROPPED = 256
"""Maximum number of dropped prompts kept for the record of a step; the counters cover all of them."""


class EpisodeBook:
    """Tracks episodes. An episode is *running* from `admit` to `ended`, *waiting* with its group until `take`, and *taken*
    until `end_step`, unless it is dropped. The gate and the ledger keep counts of their own; after each step these are
    compared with each other."""

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
        """``judges_later``: returns True while groups must wait for the rewards of a model before they are filtered.
        ``version``: returns the version of the engine's weights. ``stop``: ends a running episode."""
        self._config, self._filter, self._observer, self._judges_later = config, group_filter, observer, judges_later
        self._version, self._stop = version, stop
        batch_size = math.ceil(config.batch_size * config.oversample)
        self.gate, self.ledger = StalenessGate(batch_size, max_head_offpolicyness, config.max_concurrent), Ledger()
        self._budget = FailureBudget(config.max_data_failures, config.batch_size, max_draws)
        self._submitted: deque[tuple[Row, RolloutWorkflow]] = deque()
        self._source: tuple[Iterator[Row], RolloutWorkflow] | None = None
        self._again: deque[PromptId] = deque()  # prompts unfinished at the checkpoint; they precede the source's next rows
        self._begun_again = 0  # number of such prompts since the start
        self.running: dict[int, Episode] = {}
        self.waiting: dict[int, Episode] = {}  # in order of arrival
        self._taken: list[Episode] = []  # episodes of steps that have not ended
        self._count = 0  # number of episodes since the start
        self.wanted = 0  # number of groups that the caller is waiting for
        self.broken: Exception | None = None
        self._dropped: deque[Dropped] = deque(maxlen=MAX_DROPPED)

    # ------------------------------------------------------------------ starting

    def submit(self, rows: Sequence[Row], workflow: RolloutWorkflow) -> None:
        """Queues one episode for each row."""
        self._submitted.extend((row, workflow) for row in rows)

    def draw_from(self, loader: Iterator[Row], workflow: RolloutWorkflow) -> None:
        """Sets the loader whose rows are used when no submitted rows are left."""
        self._source = (loader, workflow)

    @property
    def may_start(self) -> bool:
        """True if the gate is open and there may be rows left."""
        return bool(self.gate.capacity() and (self._submitted or self._source))

    def admit(self) -> list[Episode]:
        """Registers as many episodes as the gate admits, and returns them. The caller starts them."""
        episodes: list[Episode] = []
        if self.broken is not None:
            return episodes
        # read once, so that all episodes of one call start with the same version
        version = self._version()
        for _ in range(self.gate.capacity()):
            item = self._next()
            if item is None:
                break
            row, workflow = item
            # the ledger first: it raises for a prompt used twice, and then the gate must not have counted the episode
            prompt = PromptId.of(row, self._count)
            self.ledger.move(prompt, "running")
            self.gate.submit()
            episode = Episode(self._count, prompt, row, workflow, version)
            self.running[self._count] = episode
            self._count += 1
            episodes.append(episode)
        return episodes

    def _next(self) -> tuple[Row, RolloutWorkflow] | None:
        """Returns the row and workflow of the next episode, or None. In synchronous training it draws rows of a loader only
        while a caller waits for a batch."""
        if self._submitted:
            return self._submitted.popleft()
        # Synchronous training draws rows only while a batch is waited for, so that a checkpoint has no unfinished prompts.
        if self._source is None or not (self.wanted or self.gate.max_head_offpolicyness):
            return None
        rows, workflow = self._source
        dataset = getattr(rows, "dataset", None)
        if self._again:
            prompt = self._again.popleft()
            assert dataset is not None, "only prompts of a loader's data set can start again"
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
        """Records the end of a running episode: its group waits to be taken, or its failure is counted. A group that still
        lacks rewards of a model is judged later, when a batch is chosen."""
        if isinstance(outcome, EpisodeFailure):
            self._failed(episode, outcome)
            return
        # only consecutive failures count: one success shows that the machines work
        self._budget.restore("infrastructure")
        del self.running[episode.number]
        episode.group = outcome
        self.waiting[episode.number] = episode
        self.gate.finish()
        self.ledger.move(episode.prompt, "waiting")
        if not self._judges_later():
            self.judge(episode, outcome)

    def judge(self, episode: Episode, outcome: Group | DataFailure) -> None:
        """Records that all rewards of a waiting group are computed, or that they failed. Keeps or drops the group."""
        if isinstance(outcome, DataFailure):
            self._failed(episode, outcome)
            return
        self._budget.beginning.succeed()
        failed, n = len(outcome.failures), len(outcome.failures) + len(outcome.samples)
        if 2 * failed > n:  # the group may still be large enough to train on, but the judge or the data is at fault
            self._budget.remember(episode.prompt, f"{failed} of {n} samples failed: {dict(Counter(outcome.failures))}")
            self.broken = self.broken or self._budget.spend("data")
        else:
            self._budget.restore("data")
        episode.group, episode.judged = outcome, True
        keep, reason = (True, "") if self._filter is None else self._filter(outcome)
        if not keep:
            self._discard(episode, f"filter/{reason}")
            num_judged = sum(episode.judged for episode in self.waiting.values())
            error = self._budget.turn_down(reason, num_judged, self.wanted)
            if self._judges_later() or self.wanted > num_judged:  # otherwise the batch is already full
                self.broken = self.broken or error

    def _failed(self, episode: Episode, failure: EpisodeFailure) -> None:
        """Records that an episode has no group because the episode or its rewards failed."""
        message = self._budget.remember(episode.prompt, str(failure))
        # not the prompt's fault: the prompt becomes pending again, and a resumed run trains it
        if isinstance(failure, EngineDied):
            self.broken = self.broken or failure
            self._leave(episode, None)
            return
        if failure.reason not in self.ledger.dropped:
            logger.warning("an episode was dropped (%s)", message)
            logger.info("cause", exc_info=failure)  # into log.txt only
        self._leave(episode, failure.reason, str(failure))
        self.ledger.failed_samples.update(failure.failed_samples)
        self.broken = self.broken or self._budget.lose(failure)

    def _settle(self, episode: Episode) -> None:
        """Counts a group that enters a batch or is dropped, and passes it to the observer."""
        assert episode.group is not None, "a waiting episode has finished"
        self.ledger.failed_samples.update(episode.group.failures)
        # not earlier: metrics must count each group once, and a group may be scored again until now
        if self._observer is not None:
            self._observer(episode.group)

    def _discard(self, episode: Episode, reason: str) -> None:
        """Drops a finished group before a batch has taken it."""
        self._settle(episode)
        self._leave(episode, reason)

    def _abort(self, episode: Episode, reason: str | None) -> None:
        episode.aborted = True
        self._leave(episode, reason)
        self._stop(episode)

    def _leave(self, episode: Episode, reason: str | None, words: str = "") -> None:
        """Removes an episode that enters no batch. With a reason its prompt is dropped; with None it becomes pending
        again."""
        if self.running.pop(episode.number, None) is not None:
            self.gate.drop()
        else:
            del self.waiting[episode.number]
            self.gate.discard()
        self.ledger.move(episode.prompt, "dropped" if reason else "pending", reason or "")
        if reason:
            self._dropped.append(episode.dropped(reason, words))

    def begin_again(self) -> None:
        """Stops the episodes that are not yet judged and queues them again."""
        for _, episode in sorted({**self.running, **self.waiting}.items()):
            if not episode.judged:
                self._abort(episode, None)
                self._submitted.append((episode.row, episode.workflow))

    def abort_running(self) -> None:
        """Stops all running episodes; their prompts become pending again."""
        for episode in list(self.running.values()):
            self._abort(episode, None)

    # ------------------------------------------------------------------ taking

    def choose(self, count: int) -> list[Episode] | None:
        """Returns the ``count`` oldest groups (with `oversample`, the first that finished), as far as `on_expiry` allows
        them; None if there are too few."""
        eta = self.gate.max_head_offpolicyness
        # the oldest version that a group of this batch may have started with
        oldest = self._version() - eta
        if self._config.on_expiry == "drop":
            for episode in [e for e in self.waiting.values() if e.has_expired(oldest)]:
                self._discard(episode, "expired")
        # A running episode this old expires with the next version: choose no younger group until it has ended.
        if self._config.on_expiry == "wait" and eta and any(e.version <= oldest for e in self.running.values()):
            return None
        if len(self.waiting) < count:
            return None
        if self._config.oversample > 1:
            # chosen by arrival but ordered by number, so that the order in the batch does not depend on timing
            return sorted(list(self.waiting.values())[:count], key=lambda episode: episode.number)
        return self._oldest(count)

    def _oldest(self, count: int) -> list[Episode]:
        return [self.waiting[number] for number in sorted(self.waiting)[:count]]

    def give_up(self, count: int, *, partial: bool) -> list[Episode]:
        """Returns a smaller batch if ``partial`` allows one. Called when no episode runs and none can start.

        Raises:
            NoBatch: no smaller batch is possible; the message says why.
        """
        if partial and self.waiting and not self._submitted:
            return self._oldest(count)
        # Taken groups keep the gate closed until `end_step`, so waiting for more would never end.
        if self._taken and not self.gate.capacity():
            raise NoBatch(f"call end_step() after each batch: the last one is still being trained on; {self.describe()}")
        if not self.gate.capacity():
            raise NoBatch(f"{count} groups are more than the staleness gate ever admits; {self.describe()}")
        raise NoBatch(f"the data ended with {len(self.waiting)} of {count} groups; {self.describe()}")

    def take(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Moves these episodes into a batch. Returns the numbers of the remaining running and waiting episodes as
        metrics."""
        waiting = float(len(self.waiting) - len(episodes))
        metrics = {"episodes/running": float(len(self.running)), "episodes/waiting": waiting}
        for episode in episodes:
            del self.waiting[episode.number]
            self._settle(episode)
            self.gate.consume()
            self.ledger.move(episode.prompt, "taken")
        self._taken += episodes
        # the batch is full, so the filter keeps enough groups
        self._budget.filtered.clear()
        if self._config.oversample > 1:  # the surplus episodes are dropped
            for episode in list(self.running.values()):
                self._abort(episode, "oversampled")
            for episode in list(self.waiting.values()):
                self._discard(episode, "oversampled")
        return metrics

    def end_step(self) -> None:
        """Ends the step: marks the taken episodes as trained. The gate may then admit as many further episodes."""
        for episode in self._taken:
            self.ledger.move(episode.prompt, "trained")
        self._taken = []
        self.gate.end_step()
        self.ledger.check(self.gate)

    # ------------------------------------------------------------------ reporting

    def take_dropped(self) -> tuple[Dropped, ...]:
        """Returns the prompts dropped since the last call, at most the newest `MAX_DROPPED`."""
        dropped, self._dropped = tuple(self._dropped), deque(maxlen=MAX_DROPPED)
        return dropped

    def counts(self) -> dict[str, float]:
        """Returns the numbers of episodes and of failed samples since the start, as metrics."""
        counts = {"episodes/trained": float(self.ledger.total("trained"))}
        counts |= {f"episodes/dropped/{reason}": float(n) for reason, n in self.ledger.dropped.items()}
        counts |= {f"samples/failed/{reason}": float(n) for reason, n in self.ledger.failed_samples.items()}
        return counts | ({"episodes/begun_again": float(self._begun_again)} if self._begun_again else {})

    def describe(self) -> str:
        """Returns the numbers of episodes by state in words, for error messages."""
        ages = [time.monotonic() - episode.started for episode in self.running.values()]
        oldest = f", the oldest for {max(ages):.1f} s" if ages else ""
        gate = self.gate
        return f"running {gate.running}{oldest}, waiting {gate.waiting}, taken {gate.taken}; {self._budget.describe()}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: counters, and the prompts of the data set whose episodes are unfinished."""
        # Includes groups that wait: their tokens are not saved, so their prompts must begin again.
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
        """Loads the state. Must be called before the first episode. The prompts that have ended are not part of this state;
        the ledger has them."""
        self._count = int(state["count"])
        self._budget.load_state_dict(state)
        self.ledger.failed_samples = Counter(state.get("failed_samples", {}))
        self._again = deque(PromptId(int(epoch), int(index)) for epoch, index in state["again"])
        self._begun_again = int(state.get("begun_again", 0)) + len(self._again)
        if self._again:
            logger.info("%d episodes that were under way when the checkpoint was written begin anew", len(self._again))
        for epoch, size in state["sizes"]:
            self.ledger.begin_epoch(int(epoch), int(size))
