"""Mini-batches: whole groups, every sequence once an epoch, the same every time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.api.batch import num_sequences, select
from tandem.roles.actor import mini_batches
from tests.roles.batches import rollout_batch

RAGGED = [[(1.0, 2)] * 3, [(0.0, 1)], [(0.0, 4)] * 2, [(1.0, 1)] * 4, [(0.5, 2)] * 2]


def ids(parts, field="group_id"):
    return [part[field].tolist() for part in parts]


def test_one_epoch_goes_through_the_groups_in_order():
    parts = list(mini_batches(rollout_batch(RAGGED), 2, 1, seed=0))
    assert ids(parts) == [[100, 100, 100, 101, 102, 102], [103] * 4 + [104] * 2]


def test_a_group_whose_sequences_lie_apart_is_not_divided():
    apart = select(rollout_batch([[(1.0, 2)] * 2, [(0.0, 2)] * 2]), [0, 2, 1, 3])
    assert ids(mini_batches(apart, 2, 1, seed=0)) == [[100, 100], [101, 101]]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 7), epochs=st.integers(1, 3), seed=st.integers(0, 5))
def test_every_epoch_has_every_sequence_once_and_whole_groups(count, epochs, seed):
    batch = rollout_batch(RAGGED)
    parts = list(mini_batches(batch, count, epochs, seed))
    per_epoch = min(count, len(RAGGED))
    assert len(parts) == epochs * per_epoch
    for epoch in range(epochs):
        mine = parts[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(i for part in ids(mine, "sample_id") for i in part) == sorted(batch["sample_id"].tolist())
        assert sum(len(set(groups)) for groups in ids(mine)) == len(RAGGED)
        sizes = [len(set(groups)) for groups in ids(mine)]
        assert max(sizes) - min(sizes) <= 1


def test_several_epochs_shuffle_by_the_seed_and_repeat():
    batch = rollout_batch([[(1.0, 1)]] * 8)
    first, again, other = (ids(mini_batches(batch, 8, 2, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first[:8] != first[8:]


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_empty_batch_gives_no_mini_batch(epochs):
    empty = select(rollout_batch(RAGGED), torch.zeros(12, dtype=torch.bool))
    assert num_sequences(empty) == 0
    assert list(mini_batches(empty, 2, epochs, seed=0)) == []
