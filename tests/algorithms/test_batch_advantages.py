"""Advantages with baselines other than the group's own mean, on numbers worked by hand."""

import math

import pytest
import torch

from tandem.algorithms.advantages import cpgd, gdpo, lite_ppo, max_rl, opo, reinforce_pp_baseline, remax
from tandem.algorithms.registry import ADVANTAGES
from tandem.config.parts import PARTS

REWARDS = torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1])
GROUP_RELATIVE = [name for name, part in PARTS["advantage"].items() if part.needs_group]
GROUPS = torch.tensor([7, 7, 7, 7, 2, 2, 2, 9, 9, 9, 9])
CENTRED = [0.5, -0.5, 0.5, -0.5, 0, 0, 0, -0.25, -0.25, -0.25, 0.75]
EVERYONE = torch.ones(11, dtype=torch.bool)


def everyone(n):
    return torch.ones(n, dtype=torch.bool)


def called(name, rewards, groups, inside, lengths=None):
    """Any advantage that compares within a group."""
    function = ADVANTAGES.get(name)
    given = {
        "rewards": rewards,
        "named_rewards": {"only": rewards},
        "group_id": groups,
        "in_statistics": inside,
        "lengths": torch.full_like(groups, 3) if lengths is None else lengths,
    }
    return function(**{key: given[key] for key in ADVANTAGES.inputs_of(function)})


def test_lite_ppo_divides_by_the_spread_of_the_whole_batch():
    spread = math.sqrt((6 * (5 / 11) ** 2 + 5 * (6 / 11) ** 2) / 10)
    assert lite_ppo(REWARDS, GROUPS, EVERYONE).tolist() == pytest.approx([x / spread for x in CENTRED])


def test_lite_ppo_of_equal_rewards_is_zero():
    assert lite_ppo(torch.full((7,), 0.7), torch.tensor([0, 0, 0, 1, 1, 1, 1]), everyone(7)).tolist() == [0] * 7


def test_reinforce_pp_baseline_whitens_all_samples_and_leaves_equal_groups_at_zero():
    variance = sum(x * x for x in CENTRED) / 10
    found = reinforce_pp_baseline(REWARDS, GROUPS, EVERYONE)
    assert found.tolist() == pytest.approx([x / math.sqrt(variance + 1e-8) for x in CENTRED])
    assert found[4:7].tolist() == [0, 0, 0]


def test_remax_compares_with_the_greedy_sample_which_gets_nothing_itself():
    greedy = torch.tensor([False, True, False, True, False])
    found = remax(torch.tensor([1.0, 0.25, 0, 1, 0.5]), torch.tensor([3, 3, 3, 8, 8]), greedy)
    assert found.tolist() == [0.75, 0, -0.25, 0, -0.5]


def test_remax_without_a_greedy_sample_names_the_group():
    with pytest.raises(ValueError, match="group 8 has no greedy sample"):
        remax(torch.ones(3), torch.tensor([3, 3, 8]), torch.tensor([True, False, False]))


def test_opo_weighs_the_baseline_by_length():
    found = opo(torch.tensor([1.0, 0, 1]), torch.zeros(3, dtype=torch.int64), everyone(3), torch.tensor([1, 4, 5]))
    assert found.tolist() == pytest.approx([0.4, -0.6, 0.4])  # baseline (1 + 5)/10


def test_opo_of_equal_lengths_is_dr_grpo():
    lengths = torch.full((11,), 4)
    assert opo(REWARDS, GROUPS, EVERYONE, lengths).tolist() == pytest.approx(CENTRED)


def test_max_rl_divides_by_the_mean():
    assert max_rl(REWARDS, GROUPS, EVERYONE).tolist() == [1, -1, 1, -1, 0, 0, 0, -1, -1, -1, 3]


def test_max_rl_is_zero_where_the_mean_is_not_positive():
    rewards = torch.tensor([-1.0, 1, -1, 0.5])
    assert max_rl(rewards, torch.tensor([0, 0, 1, 1]), everyone(4)).tolist() == [0, 0, 0, 0]


def test_gdpo_normalises_each_reward_by_itself():
    named = {"right": torch.tensor([1.0, 0, 1, 0]), "short": torch.tensor([100.0, 300, 0, 0])}
    groups = torch.tensor([0, 0, 1, 1])
    z = 0.5 / (math.sqrt(0.5) + 1e-6)  # of a pair, whatever its scale
    total = [z - z, -z + z, z, -z]
    variance = 2 * z * z / 3
    expected = [x / math.sqrt(variance + 1e-8) for x in total]
    assert gdpo(named, groups, everyone(4)).tolist() == pytest.approx(expected, abs=1e-5)


def test_gdpo_weighs_the_rewards():
    named = {"right": torch.tensor([1.0, 0, 1, 0]), "short": torch.tensor([100.0, 300, 0, 0])}
    groups = torch.tensor([0, 0, 1, 1])
    alone = gdpo({"right": named["right"]}, groups, everyone(4))
    assert gdpo(named, groups, everyone(4), weights="short=0").tolist() == alone.tolist()
    found = gdpo(named, groups, everyone(4), weights="right=1, short=-0.5")
    assert float(found[0] / found[2]) == pytest.approx(1.5, rel=1e-5)


def test_gdpo_leaves_a_sample_without_a_reward_out_of_its_statistics():
    named = {"right": torch.tensor([1.0, 0, 1]), "tests": torch.tensor([1.0, 0, math.nan])}
    found = gdpo(named, torch.zeros(3, dtype=torch.int64), everyone(3))
    assert torch.isfinite(found).all()
    assert found[0] > found[2] > found[1]


@pytest.mark.parametrize(("weights", "words"), [("long=1", "names 'long'; the rewards are right"), ("right=x", "could not")])
def test_gdpo_says_what_is_wrong_with_its_weights(weights, words):
    with pytest.raises(ValueError, match=words):
        gdpo({"right": torch.ones(2)}, torch.zeros(2, dtype=torch.int64), everyone(2), weights=weights)


def test_gdpo_needs_named_rewards():
    with pytest.raises(ValueError, match="needs named rewards"):
        gdpo({}, torch.zeros(2, dtype=torch.int64), everyone(2))


def test_cpgd_weighs_in_three_ways():
    deviation = math.sqrt(1 / 3)
    by_std = cpgd(REWARDS, GROUPS, EVERYONE)
    assert by_std[:4].tolist() == pytest.approx([x * 0.5 / (deviation + 1e-6) for x in (1, -1, 1, -1)])
    assert cpgd(REWARDS, GROUPS, EVERYONE, weighting="groups").tolist() == pytest.approx([1.5 * x for x in CENTRED])
    assert cpgd(REWARDS, GROUPS, EVERYONE, weighting="none").tolist() == CENTRED


def test_cpgd_caps_the_weight_of_groups_and_has_one_where_none_differs():
    rewards, groups = torch.tensor([1.0, 0, *[1] * 8]), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    assert cpgd(rewards, groups, everyone(10), weighting="groups")[:2].tolist() == [1.5, -1.5]  # 5/1 is capped at 3
    assert cpgd(torch.ones(4), torch.tensor([0, 0, 1, 1]), everyone(4), weighting="groups").tolist() == [0] * 4
    with pytest.raises(ValueError, match="must be std, groups or none, got 'mean'"):
        cpgd(rewards, groups, everyone(10), weighting="mean")


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_group_of_one_and_a_group_without_spread_get_exactly_zero(name):
    found = called(name, torch.tensor([5.0, 0.7, 0.7, 0.7, 1, 0]), torch.tensor([4, 6, 6, 6, 1, 1]), everyone(6))
    assert found[:4].tolist() == [0, 0, 0, 0]
    assert found[4] > 0 > found[5]


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_equal_rewards_give_exactly_zero_at_any_length_whoever_is_outside(name):
    for reward in (0.7, 0.1, -1 / 3):
        rewards = torch.tensor([reward] * 7 + [5.0])
        inside = torch.tensor([True] * 7 + [False])
        found = called(name, rewards, torch.full((8,), 3), inside, torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]))
        assert not found.any()


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_groups_are_found_by_number_in_any_order(name):
    order = torch.tensor([10, 4, 0, 7, 5, 1, 8, 2, 6, 9, 3])
    lengths = torch.arange(1, 12)
    whole = called(name, REWARDS, GROUPS, EVERYONE, lengths)
    shuffled = called(name, REWARDS[order], GROUPS[order], EVERYONE, lengths[order])
    assert shuffled.tolist() == pytest.approx(whole[order].tolist())


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_what_is_outside_the_statistics_does_not_change_those_inside(name):
    inside = torch.tensor([True, True, True, False])
    groups = torch.zeros(4, dtype=torch.int64)
    some = [called(name, torch.tensor([1.0, 0, 1, x]), groups, inside)[:3].tolist() for x in (0.0, 9.0)]
    alone = called(name, torch.tensor([1.0, 0, 1]), groups[:3], everyone(3)).tolist()
    assert some[0] == pytest.approx(alone) and some[1] == pytest.approx(alone)


@pytest.mark.parametrize("name", sorted(set(GROUP_RELATIVE) - {"max_rl"}))
def test_adding_a_constant_to_the_rewards_of_a_group_changes_nothing(name):
    shift = (
        torch.tensor([2.0])
        if name == "lite_ppo"
        else torch.tensor([2.0, -1.0, 0.5])[torch.unique(GROUPS, return_inverse=True)[1]]
    )
    moved = called(name, REWARDS + shift, GROUPS, EVERYONE)
    assert moved.tolist() == pytest.approx(called(name, REWARDS, GROUPS, EVERYONE).tolist(), abs=1e-6)
