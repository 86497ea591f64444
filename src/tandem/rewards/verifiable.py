"""Rewards that compare a completion with the row's ``answer`` or check its form. They read only the completion.

The prompt has no influence on the reward, so a template that shows ``#### <number>`` to the model earns nothing.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from tandem.api.failures import RewardFailure
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.errors import ConfigError
from tandem.rewards.function import DirectReward, WorkerPool, require_answer
from tandem.rewards.reading import (
    after_hashes,
    agree,
    boxed,
    final_answer,
    gold_answer,
    is_answer,
    last_number,
    plain_number,
    read,
)

CLOSENESS_WEIGHT = 0.3
FORM_WEIGHT = 0.2
READABLE = (
    "an answer is a number, an expression, a few words, or a solution with \\boxed{…} or a last line `#### 18`: name "
    "another answer_column, or a reward that reads texts, such as a judge"
)


def _gold_number(row: Mapping[str, Any], name: str) -> str:
    """Returns the row's number as written; with its unit if the answer consists of number and unit. Raises ConfigError if
    the row has no number."""
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
    r"""1 if the completion's final answer (`final_answer`) is mathematically equal to the row's answer, else 0.

    Plain numbers, units and words are compared exactly, in microseconds (`agree`); all other answers by math-verify in a
    worker process. An answer of the row that is prose is a failure, ``answer_unreadable``, unless the completion has the
    same text.
    """

    def __init__(self, *, timeout_s: float, workers: int | None = None):
        self.pool = WorkerPool("tandem.rewards.equality:verify_answer", name="math", timeout_s=timeout_s, size=workers)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises ConfigError if the row has no answer, or an answer that cannot be compared."""
        require_answer(row, "math")
        if not is_answer(gold_answer(row["answer"])):
            raise ConfigError(f"reward 'math' cannot read the answer {row['answer']!r:.80}; {READABLE}")

    async def __call__(self, *, completion: str, row: Mapping[str, Any], **_: Any) -> RewardResult:
        """Implements `RewardFn.__call__`."""
        gold, answer = gold_answer(row.get("answer")), final_answer(completion)
        right = any(read(gold).text == read(text).text for text in (answer, completion) if text)
        try:
            require_answer(row, "math")
            if not right:
                self.check_row(row)
        except ConfigError as error:
            raise RewardFailure("answer_unreadable" if row.get("answer") else "row_unfit", str(error)) from error
        verdict = right if right or answer is None else agree(gold, answer)
        if verdict is not None:
            return _verdict(verdict, answer)
        outcome = await self.pool.call({"gold": gold, "answer": answer})
        return _verdict(outcome.value > 0, answer)

    def close(self) -> None:
        """Kills the workers."""
        self.pool.close()


def exact_number(completion: str, row: Mapping[str, Any]) -> RewardResult:
    """1 if the completion's last number, with the words after it, equals the row's number, else 0."""
    expected, answer = _gold_number(row, "exact_number"), last_number(completion)
    number = answer or ""
    line = completion[completion.rfind(number) :].split("\n", 1)[0]  # the number with its unit
    return _verdict(agree(expected, number if plain_number(line) is None else line) is True, answer)


def has_form(completion: str) -> float:
    r"""1 if the completion marks its final answer by ``\boxed{…}`` or ``####``, else 0."""
    return 1.0 if boxed(completion) or after_hashes(completion) else 0.0


def gsm8k_parts(completion: str, row: Mapping[str, Any]) -> dict[str, float | str | None]:
    """1 for the right answer + up to 0.3 for closeness + 0.2 for form (0.1 for a number without ``####``), so that a weak
    model sees different rewards."""
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


def build_exact_number() -> RewardFn:
    """Builds `exact_number`. It takes microseconds, so it needs no deadline."""
    return DirectReward(exact_number, "exact_number", check=_gold_number)


def build_format() -> RewardFn:
    return DirectReward(has_form, "format")


def build_gsm8k() -> RewardFn:
    return DirectReward(gsm8k_parts, "gsm8k", check=_gold_number)


def build_length(target_tokens: int = 256) -> RewardFn:
    """Builds a reward of 1 up to ``target_tokens`` tokens; above, it falls linearly to 0 at twice as many tokens."""

    def length(completion_ids: tuple[int, ...]) -> float:
        return min(1.0, max(0.0, 2.0 - len(completion_ids) / target_tokens))

    return DirectReward(length, "length")
