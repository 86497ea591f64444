"""Reward shaping, and which groups are kept."""

import pytest
import torch

from tandem.algorithms.filters import accuracy_band, dynamic_sampling, keep_all
from tandem.algorithms.shaping import bias, clip, mask_truncated, overlong, penalize_truncated, scale

REWARDS = torch.tensor([1.0, -2.0, 0.5])
TRUNCATED = torch.tensor([False, True, False])


def test_scale_bias_and_clip():
    assert scale(REWARDS, factor=2.0).tolist() == [2, -4, 1]
    assert bias(REWARDS, offset=-1.0).tolist() == [0, -3, -0.5]
    assert clip(REWARDS, low=-1.0, high=0.75).tolist() == [0.75, -1, 0.5]


def test_overlong_falls_from_zero_to_minus_one_over_the_buffer():
    lengths = torch.tensor([100, 16384, 18432, 20480, 30000])
    found = overlong(torch.zeros(5), lengths, max_tokens=20480, buffer_tokens=4096)
    assert found.tolist() == [0, 0, -0.5, -1, -1]


def test_overlong_takes_a_fifth_as_its_buffer():
    assert overlong(torch.ones(3), torch.tensor([80, 90, 100]), max_tokens=100).tolist() == [1, 0.5, 0]
    assert overlong(torch.ones(2), torch.tensor([1, 2]), max_tokens=2).tolist() == [1, 0]


def test_overlong_refuses_a_buffer_beyond_the_limit():
    with pytest.raises(ValueError, match=r"at most max_tokens \(10\), got 11"):
        overlong(REWARDS, torch.tensor([1, 2, 3]), max_tokens=10, buffer_tokens=11)


def test_truncated_samples_lose_their_weight_or_some_reward():
    rewards, kept = mask_truncated(REWARDS, TRUNCATED)
    assert rewards.tolist() == REWARDS.tolist()
    assert kept.tolist() == [True, False, True]
    assert penalize_truncated(REWARDS, TRUNCATED, penalty=0.25).tolist() == [1, -2.25, 0.5]


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ([1.0, 0.0, 1.0], (True, "")),
        ([1.0, 1.0], (False, "all_correct")),
        ([0.0, 0.0], (False, "none_correct")),
        ([0.2, 0.4], (False, "none_correct")),
        ([1.0], (False, "all_correct")),
    ],
)
def test_dynamic_sampling_judges_accuracy_and_not_the_reward(accuracies, verdict):
    assert dynamic_sampling(accuracies, [0.1 * i for i in range(len(accuracies))]) == verdict


def test_dynamic_sampling_without_accuracy_asks_for_different_rewards():
    assert dynamic_sampling([None, None], [0.0, 0.3]) == (True, "")
    assert dynamic_sampling([None, 1.0], [0.3, 0.3]) == (False, "no_spread")


def test_accuracy_band_has_its_bounds_inside():
    band = {"low": 0.25, "high": 0.75}
    assert accuracy_band([1.0, 0, 0, 0], [9.0] * 4, **band) == (True, "")
    assert accuracy_band([0.0, 0, 0, 0], [9.0] * 4, **band) == (False, "too_hard")
    assert accuracy_band([1.0] * 4, [9.0] * 4, **band) == (False, "too_easy")
    assert accuracy_band([None, None], [1.0, 0.0], **band) == (True, "")


def test_no_filter_keeps_every_group():
    assert keep_all([0.0], [0.0]) == (True, "")
