"""The majority of a group's answers, by mathematical equality: the label of TTRL (arXiv:2504.16084)."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tandem.api.failures import RewardFailure
from tandem.api.samples import Sample, Vote
from tandem.api.workflow import RewardFn, RewardResult
from tandem.rewards.extraction import final_answer, gold_answer
from tandem.rewards.pool import WorkerPool
from tandem.rewards.reading import agree, read

MOST_FAILURES = 2
"""Comparisons of one answer that may fail: a power tower among 64 answers would hold the vote up for 63 deadlines."""


class AnswerOnly(RewardFn):
    r"""Judges nothing: says which final answer a completion gives (``\boxed{}``, ``####``, last number), reward 0."""

    async def __call__(self, *, completion: str, **_: Any) -> RewardResult:
        """Implements `RewardFn.__call__`."""
        answer = final_answer(completion)
        return RewardResult(0.0, answer=answer, extracted=answer is not None)


class MajorityVote:
    """Counts answers that are mathematically equal as one; the largest class wins, of equal ones the first seen.

    Each answer is compared with the first member of each class; plain numbers exactly, the rest by math-verify in a worker
    process. A comparison that fails (time-out) is taken for unequal and counted; an answer with `MOST_FAILURES` of them
    equals no other one from then on.
    """

    def __init__(self, *, timeout_s: float, workers: int | None = None):
        self.pool = WorkerPool("tandem.rewards.equality:verify_answer", name="majority", timeout_s=timeout_s, size=workers)

    def answer_of(self, sample: Sample) -> str | None:
        """The answer that the reward found, else the text's."""
        return sample.answer if sample.extracted is not None else final_answer(sample.completion_text)

    async def __call__(self, answers: Sequence[str | None], expected: object = None) -> Vote | None:
        """``answers``: one a sample, None (or empty) where it did not parse. None if none did.

        ``expected``, a gold answer, is compared after the vote and changes nothing in it.
        """
        failures: Counter[str] = Counter()
        classes: list[str] = []
        found: dict[str | None, int] = {}
        for answer in dict.fromkeys(answers):
            if not answer or not read(answer).text:
                continue
            for first in classes:
                if await self._equal(first, answer, failures):
                    break
            else:
                first = answer
                classes.append(first)
            found[answer] = classes.index(first)
        if not classes:
            return None
        members = [found.get(answer) for answer in answers]
        sizes = [members.count(number) for number in range(len(classes))]
        majority = sizes.index(max(sizes))
        right, undecided = None, failures.total() // 2  # both sides count one
        if expected is not None and str(expected).strip():
            failures.clear()
            matches = [await self._equal(gold_answer(expected), one, failures) for one in classes]
            right = tuple(member is not None and matches[member] for member in members)
        agrees = tuple(member == majority for member in members)
        return Vote(agrees, sizes[majority] / len(answers), right, undecided)

    async def _equal(self, first: str, other: str, failures: Counter[str]) -> bool:
        if (plain := agree(first, other)) is not None:
            return plain
        if max(failures[first], failures[other]) >= MOST_FAILURES:
            return False
        try:
            return (await self.pool.call({"gold": first, "answer": other})).value > 0
        except RewardFailure:
            failures.update((first, other))
            return False

    def close(self) -> None:
        """Kills the workers."""
        self.pool.close()
