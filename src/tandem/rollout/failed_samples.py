"""Samples that failed and are missing in their group: how many may be, what is said of them, and that they are counted."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tandem.api.failures import DataFailure, EpisodeFailure

logger = logging.getLogger("tandem.rollout")


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
    failure.__cause__ = first
    return failure


@contextmanager
def counted(reasons: tuple[str, ...]) -> Iterator[None]:
    """Gives a failure of the whole group in this block the ``reasons`` of single samples, so that those are counted too."""
    try:
        yield
    except EpisodeFailure as failure:
        failure.failed_samples = reasons
        raise


class FailureLog:
    """Warns of each reason once, with the traceback of its first failure."""

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
                    exc_info=failure,
                )
