"""Metrics of a batch, by hand."""

import pytest
import torch

from tandem.api.requests import StopReason
from tandem.api.workflow import Group, Sample, Trajectory
from tandem.rollout.batch_statistics import batch_metrics
from tandem.rollout.executor import collate


def sample(reward, *versions, stop=StopReason.STOP, **fields):
    """One trajectory: a prompt token, then a trained token of each of these versions."""
    size = 1 + len(versions)
    trajectory = Trajectory(
        torch.arange(size), torch.arange(size) > 0, torch.zeros(size), torch.tensor([-1, *versions]), stop_reason=stop
    )
    return Sample((trajectory,), reward, **fields)


def metrics_of(*groups, version=5, eta=1, replayed=()):
    batch = collate(groups, version=version, max_head_offpolicyness=eta, replayed=replayed, max_age=9)
    return batch_metrics(groups, batch, version=version)


GROUPS = (
    Group((sample(9.0, 5, 5), sample(1.0, 5), sample(1.0, 4, stop=StopReason.LENGTH)), group_id=3, source="a"),
    Group((sample(5.0, 4, 3, 2), sample(70.0, 5, in_statistics=False)), group_id=4, source="b"),
)


def test_rewards_lengths_and_truncation_of_a_batch():
    """Rewards 9, 1, 1, 5 count: mean 4, variance (25 + 9 + 9 + 1)/4 = 11; lengths 2, 1, 1, 3, 1."""
    found = metrics_of(*GROUPS)
    expected = {
        "reward/mean": 4.0,
        "reward/std": 11**0.5,
        "completion_length/mean": 1.6,
        "completion_length/max": 3.0,
        "truncated": 0.2,
        "groups/without_spread": 0.5,
        "groups/size": 2.5,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert "accuracy" not in found
    assert "extracted" not in found


def test_rewards_by_source_are_of_samples_in_statistics_where_there_are_several():
    found = metrics_of(*GROUPS)
    assert found["reward/a"] == pytest.approx(11 / 3)
    assert found["reward/b"] == 5.0
    assert not [name for name in metrics_of(GROUPS[0]) if name in ("reward/a", "reward/b")]


def test_ages_are_of_tokens_that_are_trained_and_of_new_groups_alone():
    """At version 5 and η = 1 the tokens of versions 3 and 2 are expired; a replayed group does not count."""
    found = metrics_of(*GROUPS, replayed=[Group((sample(1.0, 0, 0, 0),), group_id=1)])
    assert found["expired"] == pytest.approx(2 / 8)
    assert found["staleness/mean"] == pytest.approx(2 / 6)
    assert found["staleness/max"] == 1.0


def test_accuracy_named_rewards_and_own_metrics_are_means_over_those_that_have_them():
    group = Group(
        (
            sample(1.0, 5, accuracy=1.0, extracted=True, rewards={"form": 0.5}, metrics={"turns": 3.0}),
            sample(0.0, 5, accuracy=0.0, extracted=False, metrics={"turns": 1.0}),
            sample(0.0, 5, accuracy=1.0, greedy=True, in_statistics=False, in_loss=False),
            sample(0.0, 5, extracted=False, rewards={"form": 0.0}),
        )
    )
    found = metrics_of(group)
    assert (found["accuracy"], found["extracted"]) == (0.5, pytest.approx(1 / 3))
    assert (found["rewards/form"], found["turns"]) == (0.25, 2.0)
