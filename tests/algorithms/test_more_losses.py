"""Losses of single tokens beyond PPO's, on numbers worked by hand: values and gradients."""

import math

import pytest
import torch

from tandem.algorithms.losses import clipped_value_loss
from tandem.algorithms.policy_losses import (
    cispo,
    clip_cov,
    covariance,
    cpgd,
    dppo,
    highest_covariance,
    kl_cov,
    largest,
    m2po,
    ppo_clip,
    random_high_covariance,
    sapo,
    top_entropy,
    within_second_moment,
)
from tests.algorithms.tensors import gradient, policy_at


def all_of(count):
    return torch.ones(count, dtype=torch.bool)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_two_sided_bounds_the_ratio_of_a_negative_advantage():
    policy, proximal = policy_at(10, 3, 10, 0.5)
    advantages = numbers(-1, -1, 1, -1)
    losses, slope, _ = gradient(
        lambda **k: ppo_clip(**k, two_sided=4.0), policy, proximal=proximal, advantages=advantages, mask=all_of(4)
    )
    assert losses.tolist() == pytest.approx([4, 3, -1.2, 0.8])
    assert slope.tolist() == pytest.approx([0, 3, 0, 0])


@pytest.mark.parametrize("two_sided", [1.0, 0.5, -1.0])
def test_two_sided_is_off_or_above_one(two_sided):
    zeros = numbers(0, 0)
    with pytest.raises(ValueError, match="two_sided must be above 1, or 0 for off"):
        ppo_clip(zeros, zeros, zeros, all_of(2), two_sided=two_sided)


def test_cispo_keeps_the_gradient_of_every_token_and_clips_its_weight():
    policy, proximal = policy_at(9, 0.1, 9, 1)
    advantages = numbers(1, 1, -2, 0.5)
    given = {"proximal": proximal, "advantages": advantages, "mask": all_of(4)}
    losses, slope, metrics = gradient(cispo, policy, **given)
    weights = numbers(5, 0.1, 5, 1)
    assert slope.tolist() == pytest.approx((-weights * advantages).tolist())
    assert losses.tolist() == pytest.approx((-weights * advantages * policy).tolist())
    assert metrics["clip_fraction"].tolist() == [1, 0, 1, 0]
    _, slope, _ = gradient(lambda **k: cispo(**k, clip_low=0.2, clip_high=0.5), policy, **given)
    assert slope.tolist() == pytest.approx((-numbers(1.5, 0.8, 1.5, 1) * advantages).tolist())


def test_sapo_is_a_sigmoid_gate():
    policy, proximal = policy_at(1, 1, 2, 2)
    advantages = numbers(1, -1, 1, -1)
    losses, slope, _ = gradient(sapo, policy, proximal=proximal, advantages=advantages, mask=all_of(4))

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    assert losses.tolist() == pytest.approx([-2, 2 / 1.05, -4 * sigmoid(1), 4 / 1.05 * sigmoid(1.05)])
    gate = [4 * sigmoid(t) * (1 - sigmoid(t)) * 2 for t in (1, 1.05)]
    assert slope.tolist() == pytest.approx([-1, 1, -gate[0], gate[1]])


def test_cpgd_clips_in_log_probability_and_pulls_back():
    policy, proximal = policy_at(1.5, 1.1, 0.5, 0.9, 5)
    advantages = numbers(2, 2, -1, -1, 0)
    losses, slope, metrics = gradient(cpgd, policy, proximal=proximal, advantages=advantages, mask=all_of(5))
    pull = [1e-3 * x for x in (0.5, 0.1, -0.5, -0.1, 2)]  # ρ − 1, at most 2
    values = [-2 * (-1 + math.log(1.2)), -2 * policy[1].item(), -1 + math.log(0.8), policy[3].item(), 0]
    assert losses.tolist() == pytest.approx([v + p * x for v, p, x in zip(values, pull, policy.tolist(), strict=True)])
    assert slope.tolist() == pytest.approx([pull[0], -2 + pull[1], pull[2], 1 + pull[3], pull[4]])
    assert metrics["clip_fraction"].tolist() == [1, 0, 1, 0, 1]


def test_m2po_drops_the_largest_until_the_mean_of_the_rest_is_small_enough():
    """Candidates: tokens 0 (d .1), 1 (.3), 3 (−.4), 4 (.2); 2 and 5 move towards the sampler. Squares .01, .09, .16, .04:
    means .075, .0467, .025 ≤ .04: the two largest go."""
    d = numbers(0.1, 0.3, 2.0, -0.4, 0.2, -1.0)
    advantages = numbers(1, 1, -1, -1, 1, 1)
    rollout = torch.full((6,), -3.0, dtype=torch.float64)
    kept = within_second_moment(rollout + d, rollout, advantages, all_of(6), torch.zeros(6))
    assert kept.tolist() == [1, 0, 1, 0, 1, 1]
    losses, slope, metrics = gradient(
        m2po, rollout + d, rollout=rollout, advantages=advantages, mask=all_of(6), prepared=kept.double()
    )
    expected = -kept * d.exp() * advantages
    assert losses.tolist() == pytest.approx(expected.tolist())
    assert slope.tolist() == pytest.approx(expected.tolist())
    assert metrics["dropped"].tolist() == [0, 1, 0, 1, 0, 0]


def test_m2po_drops_nothing_on_policy_and_may_drop_every_candidate():
    rollout, mask = torch.full((3,), -1.0), all_of(3)
    noise = torch.zeros(3)
    assert within_second_moment(rollout, rollout, torch.ones(3), mask, noise).tolist() == [1, 1, 1]
    assert within_second_moment(rollout + 0.5, rollout, torch.ones(3), mask, noise).tolist() == [0, 0, 0]


def test_m2po_breaks_ties_by_noise_and_not_by_place():
    rollout = torch.full((4,), -1.0)
    noise = torch.tensor([0.1, 0.9, 0.5, 0.2])
    proximal = rollout + torch.tensor([0.3, 0.3, 0.3, 0.0])  # three of .09: all must go, unless some candidate is small
    assert within_second_moment(proximal, rollout, torch.ones(4), all_of(4), noise).tolist() == [0, 0, 0, 1]
    proximal = rollout + torch.tensor([0.25, 0.25, 0.01, 0.01])
    kept = within_second_moment(proximal, rollout, torch.ones(4), all_of(4), noise, threshold=0.03)
    assert kept.tolist() == [1, 0, 1, 1]  # .0313 is too much, .0209 is not


def test_m2po_leaves_masked_tokens_out_of_the_candidates():
    rollout = torch.full((2,), -1.0)
    proximal = rollout + torch.tensor([3.0, 0.1])
    kept = within_second_moment(proximal, rollout, torch.ones(2), torch.tensor([False, True]), torch.zeros(2))
    assert kept.tolist() == [1, 1]


def test_dppo_drops_what_moves_further_away_than_total_variation_allows():
    q = numbers(0.5, 0.5, 0.5, 0.5, 0.5, 0.5)
    p = numbers(0.7, 0.6, 0.3, 0.3, 0.7, 0.3)
    advantages = numbers(1, 1, 1, -1, -1, 0)
    given = {"proximal": q.log(), "rollout": q.log(), "advantages": advantages, "mask": all_of(6)}
    losses, slope, metrics = gradient(dppo, p.log(), **given)
    kept = numbers(0, 1, 1, 0, 1, 0)
    assert metrics["dropped"].tolist() == (1 - kept).tolist()
    assert slope.tolist() == pytest.approx((-kept * (p / q) * advantages).tolist())
    assert losses.tolist() == pytest.approx((-kept * (p / q) * advantages * p.log()).tolist())


def test_dppo_by_binary_kl():
    """KL(.5 ‖ .6) = .0204, KL(.5 ‖ .7) = .0872, KL(.5 ‖ .2) = .2231; only what A pushes on is dropped."""
    q, p = numbers(0.5, 0.5, 0.5, 0.5), numbers(0.6, 0.7, 0.2, 0.2)
    given = {"proximal": q.log(), "rollout": q.log(), "advantages": numbers(1, 1, 1, -1), "mask": all_of(4)}
    *_, metrics = gradient(lambda **k: dppo(**k, divergence="kl"), p.log(), **given)
    assert metrics["dropped"].tolist() == [0, 1, 0, 1]
    *_, metrics = gradient(lambda **k: dppo(**k, divergence="kl", threshold=0.02), p.log(), **given)
    assert metrics["dropped"].tolist() == [1, 1, 0, 1]
    with pytest.raises(ValueError, match="must be tv or kl, got 'js'"):
        dppo(policy=p.log(), **given, divergence="js")


def test_the_binary_kl_of_dppo_is_that_of_the_sampler_from_the_policy():
    """q = .5, p = .9: KL(q ‖ p) = .511 is above the threshold, KL(p ‖ q) = .368 below it; q = .9, p = .5: the other way."""
    q, p = numbers(0.5, 0.9), numbers(0.9, 0.5)
    given = {"proximal": q.log(), "rollout": q.log(), "advantages": numbers(1, -1), "mask": all_of(2)}
    *_, metrics = gradient(lambda **k: dppo(**k, divergence="kl", threshold=0.4), p.log(), **given)
    assert metrics["dropped"].tolist() == [1, 0]


def test_the_binary_kl_of_dppo_is_finite_where_a_probability_is_one():
    """KL(1 ‖ .5) = ln 2; KL(.5 ‖ 1) would be infinite, and is 13.1 at probabilities of at most 1 − 1e-12."""
    q, p = numbers(1.0, 0.5), numbers(0.5, 1.0)
    given = {"proximal": q.log(), "rollout": q.log(), "advantages": numbers(-1, 1), "mask": all_of(2)}
    for threshold, dropped in ((0.69, [1, 1]), (0.7, [0, 1]), (13.0, [0, 1]), (13.2, [0, 0])):
        _, _, metrics = gradient(lambda limit=threshold, **k: dppo(**k, divergence="kl", threshold=limit), p.log(), **given)
        assert metrics["dropped"].tolist() == dropped, threshold


def test_dppo_caps_the_weight_at_twenty():
    policy, proximal = policy_at(100, proximal=-9.0)
    given = {"proximal": proximal, "rollout": proximal, "advantages": numbers(1), "mask": all_of(1)}
    _, slope, _ = gradient(dppo, policy, **given)
    assert slope.tolist() == [-20]


def test_covariance_by_hand():
    """A = (3, 1, −1), mean 1; log p = (−1, −2, −6), mean −3."""
    found = covariance(numbers(-1, -2, -6, 9), numbers(3, 1, -1, 9), torch.tensor([True, True, True, False]))
    assert found.tolist() == [4, 0, 6, 0]


def test_clip_cov_sets_chosen_tokens_to_zero_unless_the_ratio_has_clipped_them():
    policy, proximal = policy_at(1, 1, 1.5, 0.9, 0.5, 0.5, 1.5)
    advantages = numbers(1, 1, 1, 1, 1, -1, -1)  # outside the range, the fifth and the last keep their gradient
    given = {"proximal": proximal, "advantages": advantages, "mask": all_of(7)}
    losses, slope, metrics = gradient(clip_cov, policy, prepared=numbers(1, 0, 1, 0, 1, 1, 1), **given)
    assert losses.tolist() == pytest.approx([0, -1, -1.2, -0.9, 0, 0.8, 0])
    assert slope.tolist() == pytest.approx([0, -1, 0, -0.9, 0, 0, 0])
    assert metrics["dropped"].tolist() == [1, 0, 0, 0, 1, 0, 1]


def test_clip_cov_draws_from_the_band_by_noise():
    """Covariances 4, 0, 6: only the first lies in (1, 5); at share 1 all that are in a wider band."""
    proximal, advantages, noise = numbers(-1, -2, -6), numbers(3, 1, -1), numbers(0.1, 0.9, 0.5)
    assert random_high_covariance(proximal, advantages, all_of(3), noise).tolist() == [1, 0, 0]
    wide = {"low": -1.0, "high": 9.0}
    assert random_high_covariance(proximal, advantages, all_of(3), noise, **wide).tolist() == [0, 1, 0]
    assert random_high_covariance(proximal, advantages, all_of(3), noise, share=0.7, **wide).tolist() == [0, 1, 1]


def test_kl_cov_penalises_the_tokens_of_highest_covariance():
    prepared = highest_covariance(numbers(-1, -2, -6), numbers(3, 1, -1), all_of(3), numbers(0, 0, 0)).double()
    assert prepared.tolist() == [0, 0, 1]
    policy, proximal = policy_at(2, 1, 0.5)
    given = {"proximal": proximal, "advantages": numbers(3, 1, -1), "mask": all_of(3), "prepared": prepared}
    losses, slope, _ = gradient(kl_cov, policy, **given)
    assert losses.tolist() == pytest.approx([-6, -1, 0.5 + math.log(2)])
    assert slope.tolist() == pytest.approx([-6, -1, 0.5 - 1])


def test_the_top_fifth_by_entropy_is_rounded_up_and_ties_are_broken_by_noise():
    entropy = torch.tensor([3.0, 1, 2, 2, 2, 9])
    mask, noise = torch.tensor([True] * 5 + [False]), torch.tensor([0.5, 0.1, 0.2, 0.8, 0.4, 0.9])
    assert top_entropy(entropy, mask, noise).nonzero().flatten().tolist() == [0]
    assert top_entropy(entropy, mask, noise, share=0.21).nonzero().flatten().tolist() == [0, 3]
    assert top_entropy(entropy, mask, noise, share=1.0).tolist() == mask.tolist()
    assert not largest(entropy, torch.zeros(6, dtype=torch.bool), 2, noise).any()


def test_the_clipped_value_loss_takes_the_larger_branch():
    values, old, returns = numbers(1.5, 0.1, 3, 7), numbers(1, 0, 1, 0), numbers(2, 1, 2.5, 0)
    mask = torch.tensor([True, True, True, False])
    losses, metrics = clipped_value_loss(values, old, returns, mask)
    assert losses.tolist() == pytest.approx([0.5 * 0.64, 0.5 * 0.81, 0.5 * 1.69, 0])
    assert metrics["value_clip_fraction"].tolist() == [1, 0, 1, 0]
    plain, _ = clipped_value_loss(values, old, returns, mask, clip=None)
    assert plain.tolist() == pytest.approx([0.125, 0.405, 0.125, 0])
