"""The tokens that are prefilled next: jobs in order of their arrival, in pieces of at most so many tokens a pass."""

from collections.abc import Collection

from tandem.engines.inference.attention import PrefillSpan
from tandem.engines.inference.prefix_index import PrefixIndex
from tandem.engines.inference.sequences import Prefill, Sequence, SharedPrompt


class PrefillQueue:
    """Jobs that are not done, and the beginnings that they can copy from each other."""

    def __init__(self, chunk_tokens: int):
        self._chunk = chunk_tokens
        self.jobs: list[Prefill] = []
        self._beginnings = PrefixIndex()
        self._job_of: dict[Sequence | SharedPrompt, Prefill] = {}
        """The job that fills the owner's row, also after it is done."""

    @property
    def copied_tokens(self) -> int:
        """Prompt tokens that were copied from another row and not computed."""
        return self._beginnings.copied_tokens

    def add(self, job: Prefill) -> None:
        """Queues a job, its beginning to be copied where another prompt has the same."""
        self._beginnings.enter(job)
        self._job_of[job.owner] = job
        self.jobs.append(job)

    def drop(self, owners: Collection[Sequence | SharedPrompt]) -> None:
        """The rows of these are given back."""
        self.jobs = [job for job in self.jobs if job.owner not in owners]
        self._beginnings.remove([self._job_of.pop(owner) for owner in owners if owner in self._job_of])

    def restart(self) -> None:
        """Jobs that were computed in part begin again: the weights have changed."""
        for job in self.jobs:
            job.done = 0
            job.alike = ()

    def stop_copying(self) -> None:
        """Nobody may copy from what is there: it is of older weights."""
        self._beginnings.clear()

    def next_pieces(self, jobs: list[Prefill]) -> tuple[list[Prefill], list[PrefillSpan]]:
        """The front of the jobs, as many tokens as one prefill pass takes; packed, the last job perhaps in part."""
        room, taken, pieces = self._chunk, [], []
        for job in jobs:
            if room <= 0:
                break
            if job.alike and not self._beginnings.copied(job):
                continue
            count = min(room, len(job.tokens) - job.done)
            base = (job.base.row, job.base.length) if job.base is not None else (None, 0)
            pieces.append(PrefillSpan(job.row, job.done, count, *base))
            taken.append(job)
            room -= count
        return taken, pieces
