"""KL estimators: values, gradients, and what they are on average."""

import math

import pytest
import torch

from tandem.algorithms.kl import k1, k2, k3, k3_plus

REFERENCE = torch.tensor([-1.0, -2.0, -0.5])
D = torch.tensor([0.0, 0.5, -1.0])
ALL = torch.ones(3, dtype=torch.bool)

VALUES = {
    k1: [0, 0.5, -1],
    k2: [0, 0.125, 0.5],
    k3: [0, math.exp(-0.5) - 0.5, math.e - 2],
    k3_plus: [0, math.exp(-0.5) - 0.5, math.e - 2],
}
SLOPES = {k1: [1, 1, 1], k2: [0, 0.5, -1], k3: [0, 1 - math.exp(-0.5), 1 - math.e], k3_plus: [0, 0.5, -1]}


@pytest.mark.parametrize("estimator", VALUES)
def test_value_and_gradient(estimator):
    policy = (REFERENCE + D).requires_grad_()
    found = estimator(policy, REFERENCE, ALL)
    assert found.tolist() == pytest.approx(VALUES[estimator], abs=1e-6)
    assert torch.autograd.grad(found.sum(), policy)[0].tolist() == pytest.approx(SLOPES[estimator], abs=1e-6)


@pytest.mark.parametrize("estimator", VALUES)
def test_masked_tokens_give_nothing_whatever_they_hold(estimator):
    policy = torch.tensor([-1.0, float("nan"), 1e4]).requires_grad_()
    found = estimator(policy, torch.tensor([-2.0, 0.0, float("-inf")]), torch.tensor([True, False, False]))
    assert found[1:].tolist() == [0, 0]
    slope = torch.autograd.grad(found.sum(), policy)[0]
    assert slope[1:].tolist() == [0, 0] and torch.isfinite(slope[0])


@pytest.mark.parametrize("estimator", VALUES)
def test_a_difference_of_any_size_stays_finite(estimator):
    assert torch.isfinite(estimator(torch.tensor([-900.0, 0.0]), torch.tensor([0.0, -900.0]), ALL[:2])).all()


def expected(estimator, logits, reference):
    """Of the estimator under the policy, with the gradient that a loss on sampled tokens has, [V]."""
    logits = logits.clone().requires_grad_()
    policy = logits.log_softmax(-1)
    values = estimator(policy, reference, torch.ones_like(reference, dtype=torch.bool))
    mean = (policy.exp().detach() * values).sum()
    return float(mean.detach()), torch.autograd.grad(mean, logits)[0]


def test_on_average_k1_and_k3_are_the_divergence_and_k2_has_its_gradient():
    logits, reference = torch.tensor([0.3, -1.0, 0.9, 0.1]), torch.tensor([0.0, 0.2, 0.5, -0.3]).log_softmax(-1)
    exact_logits = logits.clone().requires_grad_()
    policy = exact_logits.log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    slope = torch.autograd.grad(exact, exact_logits)[0]
    assert expected(k1, logits, reference)[0] == pytest.approx(float(exact.detach()), abs=1e-6)
    assert expected(k3, logits, reference)[0] == pytest.approx(float(exact.detach()), abs=1e-6)
    assert torch.allclose(expected(k2, logits, reference)[1], slope, atol=1e-6)
    assert torch.allclose(expected(k3_plus, logits, reference)[1], slope, atol=1e-6)
    assert torch.allclose(expected(k1, logits, reference)[1], torch.zeros(4), atol=1e-6)  # why it is refused in the loss
