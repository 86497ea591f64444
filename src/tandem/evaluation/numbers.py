"""Estimates from k samples a prompt, and their certainty: pure functions of counts and of one value a prompt."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from statistics import NormalDist
from typing import NamedTuple

import numpy

BOOTSTRAP_DRAWS = 2000
PERMUTATIONS = 20000
EXACT_SIGNS = 14
"""Up to so many rows that differ, all sign flips are tried; beyond, `PERMUTATIONS` random ones."""


class Interval(NamedTuple):
    """A confidence interval, and how it was made."""

    low: float
    high: float
    method: str


class Test(NamedTuple):
    """A two-sided test of no difference."""

    p_value: float
    method: str


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Probability that among k of the samples, drawn without replacement, one is correct: 1 − C(n−c, k)/C(n, k).

    Unbiased for k fresh samples (arXiv:2107.03374). Raises `ValueError` unless 1 ≤ k ≤ ``samples``.
    """
    _check_k(k, samples)
    return float(1 - Fraction(math.comb(samples - correct, k), math.comb(samples, k)))


def maj_at_k(correct: int, wrong: Sequence[int], silent: int, k: int) -> float:
    """Probability that the right answer wins the vote of k of the samples, drawn without replacement; exact.

    ``correct`` samples gave the right answer, ``wrong`` has the count of each wrong answer, ``silent`` gave none and do not
    vote. A tie is broken at random: right among r tied answers counts 1/r. The mean over all C(n, k) subsets is
    unbiased for k fresh samples; it is counted, not sampled.
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
    """Sum over the votes t for the right answer of the ways in which no other has more, each tie shared."""
    total = Fraction(0)
    for votes in range(1, min(correct, k) + 1):
        ways = Counter({(k - votes, 0): math.comb(correct, votes)})  # (draws left, answers tied with ours) → ways
        for count in wrong:
            ways = _with_answer(ways, count, votes)
        for (left, tied), number in ways.items():
            if left <= silent:
                total += Fraction(number * math.comb(silent, left), tied + 1)
    return float(total / math.comb(correct + sum(wrong) + silent, k))


def _with_answer(ways: "Counter[tuple[int, int]]", count: int, votes: int) -> "Counter[tuple[int, int]]":
    """One more wrong answer, given ``count`` times, gets at most ``votes`` of the draws left."""
    found: Counter[tuple[int, int]] = Counter()
    for (left, tied), number in ways.items():
        for drawn in range(min(count, votes, left) + 1):
            found[left - drawn, tied + (drawn == votes)] += number * math.comb(count, drawn)
    return found


def wilson(successes: float, trials: int, confidence: float) -> Interval:
    """Wilson's score interval for a share (JASA 22, 1927)."""
    if trials == 0:
        return Interval(0.0, 1.0, "wilson")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, square = successes / trials, z * z / trials
    centre = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    return Interval(max(0.0, centre - half), min(1.0, centre + half), "wilson")


def bootstrap_means(values: Sequence[float], seed: int, draws: int = BOOTSTRAP_DRAWS) -> numpy.ndarray:
    """Means of ``draws`` resamples of the prompts, ``[draws]``; the same for the same seed and number of values."""
    column, generator = numpy.asarray(values, dtype=float), numpy.random.default_rng(seed)
    means = []
    for start in range(0, draws, 100):  # a hundred at a time: the indices of all would be large
        chosen = generator.integers(0, len(column), size=(min(100, draws - start), len(column)))
        means.append(column[chosen].mean(axis=1))
    return numpy.concatenate(means)


def percentiles(means: numpy.ndarray, confidence: float) -> tuple[float, float]:
    """The middle ``confidence`` of the resampled means."""
    low, high = numpy.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def interval(values: Sequence[float], *, confidence: float, seed: int) -> Interval:
    """For the mean of one value a prompt, each in 0…1.

    Wilson where every value is 0 or 1 (one sample a prompt, say); else the percentile bootstrap over prompts. Where all
    prompts agree the bootstrap would have no width: then it is Wilson's over prompts, which is wider than need be.
    """
    if all(value in (0.0, 1.0) for value in values) or len(set(values)) < 2:
        return wilson(math.fsum(values), len(values), confidence)
    return Interval(*percentiles(bootstrap_means(values, seed), confidence), "bootstrap over prompts")


def mean_interval(estimates: Sequence[tuple[float, float, float]]) -> Interval:
    """For the mean of independent estimates, each (value, low, high), from their intervals (Zou and Donner 2008)."""
    count, value = len(estimates), sum(estimate[0] for estimate in estimates) / len(estimates)
    below = math.hypot(*(value - low for value, low, _ in estimates)) / count
    above = math.hypot(*(high - value for value, _, high in estimates)) / count
    return Interval(value - below, value + above, "combined from the intervals of the data sets")


def mcnemar(only_first: int, only_second: int) -> Test:
    """Exact two-sided test on the rows that only one of two got right: binomial with p = ½."""
    rows = only_first + only_second
    tail = sum(math.comb(rows, i) for i in range(min(only_first, only_second) + 1))
    return Test(min(1.0, float(Fraction(2 * tail, 2**rows))), "McNemar, exact")


def sign_flip(differences: Sequence[float], seed: int) -> Test:
    """Permutation test of paired differences: under no difference each row's sign is a coin's."""
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
