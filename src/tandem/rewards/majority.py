"""Majority vote over a group's answers by mathematical equality: the pseudo-label of TTRL (arXiv:2504.16084)."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tandem.api.failures import RewardFailure
from tandem.api.workflow import RewardFn, RewardResult, Sample, Vote
from tandem.rewards.function import WorkerPool
from tandem.rewards.reading import agree, final_answer, gold_answer, read

MOST_FAILURES = 2
"""Maximum number of failed comparisons of one answer. Without a limit, one power tower (such as 9^9^9) among 64 answers
would cost the vote 63 time-outs."""


class AnswerOnly(RewardFn):
    r"""Finds a completion's final answer (``\boxed{}``, ``####``, last number) without judging it; the reward is 0."""

    async def __call__(self, *, completion: str, **_: Any) -> RewardResult:
        """Implements `RewardFn.__call__`."""
        answer = final_answer(completion)
        return RewardResult(0.0, answer=answer, extracted=answer is not None)


class MajorityVote:
    """Groups mathematically equal answers into classes and selects the largest class; of several largest, the one that was
    seen first.

    Each answer is compared with the first member of each class: plain numbers exactly, others by math-verify in a worker
    process. A failed comparison (time-out) counts as unequal. An answer with `MOST_FAILURES` failed comparisons is treated
    as unequal to all further answers.
    """

    def __init__(self, *, timeout_s: float, workers: int | None = None):
        self.pool = WorkerPool("tandem.rewards.equality:verify_answer", name="majority", timeout_s=timeout_s, size=workers)

    def answer_of(self, sample: Sample) -> str | None:
        """Returns the sample's answer as its reward parsed it; without such an answer, the final answer in the sample's
        text."""
        return sample.answer if sample.extracted is not None else final_answer(sample.completion_text)

    async def __call__(self, answers: Sequence[str | None], expected: object = None) -> Vote | None:
        """Counts the votes. ``answers``: one for each sample; None (or empty) if it could not be parsed. Returns None if
        there is no answer at all.

        ``expected``: the right answer. It is compared after the vote and does not influence the vote.
        """
        failures: Counter[str] = Counter()
        classes: list[str] = []
        class_of: dict[str | None, int] = {}
        for answer in dict.fromkeys(answers):
            if not answer or not read(answer).text:
                continue
            for first in classes:
                if await self._equal(first, answer, failures):
                    break
            else:
                first = answer
                classes.append(first)
            class_of[answer] = classes.index(first)
        if not classes:
            return None
        members = [class_of.get(answer) for answer in answers]
        sizes = [members.count(number) for number in range(len(classes))]
        majority = sizes.index(max(sizes))
        right, undecided = None, failures.total() // 2  # each failed comparison counts for both answers
        if expected is not None and str(expected).strip():
            failures.clear()
            matches = [await self._equal(gold_answer(expected), member, failures) for member in classes]
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
