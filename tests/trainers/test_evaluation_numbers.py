"""pass@k, maj@k, intervals and tests of significance, on numbers worked out by hand, by brute force and by simulation."""

import itertools
import math
import random

import numpy
import pytest

from tandem.evaluation.scores import (
    bootstrap_means,
    interval,
    maj_at_k,
    mcnemar,
    mean_interval,
    pass_at_k,
    percentiles,
    sign_flip,
    wilson,
)


@pytest.mark.parametrize(
    ("correct", "samples", "k", "value"),
    [
        (0, 8, 4, 0.0),
        (8, 8, 1, 1.0),
        (2, 8, 1, 0.25),
        (1, 4, 2, 0.5),
        (2, 5, 3, 0.9),
        (5, 8, 4, 1.0),
        (3, 10, 5, 1 - 21 / 252),
    ],
)
def test_pass_at_k_is_the_closed_form(correct, samples, k, value):
    assert pass_at_k(correct, samples, k) == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize(("samples", "correct"), [(6, 2), (7, 3), (7, 1)])
def test_pass_at_k_is_the_mean_over_all_subsets(samples, correct):
    right = [i < correct for i in range(samples)]
    for k in range(1, samples + 1):
        subsets = list(itertools.combinations(right, k))
        assert pass_at_k(correct, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_k_fresh_samples_is_not_biased():
    generator, rate, k = random.Random(1), 0.3, 4
    draws = [pass_at_k(sum(generator.random() < rate for _ in range(8)), 8, k) for _ in range(4000)]
    assert sum(draws) / len(draws) == pytest.approx(1 - (1 - rate) ** k, abs=0.015)


def vote(answers):
    """The share of the right answer, 'R', in a vote; a tie is shared."""
    counts = {a: answers.count(a) for a in set(answers) if a is not None}
    best = [a for a, n in counts.items() if n == max(counts.values())] if counts else []
    return ("R" in best) / len(best) if best else 0.0


@pytest.mark.parametrize(
    "answers", ["RRAAB", "RRRAA", "RAB", "RRAA", "RR---", "RAABBC", "R-AAB-", "AAB", "RRRR", "RRAABBC-"]
)
def test_maj_at_k_is_the_mean_vote_over_all_subsets(answers):
    given = [None if a == "-" else a for a in answers]
    wrong = [given.count(a) for a in sorted({a for a in given if a not in (None, "R")})]
    for k in range(1, len(given) + 1):
        subsets = list(itertools.combinations(given, k))
        expected = sum(vote(list(subset)) for subset in subsets) / len(subsets)
        assert maj_at_k(given.count("R"), wrong, given.count(None), k) == pytest.approx(expected, abs=1e-12), k


def test_maj_at_k_by_hand_and_for_many_samples():
    assert maj_at_k(1, [1], 0, 2) == 0.5  # a tie of two
    assert maj_at_k(2, [1], 0, 3) == 1.0
    assert maj_at_k(1, [1, 1], 0, 1) == pytest.approx(1 / 3)
    assert maj_at_k(30, [20, 10, *[1] * 4], 0, 64) == 1.0
    assert 0.5 < maj_at_k(30, [20, 10, *[1] * 4], 0, 16) < 1.0


@pytest.mark.parametrize(
    ("function", "arguments"), [(pass_at_k, (1, 4, 5)), (maj_at_k, (1, [1], 0, 3)), (pass_at_k, (1, 4, 0))]
)
def test_k_must_lie_among_the_samples(function, arguments):
    with pytest.raises(ValueError, match="number of samples"):
        function(*arguments)


def test_wilson_by_hand():
    low, high, _ = wilson(5, 10, 0.95)
    assert (low, high) == (pytest.approx(0.23659, abs=1e-5), pytest.approx(0.76341, abs=1e-5))
    low, high, _ = wilson(0, 20, 0.95)
    assert (low, high) == (0.0, pytest.approx(0.16113, abs=1e-5))
    assert wilson(20, 20, 0.95)[1] == 1.0


def test_wilson_covers_the_truth_as_often_as_it_says():
    generator, rate, rows = numpy.random.default_rng(0), 0.2, 120
    found = [wilson(int(generator.binomial(rows, rate)), rows, 0.95) for _ in range(1500)]
    assert 0.93 <= sum(low <= rate <= high for low, high, _ in found) / 1500 <= 0.97


def test_the_bootstrap_covers_the_truth_as_often_as_it_says():
    generator, rows, samples = numpy.random.default_rng(1), 100, 4
    covered = 0
    for trial in range(300):  # a rate of its own for each prompt, mean 0.4
        values = generator.binomial(samples, generator.beta(2, 3, size=rows)) / samples
        low, high, method = interval(list(values), confidence=0.95, seed=trial)
        assert method == "bootstrap over prompts"
        covered += low <= 0.4 <= high
    assert 0.92 <= covered / 300 <= 0.98


def test_which_interval_is_used_and_that_the_seed_decides():
    assert interval([1.0, 0.0, 1.0], confidence=0.95, seed=0) == wilson(2, 3, 0.95)
    assert interval([0.5] * 9, confidence=0.95, seed=0).method == "wilson"  # a bootstrap would have no width
    values = [0.25, 0.5, 1.0, 0.0, 0.75]
    one, other = (interval(values, confidence=0.95, seed=seed) for seed in (0, 0))
    assert one == other
    assert list(bootstrap_means(values, 0)) != list(bootstrap_means(values, 1))


def test_the_mean_of_data_sets_has_an_interval_from_theirs():
    assert mean_interval([(0.4, 0.3, 0.5)])[:2] == (pytest.approx(0.3), pytest.approx(0.5))
    low, high, _ = mean_interval([(0.4, 0.1, 0.7), (0.6, 0.2, 1.0)])
    assert (low, high) == (pytest.approx(0.5 - 0.25), pytest.approx(0.5 + 0.25))  # √(0.3² + 0.4²) / 2


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (10, 2, 2 * (1 + 12 + 66) / 4096), (3, 3, 1.0), (2, 10, 158 / 4096)],
)
def test_mcnemar_by_hand(only_first, only_second, p):
    assert mcnemar(only_first, only_second).p_value == pytest.approx(p, abs=1e-12)


def test_mcnemar_takes_many_rows():
    assert 0 < mcnemar(700, 900).p_value < 1e-5


def test_sign_flips_by_hand():
    assert sign_flip([0.0, 0.0], 0).p_value == 1.0
    assert sign_flip([1.0, 1.0, 1.0], 0).p_value == pytest.approx(2 / 8)
    assert sign_flip([0.5, 0.25, 0.0, -0.25], 0).p_value == pytest.approx(6 / 8)  # |±.5 ±.25 ±.25| ≥ .5
    assert sign_flip([1.0] * 5, 0).p_value == mcnemar(5, 0).p_value


def test_many_sign_flips_are_drawn_and_agree_with_the_exact_test():
    ones = [1.0] * 14 + [-1.0] * 6
    drawn = sign_flip(ones, 3)
    assert "drawn" in drawn.method
    assert drawn.p_value == pytest.approx(mcnemar(14, 6).p_value, abs=0.01)
    assert sign_flip(ones, 3) == drawn


def test_under_no_difference_the_tests_reject_as_seldom_as_they_say():
    generator, rejected = numpy.random.default_rng(2), 0
    for _ in range(400):
        first, second = generator.binomial(4, 0.4, size=(2, 12)) / 4
        rejected += sign_flip(list(second - first), 0).p_value < 0.05
    assert rejected / 400 <= 0.07


def test_percentiles_are_the_middle():
    low, high = percentiles(numpy.arange(1001.0), 0.9)
    assert (low, high) == (pytest.approx(50.0), pytest.approx(950.0))
    assert math.isclose(low + high, 1000.0)
