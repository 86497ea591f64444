"""Prompts that begin alike: the keys and values of the common beginning are copied from a row that has them.

Different prompts under one system message or with the same examples before the question share their beginning; only what
differs is computed. A copy and not a view, so that rows stay dense; it costs a memory pass instead of a model pass.
"""

from collections.abc import Iterable

from tandem.engines.inference.sequences import Prefill

SMALLEST = 16
"""Tokens that prompts must have in common for a copy to be made, and that waiting for a longer beginning must gain."""

_CANDIDATES = 4
"""Latest jobs with the same first tokens that are compared."""


class PrefixIndex:
    """Jobs whose rows hold, or will hold, the keys and values of a whole prompt."""

    def __init__(self) -> None:
        self._by_beginning: dict[tuple[int, ...], list[Prefill]] = {}
        self.copied_tokens = 0
        """Prompt tokens whose keys and values were copied and not computed."""

    def enter(self, job: Prefill) -> None:
        """Finds the jobs that begin like this one; later ones may copy from it, too."""
        job.alike = self.find(job.key)
        self.add(job)

    def copied(self, job: Prefill) -> bool:
        """Copies what another row has of the job's beginning; False if the job had better wait for more of it.

        Waiting is worth it where at least `SMALLEST` tokens more could be copied later; jobs wait for earlier ones only, so
        the first in the queue never does.
        """
        there = [(other, min(common, other.done), common) for other, common in job.alike if not other.gone]
        best, count, _ = max(there, key=lambda found: found[1], default=(None, 0, 0))
        if max((common for _, _, common in there), default=0) - count >= SMALLEST:
            return False
        job.alike = ()
        if best is not None and count >= SMALLEST:
            for mine, theirs in ((job.row.slab.keys, best.row.slab.keys), (job.row.slab.values, best.row.slab.values)):
                for layer, tensor in enumerate(mine):
                    tensor[job.row.index, :, :count] = theirs[layer][best.row.index, :, :count]
            job.done = count
            self.copied_tokens += count
        return True

    def find(self, key: tuple[int, ...]) -> tuple[tuple[Prefill, int], ...]:
        """Jobs that begin alike, and how many tokens each has in common; always fewer than all, since the last token's
        hidden state is wanted. A common beginning may end within a medium."""
        latest = self._by_beginning.get(key[:SMALLEST], ())[-_CANDIDATES:]
        found = [(job, min(_common(key, job.key), len(key) - 1)) for job in latest]
        return tuple((job, common) for job, common in found if common >= SMALLEST)

    def add(self, job: Prefill) -> None:
        """From now on others may copy from it."""
        if len(job.key) > SMALLEST:
            self._by_beginning.setdefault(job.key[:SMALLEST], []).append(job)

    def remove(self, jobs: Iterable[Prefill]) -> None:
        """Their rows are gone. Whoever waited for one of them computes its prompt itself."""
        for job in jobs:
            job.gone = True
            same = self._by_beginning.get(job.key[:SMALLEST], [])
            if job in same:
                same.remove(job)
                if not same:
                    del self._by_beginning[job.key[:SMALLEST]]

    def clear(self) -> None:
        """Nobody may copy from what is there: it is of older weights."""
        self.remove([job for same in self._by_beginning.values() for job in same])


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
