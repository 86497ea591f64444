"""Policy losses and their gradients against closed forms."""

import math

import pytest
import torch

from tandem.algorithms.policy_losses import ppo_clip, reinforce

ALL = torch.ones(4, dtype=torch.bool)


def gradient(loss, policy, *arguments, **knobs):
    """Losses [T] and the gradient of their sum with respect to the policy's log-probabilities [T]."""
    policy = policy.clone().requires_grad_()
    losses, metrics = loss(policy, *arguments, **knobs)
    return losses.detach(), torch.autograd.grad(losses.sum(), policy)[0], metrics


def policy_at(*ratios):
    """Log-probabilities whose ratios to a proximal of −1 are these."""
    return torch.tensor([math.log(r) - 1 for r in ratios]), torch.full((len(ratios),), -1.0)


@pytest.mark.parametrize("loss", [ppo_clip, reinforce])
def test_where_the_policy_is_the_proximal_one_the_gradient_is_minus_the_advantage(loss):
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.0])
    logprobs = torch.tensor([-0.1, -3.0, -7.0, -0.5])
    _, slope, metrics = gradient(loss, logprobs, logprobs, advantages, ALL)
    assert slope.tolist() == (-advantages).tolist()
    assert metrics["ratio"].tolist() == [1, 1, 1, 1]
    assert metrics["clip_fraction"].tolist() == [0, 0, 0, 0]


def test_ppo_clip_inside_and_outside_the_range():
    policy, proximal = policy_at(1.5, 0.5, 1.5, 0.5)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    losses, slope, metrics = gradient(ppo_clip, policy, proximal, advantages, ALL, clip_low=0.2, clip_high=0.28)
    assert losses.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8])
    assert slope.tolist() == pytest.approx([0, -0.5, 1.5, 0])  # −ρA where the unclipped branch is the smaller
    assert metrics["clip_fraction"].tolist() == [1, 1, 1, 1]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    policy, proximal = policy_at(10, 2, 10, 1)
    advantages = torch.tensor([-1.0, -1.0, 1.0, -2.0])
    losses, slope, _ = gradient(ppo_clip, policy, proximal, advantages, ALL, dual_clip=3.0)
    assert losses.tolist() == pytest.approx([3, 2, -1.2, 2])
    assert slope.tolist() == pytest.approx([0, 2, 0, 2])


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -1.0])
def test_dual_clip_is_off_or_above_one(dual_clip):
    logprobs = torch.zeros(4)
    with pytest.raises(ValueError, match="dual_clip must be above 1, or 0 for off"):
        ppo_clip(logprobs, logprobs, logprobs, ALL, dual_clip=dual_clip)


def test_reinforce_weights_later_updates_by_the_truncated_ratio():
    policy, proximal = policy_at(1.0, 1.5, 5.0, 0.5)
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0])
    losses, slope, metrics = gradient(reinforce, policy, proximal, advantages, ALL)
    weights = torch.tensor([1, 1.5, 2, 0.5])
    assert slope.tolist() == pytest.approx((-weights * advantages).tolist())
    assert losses.tolist() == pytest.approx((-weights * advantages * policy).tolist())
    assert metrics["clip_fraction"].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("loss", [ppo_clip, reinforce])
@pytest.mark.parametrize("garbage", [1e4, -1e4, float("inf"), float("nan")])
def test_what_is_masked_touches_neither_loss_nor_gradient(loss, garbage):
    mask = torch.tensor([True, False, True, False])
    policy = torch.tensor([-1.0, garbage, -2.0, -1.0])
    proximal = torch.tensor([-1.1, -1.0, -2.0, garbage])
    losses, slope, metrics = gradient(loss, policy, proximal, torch.ones(4), mask)
    assert losses[~mask].tolist() == [0, 0]
    assert slope[~mask].tolist() == [0, 0]
    assert torch.isfinite(losses).all() and torch.isfinite(slope).all()
    assert all(torch.isfinite(value).all() for value in metrics.values())


@pytest.mark.parametrize("loss", [ppo_clip, reinforce])
def test_an_extreme_ratio_is_clamped_and_stays_finite(loss):
    policy, proximal = torch.tensor([0.0, -200.0]), torch.tensor([-200.0, 0.0])
    losses, slope, _ = gradient(loss, policy, proximal, torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool))
    assert torch.isfinite(losses).all() and torch.isfinite(slope).all()
