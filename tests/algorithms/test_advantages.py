"""Advantages against their closed forms."""

import pytest
import torch

from tandem.algorithms.advantages import dr_grpo, grpo, reinforce, rloo

GROUP_RELATIVE = [grpo, dr_grpo, rloo]
REWARDS = torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1])
GROUPS = torch.tensor([7] * 4 + [3] * 3 + [9] * 4)


def everyone(rewards):
    return torch.ones(len(rewards), dtype=torch.bool)


def test_grpo_of_two_right_and_two_wrong():
    found = grpo(torch.tensor([1.0, 0, 1, 0]), torch.zeros(4, dtype=torch.int64), everyone(range(4)))
    assert found.tolist() == pytest.approx([0.86602, -0.86602, 0.86602, -0.86602], abs=1e-5)


def test_grpo_of_three_groups_of_different_sizes():
    found = grpo(REWARDS, GROUPS, everyone(REWARDS))
    assert found[4:7].tolist() == [0, 0, 0]
    assert found[7:].tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-5)  # std of 0, 0, 0, 1 is 1/2


@pytest.mark.parametrize("advantage", GROUP_RELATIVE)
def test_a_group_is_found_by_its_number_and_not_by_its_place(advantage):
    order = torch.tensor([10, 4, 0, 7, 5, 1, 8, 2, 6, 9, 3])
    shuffled = advantage(REWARDS[order], GROUPS[order], everyone(REWARDS))
    assert torch.equal(shuffled, advantage(REWARDS, GROUPS, everyone(REWARDS))[order])


@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3])
@pytest.mark.parametrize("advantage", GROUP_RELATIVE)
def test_equal_rewards_give_exactly_zero_whatever_their_rounding(advantage, value):
    for size in range(2, 65):  # of many of these the mean is not the value
        rewards = torch.full((size,), value, dtype=torch.float64)
        assert not advantage(rewards, torch.zeros(size, dtype=torch.int64), everyone(rewards)).any()


@pytest.mark.parametrize("advantage", GROUP_RELATIVE)
def test_a_group_of_one_gives_zero(advantage):
    found = advantage(torch.tensor([5.0, 1, 0]), torch.tensor([1, 2, 2]), everyone(range(3)))
    assert found[0] == 0
    assert found[1] > 0 > found[2]


def test_rloo_and_dr_grpo_of_two_samples():
    arguments = torch.tensor([1.0, 0]), torch.tensor([4, 4]), everyone(range(2))
    assert rloo(*arguments).tolist() == [1, -1]
    assert dr_grpo(*arguments).tolist() == [0.5, -0.5]


def test_rloo_compares_with_the_others():
    found = rloo(torch.tensor([1.0, 2, 6]), torch.zeros(3, dtype=torch.int64), everyone(range(3)))
    assert found.tolist() == [1 - 4, 2 - 3.5, 6 - 1.5]


def test_a_sample_outside_the_statistics_is_judged_by_them_and_does_not_change_them():
    rewards, groups = torch.tensor([1.0, 0, 9]), torch.zeros(3, dtype=torch.int64)
    inside = torch.tensor([True, True, False])
    assert dr_grpo(rewards, groups, inside).tolist() == [0.5, -0.5, 8.5]
    assert rloo(rewards, groups, inside).tolist() == [1, -1, 8.5]
    assert grpo(rewards, groups, inside).tolist() == pytest.approx([0.70711, -0.70711, 12.02082], abs=1e-3)


@pytest.mark.parametrize("outside", [0.0, 5.0])
@pytest.mark.parametrize("equal", [1.0, -1.0])
@pytest.mark.parametrize("advantage", GROUP_RELATIVE)
def test_a_sample_outside_the_statistics_gives_a_group_of_equal_rewards_no_spread(advantage, equal, outside):
    inside = torch.tensor([True, True, False])
    assert not advantage(torch.tensor([equal, equal, outside]), torch.zeros(3, dtype=torch.int64), inside).any()


@pytest.mark.parametrize("advantage", GROUP_RELATIVE)
def test_a_group_with_nobody_in_statistics_gives_zero(advantage):
    outside = torch.zeros(2, dtype=torch.bool)
    assert advantage(torch.tensor([1.0, 0]), torch.zeros(2, dtype=torch.int64), outside).tolist() == [0, 0]


def test_reinforce_is_the_return_to_go_within_each_trajectory():
    rewards = torch.tensor([0.0, 0.25, 0, 1, 0.5, 0, 0.7])
    sequence = torch.tensor([0, 0, 0, 0, 2, 2, 3])
    assert reinforce(rewards, sequence).tolist() == [1.25, 1.25, 1, 1, 0.5, 0, torch.tensor(0.7).item()]


def test_reinforce_of_nothing_is_nothing():
    assert reinforce(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []
