"""Prompts by success rate: known draws, exactly once a round, resumable to the row."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.data import CurriculumConfig
from tandem.config.errors import ConfigError
from tandem.data.dataset import Dataset
from tandem.data.loader import Curriculum

RATES = st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=30)


def dataset(size):
    return Dataset([[{"question": str(i)} for i in range(size)]])


def curriculum(size, seed=0, round_rows=None, **options):
    config = CurriculumConfig(round_rows=max(1, size // 2) if round_rows is None else round_rows)
    return Curriculum(dataset(size), config, seed=seed, **options)


def told(rates, **options):
    one = curriculum(len(rates), **options)
    for index, rate in enumerate(rates):
        if rate is not None:
            one.observe(index, rate)
    return one


@given(rates=RATES, seed=st.integers(0, 5), floor=st.sampled_from([0.0, 0.05, 1.0]))
def test_a_round_has_each_row_at_most_once_and_is_repeated_by_the_seed(rates, seed, floor):
    first, second = (told(rates, seed=seed, floor=floor) for _ in range(2))
    rows = list(itertools.islice(first, 3 * first.epoch_size))
    assert rows == list(itertools.islice(second, len(rows)))
    assert all(count == 1 for count in Counter((row["tandem.epoch"], row["tandem.index"]) for row in rows).values())
    assert {row["tandem.epoch"] for row in rows} == {0, 1, 2}
    assert all(row["question"] == str(row["tandem.index"]) for row in rows)


@given(rates=RATES, before=st.integers(0, 40), after=st.integers(1, 40), seed=st.integers(0, 5))
def test_resuming_gives_the_rows_that_would_have_come(rates, before, after, seed):
    whole = told(rates, seed=seed)
    list(itertools.islice(whole, before))
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = curriculum(len(rates), seed=seed)
    resumed.load_state_dict(state)
    for index in range(0, len(rates), 2):  # both learn the same on the way
        whole.observe(index, 0.5)
        resumed.observe(index, 0.5)
    assert list(itertools.islice(resumed, after)) == list(itertools.islice(whole, after))
    assert resumed.state_dict() == whole.state_dict()


def test_another_data_set_or_seed_cannot_resume():
    state = curriculum(8).state_dict()
    with pytest.raises(ConfigError, match="num_rows was 8 and is 9"):
        curriculum(9).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed was 0 and is 1"):
        curriculum(8, seed=1).load_state_dict(state)


def test_rows_near_the_target_are_drawn_most_and_the_others_now_and_then():
    one = told([0.5] * 20 + [0.0] * 20 + [1.0] * 20, round_rows=20)
    next(one)  # round 0 was drawn when nothing was known
    drawn = Counter(one.dataset.rows[row["tandem.index"]]["question"] for row in itertools.islice(one, 19, 19 + 200 * 20))
    near, far = (sum(drawn[str(i)] for i in span) for span in (range(20), range(20, 60)))
    assert near > 2 * far > 0  # far are twice as many rows, of weight exp(−2) ≈ 0.135 each
    assert told([0.5, 0.0, None, 1.0]).weight(0) == told([0.5, 0.0, None, 1.0]).weight(2) == 1.0
    assert told([0.0]).weight(0) == pytest.approx(0.1353, abs=1e-4)
    assert told([0.0], width=0.1).weight(0) == 0.05  # the floor


def test_untried_rows_come_before_those_that_are_known_to_be_too_easy():
    one = told([1.0] * 10 + [None] * 10, round_rows=10, floor=0.0, width=0.05)
    list(itertools.islice(one, 10))
    assert {row["tandem.index"] for row in itertools.islice(one, 10)} == set(range(10, 20))


def test_what_is_known_is_mixed_with_what_is_new_and_clipped():
    one = curriculum(4, memory=0.75)
    one.observe(0, 3.0)  # a reward, not an accuracy
    assert one.rates[0] == 1.0
    one.observe(0, 0.0)
    assert one.rates[0] == 0.75
    one.observe(1, -1.0)
    assert one.metrics() == {"curriculum/measured": 0.5, "curriculum/round": 0.0, "curriculum/success": 0.375}


@pytest.mark.parametrize("rows", [0, 9])
def test_a_round_is_not_longer_than_the_data_set(rows):
    with pytest.raises(ConfigError, match="round_rows must lie in 1…8"):
        curriculum(8, round_rows=rows)


def test_the_likeliest_rows_of_a_round_do_not_all_come_first():
    one = told([None] * 10 + [1.0] * 10, round_rows=20, floor=0.0, width=0.05)
    rows = list(itertools.islice(one, 40))[20:]
    assert {row["tandem.index"] for row in rows[:10]} != set(range(10))
