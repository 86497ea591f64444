"""Behaviour correction: weights and rejection."""

import math

import pytest
import torch

from tandem.algorithms.correction import (
    behaviour_ratio,
    geometric,
    keep_all,
    mask_outside,
    negative_drift,
    no_weight,
    product,
    truncate,
)

LOG2 = math.log(2)
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])
MASK = torch.tensor([False, True, True, True, True])
ROLLOUT = torch.full((5,), -3.0)
PROXIMAL = ROLLOUT + torch.tensor([50.0, LOG2, LOG2, -LOG2, LOG2])


def test_the_ratio_of_a_token_is_its_own_and_of_a_sequence_the_product():
    token = behaviour_ratio(PROXIMAL, ROLLOUT, MASK, SEQUENCE, "token")
    sequence = behaviour_ratio(PROXIMAL, ROLLOUT, MASK, SEQUENCE, "sequence")
    assert token.tolist() == pytest.approx([1, 2, 2, 0.5, 2])
    assert sequence.tolist() == pytest.approx([4, 4, 4, 1, 1])


def test_the_ratio_has_no_gradient():
    policy = PROXIMAL.clone().requires_grad_()
    assert not behaviour_ratio(policy, ROLLOUT, MASK, SEQUENCE, "token").requires_grad


def test_truncation_caps_and_masking_drops():
    ratio = torch.tensor([0.2, 0.5, 1.0, 4.0, 6.0])
    assert no_weight(ratio).tolist() == [1] * 5
    assert truncate(ratio, high=2.0).tolist() == pytest.approx([0.2, 0.5, 1, 2, 2])
    assert mask_outside(ratio, low=0.5, high=5.0).tolist() == pytest.approx([0, 0.5, 1, 4, 0])


def test_masking_with_an_upper_cap_alone_keeps_the_weight_of_small_ratios():
    assert mask_outside(torch.tensor([0.001, 5.0, 5.1]), high=5.0).tolist() == pytest.approx([0.001, 5, 0])


def test_rejection_by_product():
    assert product(PROXIMAL, ROLLOUT, MASK, SEQUENCE).tolist() == [False] * 3 + [True] * 2


def test_rejection_by_geometric_mean():
    near = ROLLOUT + torch.tensor([9.0, 0.0008, 0.0010, 0.003, 0.003])
    assert geometric(near, ROLLOUT, MASK, SEQUENCE).tolist() == [True] * 3 + [False] * 2


def test_rejection_of_negative_drift_spares_good_answers():
    policy = ROLLOUT - torch.tensor([9.0, 1.0, 0.2, 0.6, 0.3])  # mean drift .6 and .45
    bad, good = -torch.ones(5), torch.ones(5)
    assert negative_drift(policy, ROLLOUT, bad, MASK, SEQUENCE).tolist() == [False] * 3 + [True] * 2
    assert negative_drift(policy, ROLLOUT, good, MASK, SEQUENCE).tolist() == [True] * 5


def test_no_rejection_keeps_everything():
    assert keep_all(MASK).tolist() == [True] * 5


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_garbage_does_not_reach_a_weight(level):
    proximal = PROXIMAL.clone()
    proximal[0] = float("nan")
    clean, found = (behaviour_ratio(p, ROLLOUT, MASK, SEQUENCE, level) for p in (PROXIMAL, proximal))
    assert torch.equal(found, clean)
