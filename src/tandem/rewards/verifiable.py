"""Rewards that compare a completion with the row's ``answer``, or look at its form. They judge the completion only.

Text of the prompt never counts: a template that shows ``#### <number>`` to the model earns nothing.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from tandem.api.failures import RewardFailure
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.errors import ConfigError
from tandem.rewards.extraction import after_hashes, boxed, final_answer, gold_answer, is_answer, last_number
from tandem.rewards.function import DirectReward, require_answer
from tandem.rewards.pool import WorkerPool
from tandem.rewards.reading import agree, plain_number, read

CLOSENESS_WEIGHT = 0.3
FORM_WEIGHT = 0.2
READABLE = (
    "an answer is a number, an expression, a few words, or a solution with \\boxed{…} or a last line `#### 18`: name "
    "another answer_column, or a reward that reads texts, such as a judge"
)


def _gold_number(row: Mapping[str, Any], name: str) -> str:
    """The row's number as it is written, with its unit where it is all of the answer; ConfigError where there is none."""
    require_answer(row, name)
    gold = gold_answer(row["answer"])
    number = gold if plain_number(gold) is not None else last_number(gold)
    if number is None:
        raise ConfigError(
            f"reward {name!r} compares numbers, and the answer {row['answer']!r:.80} holds none; reward `math` compares "
            "expressions"
        )
    return number


def _verdict(right: bool, answer: str | None) -> RewardResult:
    return RewardResult(float(right), accuracy=float(right), answer=answer, extracted=answer is not None)


class MathReward(RewardFn):
    r"""1 if the final answer (`final_answer`) is mathematically equal to the row's, else 0.

    Plain numbers, units and words are compared exactly, in microseconds (`agree`); everything else goes to math-verify in a
    worker process. A gold that is prose is a failure, ``answer_unreadable``, unless the completion says the same text.
    """

    def __init__(self, *, timeout_s: float, workers: int | None = None):
        self.pool = WorkerPool("tandem.rewards.equality:verify_answer", name="math", timeout_s=timeout_s, size=workers)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises ConfigError where the row has no answer, or none that can be read."""
        require_answer(row, "math")
        if not is_answer(gold_answer(row["answer"])):
            raise ConfigError(f"reward 'math' cannot read the answer {row['answer']!r:.80}; {READABLE}")

    async def __call__(
        self,
        *,
        prompt: str,
        completion: str,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        row: Mapping[str, Any],
    ) -> RewardResult:
        """Implements `RewardFn.__call__`."""
        gold, answer = gold_answer(row.get("answer")), final_answer(completion)
        right = any(read(gold).text == read(text).text for text in (answer, completion) if text)
        try:
            require_answer(row, "math")
            if not right:
                self.check_row(row)
        except ConfigError as error:
            raise RewardFailure("answer_unreadable" if row.get("answer") else "reward_raised", str(error)) from error
        verdict = right if right or answer is None else agree(gold, answer)
        if verdict is not None:
            return _verdict(verdict, answer)
        outcome = await self.pool.call({"gold": gold, "answer": answer})
        return _verdict(outcome.value > 0, answer)

    def close(self) -> None:
        """Kills the workers."""
        self.pool.close()


def exact_number(completion: str, row: Mapping[str, Any]) -> RewardResult:
    """1 if the last number of the completion, with the words behind it, is the row's number, else 0."""
    expected, found = _gold_number(row, "exact_number"), last_number(completion)
    number = found or ""
    line = completion[completion.rfind(number) :].split("\n", 1)[0]  # with the unit
    return _verdict(agree(expected, number if plain_number(line) is None else line) is True, found)


def has_form(completion: str) -> float:
    r"""1 if the completion marks its final answer, by ``\boxed{…}`` or by ``####``, else 0."""
    return 1.0 if boxed(completion) or after_hashes(completion) else 0.0


def gsm8k_parts(completion: str, row: Mapping[str, Any]) -> dict[str, float | str | None]:
    """Right answer 1; closeness up to 0.3; form 0.2 (0.1 for a number without ``####``); so a weak model sees a spread."""
    gold, answer = _gold_number(row, "gsm8k"), final_answer(completion)
    expected = plain_number(gold) or Fraction(0)
    number = plain_number(answer or "")
    correct, closeness = 0.0, 0.0
    if number is not None:
        correct = float(agree(gold, answer or "") is True)
        closeness = CLOSENESS_WEIGHT / (1 + float(abs(number - expected) / max(Fraction(1), abs(expected))))
    marked = plain_number(after_hashes(completion) or "") is not None
    form = FORM_WEIGHT if marked else FORM_WEIGHT / 2 if number is not None else 0.0
    return {"correct": correct, "closeness": closeness, "format": form, "accuracy": correct, "answer": answer}


def build_exact_number(*, timeout_s: float) -> RewardFn:
    """Builds `exact_number`, which takes microseconds, so ``timeout_s`` never passes."""
    return DirectReward(exact_number, "exact_number", check=_gold_number)


def build_format(*, timeout_s: float) -> RewardFn:
    return DirectReward(has_form, "format")


def build_gsm8k(*, timeout_s: float) -> RewardFn:
    return DirectReward(gsm8k_parts, "gsm8k", check=_gold_number)


def build_length(*, timeout_s: float, target_tokens: int = 256) -> RewardFn:
    """1 up to ``target_tokens`` tokens, then falling in a straight line to 0 at twice as many."""

    def length(completion_ids: tuple[int, ...]) -> float:
        return min(1.0, max(0.0, 2.0 - len(completion_ids) / target_tokens))

    return DirectReward(length, "length")
