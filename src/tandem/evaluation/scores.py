"""From answers to figures: one value a row for each measure, so that means, intervals and paired tests all see the same."""

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tandem.config.errors import ConfigError, nearest_names
from tandem.config.evaluation import SUCCESS, usual_k
from tandem.evaluation.asking import Answer
from tandem.evaluation.numbers import Interval, interval, maj_at_k, pass_at_k
from tandem.rewards.reading import read

RELATIONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt, "==": operator.eq}


@dataclass(frozen=True)
class Estimate:
    """A mean over rows, with its interval."""

    value: float
    low: float
    high: float
    method: str


@dataclass(frozen=True)
class DataScores:
    """The scores of one data set. Samples that failed count as wrong, and are counted by reason."""

    rows: int
    samples: int
    reward: float
    """Mean over the samples that were judged."""

    truncated: float
    """Share of those that were cut by their length."""

    completion_length: float
    """Mean tokens of those."""

    extraction_failed: float | None
    """Share of those in which no answer was found; None where the reward looks for none."""

    failed: Mapping[str, int] = field(default_factory=dict)
    measures: Mapping[str, Estimate] = field(default_factory=dict)
    """``accuracy`` (with several samples also called avg@k: the mean over all of them), ``pass@k``, ``maj@k``."""

    metrics: Mapping[str, float] = field(default_factory=dict)


def by_row(answers: Iterable[Answer]) -> dict[int, list[Answer]]:
    """Row → its answers, both in order."""
    rows: dict[int, list[Answer]] = defaultdict(list)
    for answer in answers:
        rows[answer.row].append(answer)
    return {row: sorted(rows[row], key=lambda answer: answer.sample) for row in sorted(rows)}


def vote_key(answer: str) -> str:
    """The key that two ways to write one answer share: the exact value of a plain number, else the text less its form."""
    reading = read(answer)
    return reading.text if reading.number is None else str(reading.number)


def score_of(answer: Answer) -> float | None:
    """0 to 1: the accuracy that the reward states, else its value where that is a share; None where it is neither."""
    if answer.failed is not None:
        return 0.0
    if answer.accuracy is not None:
        return answer.accuracy
    return answer.reward if answer.reward is not None and 0 <= answer.reward <= 1 else None


def judged_by(answers: Sequence[Answer], success: str | None) -> Sequence[Answer]:
    """The answers with the accuracy that ``success`` states (`EvaluationConfig.success`); as they are if it is None.

    Raises:
        ConfigError: it names something that an answer has not.
    """
    rule = SUCCESS.fullmatch(success or "")
    return answers if rule is None else [replace(answer, accuracy=_succeeds(answer, *rule.groups())) for answer in answers]


def _succeeds(answer: Answer, name: str, relation: str, bound: str) -> float | None:
    if answer.failed is not None:
        return None
    figures = {**answer.metrics, **answer.rewards, "reward": answer.reward, "accuracy": answer.accuracy}
    value = figures.get(name)
    if value is None:
        names = [name for name, value in figures.items() if value is not None]
        raise ConfigError(f"success: an answer of {answer.data} has no {name!r}; {nearest_names(name, names)}")
    return float(RELATIONS[relation](value, float(bound)))


def mean_rewards(answers: Sequence[Answer]) -> dict[int, float]:
    """Row → mean reward of its samples; without rows of which no sample was judged."""
    rewards = {
        row: [answer.reward for answer in row_answers if answer.reward is not None]
        for row, row_answers in by_row(answers).items()
    }
    return {row: mean(row_rewards) for row, row_rewards in rewards.items() if row_rewards}


def row_values(answers: Sequence[Answer], ks: Sequence[int], *, votes: bool = True) -> dict[str, list[float]]:
    """Measure → one value a row, in the order of rows; ``answers`` are those of one data set.

    A sample is correct when its score is 1. ``accuracy`` is missing, and all else with it, where the reward gives no score;
    ``maj@k`` where it looks for no answer, or without ``votes``: under a rule of the user's, right answers may differ.
    Correct answers vote together, because each equals the expected one; wrong ones where they are written alike
    (`vote_key`); samples without an answer, or that failed, do not vote.
    """
    rows = by_row(answers)
    scores = {row: [score_of(answer) for answer in row_answers] for row, row_answers in rows.items()}
    if any(score is None for row_scores in scores.values() for score in row_scores):
        return {}
    values = {"accuracy": [sum(s or 0.0 for s in scores[row]) / len(scores[row]) for row in rows]}
    fewest = min((len(row_answers) for row_answers in rows.values()), default=0)
    judged = [answer for answer in answers if answer.failed is None]
    votes = votes and bool(judged) and all(answer.extracted is not None for answer in judged)
    for k in (k for k in ks if k <= fewest):
        values[f"pass@{k}"] = [pass_at_k(_correct(scores[row]), len(scores[row]), k) for row in rows]
        if votes:
            values[f"maj@{k}"] = [_majority(rows[row], scores[row], k) for row in rows]
    return values


def _correct(scores: Sequence[float | None]) -> int:
    return sum(score is not None and score >= 1 for score in scores)


def _majority(answers: Sequence[Answer], scores: Sequence[float | None], k: int) -> float:
    wrong: Counter[str] = Counter()
    silent = correct = 0
    for answer, score in zip(answers, scores, strict=True):
        if score is not None and score >= 1:
            correct += 1
        elif answer.answer is None:
            silent += 1
        else:
            wrong[vote_key(answer.answer)] += 1
    return maj_at_k(correct, list(wrong.values()), silent, k)


def score_data(
    answers: Sequence[Answer], ks: Sequence[int], *, confidence: float, seed: int, votes: bool = True
) -> DataScores:
    """The figures of one data set. ``votes``: as for `row_values`."""
    rows = by_row(answers)
    judged = [answer for answer in answers if answer.failed is None]
    looked = [answer.extracted for answer in judged if answer.extracted is not None]
    by_metric: dict[str, list[float]] = defaultdict(list)
    for answer in judged:
        for name, value in answer.metrics.items():
            by_metric[name].append(value)
    measures = {}
    for name, values in row_values(answers, ks, votes=votes).items():
        bounds: Interval = interval(values, confidence=confidence, seed=seed)
        measures[name] = Estimate(mean(values), bounds.low, bounds.high, bounds.method)
    return DataScores(
        rows=len(rows),
        samples=max((len(row_answers) for row_answers in rows.values()), default=0),
        reward=mean([answer.reward or 0.0 for answer in judged]),
        truncated=mean([float(answer.truncated) for answer in judged]),
        completion_length=mean([float(answer.tokens) for answer in judged]),
        extraction_failed=mean([float(not extracted) for extracted in looked]) if looked else None,
        failed=dict(sorted(Counter(answer.failed for answer in answers if answer.failed is not None).items())),
        measures=measures,
        metrics={name: mean(values) for name, values in sorted(by_metric.items())},
    )


def mean(values: Sequence[float]) -> float:
    """0 for nothing."""
    return sum(values) / len(values) if values else 0.0


def metrics_of(answers: Sequence[Answer], n_samples: int) -> dict[str, float]:
    """For a training step: ``eval/<name>``; with several data sets also ``eval/accuracy/<source>``."""
    rows = by_row(answers)
    judged = [answer for answer in answers if answer.failed is None]
    looked = [answer.extracted for answer in judged if answer.extracted is not None]
    figures = {
        "reward": mean([answer.reward or 0.0 for answer in judged]),
        "completion_length": mean([float(answer.tokens) for answer in judged]),
        "truncated": mean([float(answer.truncated) for answer in judged]),
        "failed": float(len({a.row for a in answers if a.failed is not None}) if rows else 0),
    }
    if looked:
        figures["extraction_failed"] = mean([float(not extracted) for extracted in looked])
    figures |= {name: mean(values) for name, values in row_values(answers, usual_k(n_samples)).items()}
    sources = dict.fromkeys(answer.data for answer in answers)
    for source in sources if len(sources) > 1 else ():
        by_k = row_values([answer for answer in answers if answer.data == source], ())
        figures |= {f"accuracy/{source}": mean(values) for values in by_k.values()}
    return {f"eval/{name}": value for name, value in figures.items()}


def plain(scores: DataScores) -> dict[str, Any]:
    return asdict(scores)
