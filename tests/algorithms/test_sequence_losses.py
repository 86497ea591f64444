"""Losses with one ratio for a trajectory, on numbers worked by hand: values and gradients."""

import math

import pytest
import torch

from tandem.algorithms.policy_losses import gmpo, gspo, gspo_token, luspo, vespo
from tests.algorithms.tensors import gradient, packed, policy_at

PAIR = {"mask": torch.ones(2, dtype=torch.bool), "sequence": torch.zeros(2, dtype=torch.int64)}


def ones(value, count=2):
    return torch.full((count,), value, dtype=torch.float64)


@pytest.mark.parametrize(("advantage", "value"), [(1.0, -0.8637), (-1.0, 1.1579)])
def test_gmpo_of_a_doubled_and_a_halved_token(advantage, value):
    """c = (.4, −ln 2) for A > 0 and (ln 2, −.4) for A < 0."""
    policy, proximal = policy_at(2, 0.5)
    losses, slope, metrics = gradient(gmpo, policy, proximal=proximal, advantages=ones(advantage), **PAIR)
    exact = math.exp((0.4 - math.log(2)) / 2 * advantage)
    assert losses.tolist() == pytest.approx([-advantage * exact] * 2)
    assert losses[0].item() == pytest.approx(value, abs=5e-5)
    # both tokens' losses differentiate the one that is not clipped, each by a half
    expected = [0, -exact] if advantage > 0 else [exact, 0]
    assert slope.tolist() == pytest.approx(expected)
    assert metrics["clip_fraction"].tolist() == ([1, 0] if advantage > 0 else [0, 1])


def test_gspo_takes_the_geometric_mean_of_the_trajectory():
    policy, proximal = policy_at(1.0002, 1.0002, 1.21, 1, 0.5, 0.5)
    tensors = {"mask": torch.ones(6, dtype=torch.bool), "sequence": torch.tensor([0, 0, 1, 1, 2, 2])}
    losses, slope, metrics = gradient(gspo, policy, proximal=proximal, advantages=ones(2.0, 6), **tensors)
    assert losses.tolist() == pytest.approx([-2.0004] * 2 + [-2 * 1.0004] * 2 + [-1.0] * 2)
    assert slope.tolist() == pytest.approx([-2.0004] * 2 + [0, 0] + [-1.0] * 2)  # −s·A/T from each of T tokens
    assert metrics["ratio"].tolist() == pytest.approx([1.0002] * 2 + [1.1] * 2 + [0.5] * 2)
    assert metrics["clip_fraction"].tolist() == [0, 0, 1, 1, 1, 1]


def test_gspo_skips_masked_tokens_in_the_mean():
    policy, proximal = policy_at(1, 4)
    mask = torch.tensor([False, True])
    *_, metrics = gradient(
        gspo, policy, proximal=proximal, advantages=ones(1.0), mask=mask, sequence=PAIR["sequence"], clip_high=9.0
    )
    assert metrics["ratio"].tolist() == pytest.approx([4, 4])


def test_the_logarithm_of_a_sequence_ratio_is_at_most_ten():
    policy, proximal = torch.zeros(2, dtype=torch.float64), torch.full((2,), -15.0, dtype=torch.float64)
    *_, metrics = gradient(gspo, policy, proximal=proximal, advantages=ones(-1.0), **PAIR)
    assert metrics["ratio"].tolist() == pytest.approx([math.exp(10)] * 2)


def test_gspo_token_has_gspo_s_value_and_with_equal_advantages_its_gradient():
    tensors = packed([4, 3, 6], spread=0.02)
    given = {k: tensors[k] for k in ("proximal", "advantages", "mask", "sequence")}
    knobs = {"clip_low": 0.01, "clip_high": 0.01}
    whole = gradient(lambda **k: gspo(**k, **knobs), tensors["policy"], **given)
    token = gradient(lambda **k: gspo_token(**k, **knobs), tensors["policy"], **given)
    assert torch.allclose(whole[0], token[0], atol=1e-12)
    assert torch.allclose(whole[1], token[1], atol=1e-12)
    assert whole[2]["clip_fraction"][tensors["mask"]].unique().tolist() == [0, 1]


def test_gspo_token_gives_each_token_its_own_advantage():
    policy, proximal = policy_at(1, 1)
    advantages = torch.tensor([1.0, -3.0], dtype=torch.float64)
    _, slope, _ = gradient(gspo_token, policy, proximal=proximal, advantages=advantages, **PAIR)
    assert slope.tolist() == [-1, 3]


def test_luspo_is_gspo_times_the_length_of_the_sample():
    tensors = packed([4, 3, 6], spread=0.001)
    given = {k: tensors[k] for k in ("proximal", "advantages", "mask", "sequence")}
    one = gradient(lambda **k: gspo(**k, clip_low=2e-3, clip_high=2.5e-3), tensors["policy"], **given)
    lengths = torch.tensor([9, 2, 5])[tensors["sequence"]]
    other = gradient(luspo, tensors["policy"], sample_lengths=lengths, **given)
    assert torch.equal(other[0], one[0] * lengths)
    assert torch.allclose(other[1], one[1] * lengths)


@pytest.mark.parametrize(("advantage", "power", "rate"), [(1.0, 2, 3), (0.5, 2, 3), (-1.0, 3, 2)])
def test_vespo_weighs_the_trajectory_by_its_product(advantage, power, rate):
    policy, rollout = policy_at(2, 0.75)  # W = 1.5
    losses, slope, metrics = gradient(vespo, policy, rollout=rollout, advantages=ones(advantage), **PAIR)
    weight = math.exp(rate) * 1.5**power * math.exp(-rate * 1.5)
    assert slope.tolist() == pytest.approx([-advantage * weight] * 2)
    assert losses.tolist() == pytest.approx((-advantage * weight * policy).tolist())
    assert metrics["ratio"].tolist() == pytest.approx([1.5, 1.5])


@pytest.mark.parametrize("shift", [30.0, -30.0])
def test_vespo_far_from_the_sampler_has_no_weight_and_stays_finite(shift):
    policy = torch.full((2,), -31.0, dtype=torch.float64)
    losses, slope, metrics = gradient(vespo, policy, rollout=policy - shift, advantages=ones(1.0), **PAIR)
    assert torch.isfinite(losses).all()
    assert slope.abs().max() < 1e-12
    expected = math.exp(20) if shift > 0 else 1e-8
    assert metrics["ratio"].tolist() == pytest.approx([expected] * 2)
