"""The loader: each row once an epoch, in an order of seed and epoch, from wherever it was stopped."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.data.dataset import Dataset, load_dataset
from tandem.data.loader import Loader


def dataset(size):
    return Dataset([[{"question": str(i)} for i in range(size)]])


def take(loader, count):
    return [(row["tandem.epoch"], row["tandem.index"]) for row in itertools.islice(loader, count)]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(0, 100), st.integers(0, 100), st.booleans())
def test_resumed_equals_uninterrupted(size, before, after, shuffle):
    whole = take(Loader(dataset(size), seed=3, shuffle=shuffle), before + after)
    first = Loader(dataset(size), seed=3, shuffle=shuffle)
    start = take(first, before)
    second = Loader(dataset(size), seed=3, shuffle=shuffle)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert start + take(second, after) == whole


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(0, 5))
def test_each_epoch_has_every_row_once(size, seed):
    rows = take(Loader(dataset(size), seed=seed, epochs=3), 1000)
    assert len(rows) == 3 * size
    for epoch in range(3):
        assert sorted(i for e, i in rows if e == epoch) == list(range(size))


def test_the_order_depends_on_seed_and_epoch_and_is_the_files_without_shuffling():
    rows = take(Loader(dataset(50), seed=0), 100)
    assert [i for _, i in rows[:50]] != [i for _, i in rows[50:]]
    assert take(Loader(dataset(50), seed=0), 100) == rows != take(Loader(dataset(50), seed=1), 100)
    assert take(Loader(dataset(3), shuffle=False), 4) == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_rows_are_copies():
    data = dataset(1)
    loader = Loader(data)
    next(loader)["question"] = "changed"
    assert next(loader)["question"] == "0"


def test_resuming_with_other_data_is_refused():
    state = Loader(dataset(5)).state_dict()
    with pytest.raises(ConfigError, match="num_rows was 5 and is 6 now"):
        Loader(dataset(6)).load_state_dict(state)


def test_the_index_leads_back_to_the_row():
    data = load_dataset(DatasetConfig("addition", size=9))
    assert all(data.rows[row["tandem.index"]]["question"] == row["question"] for row in itertools.islice(Loader(data), 20))
