"""Prompts that begin alike: the keys and values of the common beginning are copied from a row that has them.

Different prompts under one system message or with the same examples before the question share their beginning; only what
differs is computed. A copy and not a view, so that rows stay dense; it costs a memory pass instead of a model pass.
"""

from collections.abc import Iterable

from tandem.engines.inference.sequences import Job

SMALLEST = 16
"""Tokens that prompts must have in common for a copy to be made, and that waiting for a longer beginning must gain."""

_CANDIDATES = 4
"""Latest jobs with the same first tokens that are compared."""


class PrefixIndex:
    """Jobs whose rows hold, or will hold, the keys and values of a whole prompt."""

    def __init__(self) -> None:
        self._by_beginning: dict[tuple[int, ...], list[Job]] = {}

    def find(self, tokens: tuple[int, ...]) -> tuple[tuple[Job, int], ...]:
        """Jobs that begin alike, and how many tokens each has in common; always fewer than all, since the last token's
        hidden state is wanted."""
        latest = self._by_beginning.get(tokens[:SMALLEST], ())[-_CANDIDATES:]
        found = [(job, min(_common(tokens, job.prompt), len(tokens) - 1)) for job in latest]
        return tuple((job, common) for job, common in found if common >= SMALLEST)

    def add(self, job: Job) -> None:
        """From now on others may copy from it."""
        if len(job.prompt) > SMALLEST:
            self._by_beginning.setdefault(job.prompt[:SMALLEST], []).append(job)

    def remove(self, jobs: Iterable[Job]) -> None:
        """Their rows are gone. Whoever waited for one of them computes its prompt itself."""
        for job in jobs:
            job.gone = True
            same = self._by_beginning.get(job.prompt[:SMALLEST], [])
            if job in same:
                same.remove(job)
                if not same:
                    del self._by_beginning[job.prompt[:SMALLEST]]

    def clear(self) -> None:
        """Nobody may copy from what is there: it is of older weights."""
        self.remove([job for same in self._by_beginning.values() for job in same])


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
