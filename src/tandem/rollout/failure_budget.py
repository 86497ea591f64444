"""The budgets of failed samples of a group and of failed episodes, and the words about those that failed."""

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tandem.api.failures import BROKEN, DataFailure, EpisodeFailure, InfrastructureFailure, TandemError
from tandem.rollout.ledger import PromptId

logger = logging.getLogger("tandem.rollout")

NUM_REMEMBERED = 5
"""Failed episodes that an error message can name."""


EARLY_GROUPS = 3
"""A run whose first groups all fail by the user's code ends with this one."""

REMEDY = "Mend it and start again; `tandem check-reward REWARD DATA` tries a reward alone, and log.txt has the whole trace"


class NoBatch(TandemError, RuntimeError):
    """No batch can be made any more: the data ended, a filter keeps too little, or too many episodes failed."""


def least_samples(min_group_size: int | None, n: int) -> int:
    """The fewest of ``n`` samples that make a group: ``min_group_size``, or half of them, rounded up, at least 1."""
    return max(1, math.ceil(n / 2)) if min_group_size is None else min_group_size


def too_few(failures: Sequence[EpisodeFailure], n: int, least: int) -> DataFailure:
    """Names the commonest reason for a group that lost too many samples; its cause is the first failure of that reason."""
    ((reason, _),) = Counter(failure.reason for failure in failures).most_common(1)
    first = next(failure for failure in failures if failure.reason == reason)
    failure = DataFailure(
        reason,
        f"{len(failures)} of {n} samples failed, and a group needs {least} (rollout.min_group_size); the first of these: "
        f"{first}",
    )
    failure.__cause__, failure.words, failure.num_left = first, first.words, n - len(failures)
    return failure


@contextmanager
def counted(reasons: tuple[str, ...]) -> Iterator[None]:
    """Gives a failure of the whole group in this block the ``reasons`` of single samples, so that those are counted too."""
    try:
        yield
    except EpisodeFailure as failure:
        failure.failed_samples = reasons
        raise


class Beginning:
    """Ends early what fails every time: the first ``most`` (``what``) of this process all failed, and by `BROKEN` reasons.
    Other failures count neither way; the first that comes through ends the watch."""

    def __init__(self, most: int, what: str):
        self._left, self._what = most, f"the first {most} {what}"

    def well(self) -> None:
        """One came through."""
        self._left = 0

    def lose(self, reasons: Iterable[str], words: str) -> NoBatch | None:
        """One failed as a whole, for these reasons. Returns the error if it is the last that may."""
        if not self._left or not BROKEN.issuperset(reasons):
            return None
        self._left -= 1
        return None if self._left else NoBatch(f"{self._what} all failed, so the next would too: {words}. {REMEDY}")


class FailureLog:
    """Warns of each reason once; the traceback of its first failure goes to log.txt."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def warn(self, failures: Sequence[EpisodeFailure]) -> None:
        """Looks at the failures of one group's samples."""
        for failure in failures:
            if failure.reason not in self._reasons:
                self._reasons.add(failure.reason)
                logger.warning(
                    "a sample failed and is missing in its group (%s); samples/failed/%s counts the others",
                    failure,
                    failure.reason,
                )
                logger.info("cause", exc_info=failure)  # to log.txt


class FailureBudget:
    """Says when a run cannot go on: after too many failures of one kind (``data`` or ``infrastructure``) in a row, or when
    the filter of groups turns down too many of ``max_draws`` batches."""

    def __init__(self, max_in_a_row: int, batch_size: int, max_draws: int):
        self._max_in_a_row, self._batch_size, self._max_draws = max_in_a_row, batch_size, max_draws
        self._in_a_row = {"data": 0, "infrastructure": 0}
        self.beginning = Beginning(EARLY_GROUPS, "groups")
        self.filtered: Counter[str] = Counter()  # since the last batch
        self._last: deque[tuple[str, str]] = deque(maxlen=NUM_REMEMBERED)  # which prompt, and why

    def remember(self, prompt: PromptId, why: str) -> str:
        """Returns the failure as a message names it."""
        self._last.append((f"prompt {prompt.index} of epoch {prompt.epoch}", why))
        return ": ".join(self._last[-1])

    def spend(self, kind: str) -> NoBatch | None:
        """Counts one more failure of this kind in a row. Returns the error that ends the run if they are too many."""
        self._in_a_row[kind] += 1
        if self._in_a_row[kind] < self._max_in_a_row:
            return None
        return NoBatch(
            f"{self._in_a_row[kind]} episodes in a row were dropped, or lost most of their samples, by {kind} failures "
            f"(rollout.max_data_failures); the last: {self._named()}"
        )

    def lose(self, failure: EpisodeFailure) -> NoBatch | None:
        """Counts a group that failed. Returns the error that ends the run if it is one too many."""
        if failure.num_left:
            self.beginning.well()
        early = self.beginning.lose((failure.reason, *failure.failed_samples), f"{failure.reason}: {failure.words}")
        return early or self.spend("infrastructure" if isinstance(failure, InfrastructureFailure) else "data")

    def restore(self, kind: str) -> None:
        """An episode went well: the row of failures of this kind ends."""
        self._in_a_row[kind] = 0

    def turn_down(self, reason: str, kept: int, wanted: int) -> NoBatch | None:
        """Counts one more group that the filter turned down. Returns the error that ends the run if too many were drawn."""
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
        """The last failures, for errors."""
        return f"last failures: {self._named()}" if self._last else "no failures"

    def _named(self) -> str:
        """Each reason once, with the prompt that failed for it first."""
        first = {why: prompt for prompt, why in reversed(self._last)}
        counts = Counter(why for _, why in self._last)
        more = {why: f" (and {count - 1} more by the same)" if count > 1 else "" for why, count in counts.items()}
        return "; ".join(f"{first[why]}: {why}{more[why]}" for why in counts)

    def state_dict(self) -> dict[str, Any]:
        """The counts; the messages are forgotten."""
        return {"in_a_row": dict(self._in_a_row), "filtered": dict(self.filtered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first episode."""
        self._in_a_row = {kind: int(state["in_a_row"][kind]) for kind in self._in_a_row}
        self.filtered = Counter(state["filtered"])
