"""Turns answers into measures, with one value a row for each measure; means, intervals and paired tests use these values.

Also has the estimators pass@k and maj@k, confidence intervals and tests, as pure functions of counts or of values by row;
the progress lines of an evaluation, and the table of its results.
"""

import functools
import math
import operator
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import NormalDist
from typing import NamedTuple, TextIO

import numpy

from tandem.api.shared_files import aligned
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.evaluation import SUCCESS, usual_k
from tandem.evaluation.asking import Answer
from tandem.rewards.reading import read
from tandem.tracking.tracker import duration

BOOTSTRAP_DRAWS = 2000
PERMUTATIONS = 20000
EXACT_SIGNS = 14
"""Largest number of differing rows for which all sign flips are tried; for more rows, `PERMUTATIONS` random ones."""


class Interval(NamedTuple):
    """A confidence interval, and its method."""

    low: float
    high: float
    method: str


class Test(NamedTuple):
    """The result of a two-sided test of the hypothesis of no difference."""

    p_value: float
    method: str


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Returns the probability that at least one of k samples, drawn without replacement, is correct: 1 − C(n−c, k)/C(n, k).

    Unbiased for k fresh samples (arXiv:2107.03374). Raises `ValueError` unless 1 ≤ k ≤ ``samples``.
    """
    _check_k(k, samples)
    return float(1 - Fraction(math.comb(samples - correct, k), math.comb(samples, k)))


def maj_at_k(correct: int, wrong: Sequence[int], silent: int, k: int) -> float:
    """Returns the exact probability that the right answer wins the vote of k samples, drawn without replacement.

    ``correct`` samples gave the right answer, ``wrong`` has the count of each wrong answer, and ``silent`` samples gave no
    answer and do not vote. A tie is broken at random: the right answer among r tied answers counts 1/r. The mean over all
    C(n, k) subsets is unbiased for k fresh samples; it is computed exactly, not sampled.
    """
    samples = correct + sum(wrong) + silent
    _check_k(k, samples)
    if correct == 0:
        return 0.0
    return _wins(correct, tuple(sorted(wrong)), silent, k)


def _check_k(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k must lie in 1…{samples}, the number of samples, got {k}")


@functools.lru_cache(maxsize=1 << 16)
def _wins(correct: int, wrong: tuple[int, ...], silent: int, k: int) -> float:
    """Returns the share of all subsets of ``k`` samples in which the right answer wins the vote, with exact counts. A tie of
    r answers counts 1/r."""
    total = Fraction(0)
    for votes in range(1, min(correct, k) + 1):
        ways = Counter({(k - votes, 0): math.comb(correct, votes)})  # (draws left, tied wrong answers) → number of subsets
        for count in wrong:
            ways = _with_answer(ways, count, votes)
        for (left, tied), number in ways.items():
            if left <= silent:
                total += Fraction(number * math.comb(silent, left), tied + 1)
    return float(total / math.comb(correct + sum(wrong) + silent, k))


def _with_answer(ways: "Counter[tuple[int, int]]", count: int, votes: int) -> "Counter[tuple[int, int]]":
    """Adds one more wrong answer, which ``count`` samples gave; at most ``votes`` of these samples are drawn. ``ways`` and
    the result: (samples left to draw, wrong answers with ``votes`` votes) → number of subsets."""
    extended: Counter[tuple[int, int]] = Counter()
    for (left, tied), number in ways.items():
        for drawn in range(min(count, votes, left) + 1):
            extended[left - drawn, tied + (drawn == votes)] += number * math.comb(count, drawn)
    return extended


def wilson(successes: float, trials: int, confidence: float) -> Interval:
    """Returns Wilson's score interval for a share (JASA 22, 1927)."""
    if trials == 0:
        return Interval(0.0, 1.0, "wilson")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, square = successes / trials, z * z / trials
    centre = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    return Interval(max(0.0, centre - half), min(1.0, centre + half), "wilson")


def bootstrap_means(values: Sequence[float], seed: int, draws: int = BOOTSTRAP_DRAWS) -> numpy.ndarray:
    """Returns the means of ``draws`` resamples of the prompts, ``[draws]``. The resampled indices depend only on the seed
    and the number of values."""
    column, generator = numpy.asarray(values, dtype=float), numpy.random.default_rng(seed)
    means = []
    for start in range(0, draws, 100):  # 100 at a time, because all indices together take much memory
        chosen = generator.integers(0, len(column), size=(min(100, draws - start), len(column)))
        means.append(column[chosen].mean(axis=1))
    return numpy.concatenate(means)


def percentiles(means: numpy.ndarray, confidence: float) -> tuple[float, float]:
    """Returns the central interval that holds the share ``confidence`` of the resampled means."""
    low, high = numpy.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def interval(values: Sequence[float], *, confidence: float, seed: int) -> Interval:
    """Returns the confidence interval of the mean of one value a prompt, each in 0…1.

    Wilson's interval if every value is 0 or 1, as with one sample a prompt; otherwise the percentile bootstrap over prompts.
    If all values are equal, the bootstrap interval would have no width; then Wilson's is used, which is conservative.
    """
    if all(value in (0.0, 1.0) for value in values) or len(set(values)) < 2:
        return wilson(math.fsum(values), len(values), confidence)
    return Interval(*percentiles(bootstrap_means(values, seed), confidence), "bootstrap over prompts")


def mean_interval(estimates: Sequence[tuple[float, float, float]]) -> Interval:
    """Returns the interval of the mean of independent estimates, each (value, low, high), from their intervals (Zou and
    Donner 2008)."""
    count, value = len(estimates), sum(estimate[0] for estimate in estimates) / len(estimates)
    below = math.hypot(*(value - low for value, low, _ in estimates)) / count
    above = math.hypot(*(high - value for value, _, high in estimates)) / count
    return Interval(value - below, value + above, "combined from the intervals of the data sets")


def mcnemar(only_first: int, only_second: int) -> Test:
    """Runs McNemar's exact two-sided test on the rows that only one of two models got right: binomial with p = ½."""
    rows = only_first + only_second
    tail = sum(math.comb(rows, i) for i in range(min(only_first, only_second) + 1))
    return Test(min(1.0, float(Fraction(2 * tail, 2**rows))), "McNemar, exact")


def sign_flip(differences: Sequence[float], seed: int) -> Test:
    """Runs a permutation test of paired differences: without a true difference, each row's sign is random."""
    column = numpy.asarray([value for value in differences if value != 0.0], dtype=float)
    if len(column) == 0:
        return Test(1.0, "sign flips, exact")
    observed = abs(column.sum()) * (1 - 1e-9)  # equal sums count as equal, whatever the order of adding
    if len(column) <= EXACT_SIGNS:
        bits = (numpy.arange(2 ** len(column))[:, None] >> numpy.arange(len(column))) & 1
        sums = numpy.abs((1 - 2 * bits) @ column)
        return Test(float((sums >= observed).mean()), "sign flips, exact")
    generator, extreme = numpy.random.default_rng(seed), 0
    for _ in range(PERMUTATIONS // 100):
        signs = generator.integers(0, 2, size=(100, len(column))) * 2 - 1
        extreme += int((numpy.abs(signs @ column) >= observed).sum())
    return Test((1 + extreme) / (1 + PERMUTATIONS), f"sign flips, {PERMUTATIONS} drawn")


RELATIONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt, "==": operator.eq}


@dataclass(frozen=True)
class Estimate:
    """A mean over rows, with its confidence interval."""

    value: float
    low: float
    high: float
    method: str


@dataclass(frozen=True)
class DataScores:
    """The scores of one data set. Failed samples count as wrong in ``measures``, and are counted by reason in ``failed``."""

    rows: int
    samples: int
    reward: float
    """Mean over the judged samples (those that did not fail)."""

    truncated: float
    """Share of the judged samples that were cut at the length limit."""

    completion_length: float
    """Mean number of tokens of the judged samples."""

    extraction_failed: float | None
    """Share of the judged samples in which the reward found no answer; None if the reward extracts none."""

    failed: Mapping[str, int] = field(default_factory=dict)
    measures: Mapping[str, Estimate] = field(default_factory=dict)
    """``accuracy`` (the mean over all samples, with several samples also called avg@k), ``pass@k`` and ``maj@k``."""

    metrics: Mapping[str, float] = field(default_factory=dict)


def by_row(answers: Iterable[Answer]) -> dict[int, list[Answer]]:
    """Groups answers by row; rows and samples are in order."""
    rows: dict[int, list[Answer]] = defaultdict(list)
    for answer in answers:
        rows[answer.row].append(answer)
    return {row: sorted(rows[row], key=lambda answer: answer.sample) for row in sorted(rows)}


def vote_key(answer: str) -> str:
    """Returns a key that is equal for different spellings of an answer: the exact value of a plain number, otherwise the
    normalised text."""
    reading = read(answer)
    return reading.text if reading.number is None else str(reading.number)


def score_of(answer: Answer) -> float | None:
    """Returns the score of an answer in 0…1: the accuracy from the reward if there is one, otherwise the reward's value if
    it lies in 0…1, otherwise None. The score of a failed answer is 0."""
    if answer.failed is not None:
        return 0.0
    if answer.accuracy is not None:
        return answer.accuracy
    return answer.reward if answer.reward is not None and 0 <= answer.reward <= 1 else None


def judged_by(answers: Sequence[Answer], success: str | None) -> Sequence[Answer]:
    """Sets the accuracy of each answer by the rule ``success`` (`EvaluationConfig.success`); None changes nothing.

    Raises:
        ConfigError: the rule names a value that an answer lacks.
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
    """Returns the mean reward of each row's samples, without rows that have no judged sample."""
    rewards = {
        row: [answer.reward for answer in row_answers if answer.reward is not None]
        for row, row_answers in by_row(answers).items()
    }
    return {row: mean(row_rewards) for row, row_rewards in rewards.items() if row_rewards}


def row_values(answers: Sequence[Answer], ks: Sequence[int], *, votes: bool = True) -> dict[str, list[float]]:
    """Returns, for each measure, one value a row in the order of rows. ``answers``: those of one data set.

    A sample is correct if its score is 1. If a sample has no score, there are no measures. ``maj@k`` is missing if the
    reward extracts no answer, or if ``votes`` is False: under a user's rule of success, right answers may differ. Correct
    answers vote together, because each equals the expected one; wrong answers vote together if they have the same
    `vote_key`. Samples without an answer, and failed samples, do not vote.
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
    """Computes the scores of one data set. ``votes``: as for `row_values`."""
    rows = by_row(answers)
    judged = [answer for answer in answers if answer.failed is None]
    extractions = [answer.extracted for answer in judged if answer.extracted is not None]
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
        extraction_failed=mean([float(not extracted) for extracted in extractions]) if extractions else None,
        failed=dict(sorted(Counter(answer.failed for answer in answers if answer.failed is not None).items())),
        measures=measures,
        metrics={name: mean(values) for name, values in sorted(by_metric.items())},
    )


def mean(values: Sequence[float]) -> float:
    """Returns the mean; 0 if there are no values."""
    return sum(values) / len(values) if values else 0.0


def metrics_of(answers: Sequence[Answer], n_samples: int) -> dict[str, float]:
    """Computes the metrics of an evaluation in a training step: ``eval/<name>``, and with several data sets also
    ``eval/accuracy/<source>``."""
    rows = by_row(answers)
    judged = [answer for answer in answers if answer.failed is None]
    extractions = [answer.extracted for answer in judged if answer.extracted is not None]
    figures = {
        "reward": mean([answer.reward or 0.0 for answer in judged]),
        "completion_length": mean([float(answer.tokens) for answer in judged]),
        "truncated": mean([float(answer.truncated) for answer in judged]),
        "failed": float(len({a.row for a in answers if a.failed is not None}) if rows else 0),
    }
    if extractions:
        figures["extraction_failed"] = mean([float(not extracted) for extracted in extractions])
    figures |= {name: mean(values) for name, values in row_values(answers, usual_k(n_samples)).items()}
    sources = dict.fromkeys(answer.data for answer in answers)
    for source in sources if len(sources) > 1 else ():
        by_k = row_values([answer for answer in answers if answer.data == source], ())
        figures |= {f"accuracy/{source}": mean(values) for values in by_k.values()}
    return {f"eval/{name}": value for name, value in figures.items()}


EVERY_S = 5.0


class ProgressLine:
    """Prints a line every `EVERY_S` seconds: samples done, accuracy so far, tokens a second, and the remaining time."""

    def __init__(self, total: int, done: int, file: TextIO | None = None, *, success: str | None = None):
        """``total`` and ``done``: numbers of samples. ``file``: None is stderr. ``success``: `EvaluationConfig.success`."""
        self._success = success
        self.total, self.done, self.file = total, done, sys.stderr if file is None else file
        self._began = self._printed_at = time.monotonic()
        self.made = self._tokens = 0
        self._scores: list[float] = []
        if done:
            self._say(f"{done} of {total} samples are recorded already")

    def answered(self, answer: Answer) -> None:
        self.made += 1
        self.done += 1
        self._tokens += answer.tokens
        score = score_of(judged_by([answer], self._success)[0])
        if score is not None:
            self._scores.append(score)
        if time.monotonic() - self._printed_at >= EVERY_S:
            self._printed_at = time.monotonic()
            self._say(self.line(answer.data))

    def line(self, data: str) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        accuracy = f"  accuracy {sum(self._scores) / len(self._scores):.1%}" if self._scores else ""
        eta = duration((self.total - self.done) * seconds / max(1, self.made))
        return f"{data}  {self.done}/{self.total} samples{accuracy}  {self._tokens / seconds:.0f} tok/s  ETA {eta}"

    def summary(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        return f"{self.made} samples, {self._tokens} tokens in {duration(seconds)}, {self._tokens / seconds:.0f} tok/s"

    def _say(self, text: str) -> None:
        print(text, file=self.file, flush=True)


def interval_text(estimate: Estimate) -> str:
    """Writes an estimate in percent with its interval: `31.2 % [28.1, 34.5]`."""
    return f"{100 * estimate.value:.1f} % [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def table(results: Mapping[str, DataScores], average: Mapping[str, Estimate]) -> str:
    """Returns a table with a line for each data set and, if there are several, a line with the means over data sets."""
    names = list(dict.fromkeys(name for scores in results.values() for name in scores.measures))
    several = max((scores.samples for scores in results.values()), default=1)
    heads = [f"avg@{several}" if name == "accuracy" and several > 1 else name for name in names]
    lines = [["data", "rows", *(heads or ["reward"]), "truncated", "no answer", "failed", "tokens"]]
    for data, scores in results.items():
        measured = [interval_text(scores.measures[name]) if name in scores.measures else "–" for name in names]
        ending = [share(scores.truncated), share(scores.extraction_failed), str(sum(scores.failed.values()))]
        lines.append(
            [data, str(scores.rows), *(measured or [f"{scores.reward:.4g}"]), *ending, f"{scores.completion_length:.0f}"]
        )
    if average:
        lines.append(["mean", "", *(interval_text(average[name]) if name in average else "–" for name in names), *[""] * 4])
    return "\n".join(aligned(lines, figures=True))


def notes(results: Mapping[str, DataScores], answers: Iterable[Answer]) -> list[str]:
    """Returns lines with facts that the table leaves out: the methods of the intervals, and for each reason of failure the
    number of failed samples and the first of them."""
    first: dict[tuple[str, str | None], Answer] = {}
    for answer in answers:
        first.setdefault((answer.data, answer.failed), answer)
    lines = []
    methods = sorted({estimate.method for scores in results.values() for estimate in scores.measures.values()})
    if methods:
        lines.append(f"Intervals: {' or '.join(methods)}.")
    for data, scores in results.items():
        if not scores.measures:
            lines.append(
                f"{data}: the reward states no accuracy and not all its values lie in 0…1, so only its mean is given; for "
                "avg@k and pass@k say when a sample is right, such as --success 'reward >= 1' (nothing is generated again), "
                "or let the reward return a dict with `accuracy` (docs/writing_a_reward.md)."
            )
        if scores.failed:
            lines.append(f"{data}: samples that failed and count as wrong; all of them are in samples.jsonl, with `error`:")
        for reason, count in scores.failed.items():
            answer = first[data, reason]
            lines.append(f"  {reason} {count}, first row {answer.row}, sample {answer.sample}: {_cut(answer.error)}")
    return lines


def _cut(text: str, most: int = 300) -> str:
    """Returns the first line, cut to ``most`` characters."""
    line = text.partition("\n")[0]
    return line if len(line) <= most else f"{line[: most - 1]}…"
