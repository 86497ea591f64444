"""KL estimators times the ratio to the sampler: over an enumerable vocabulary, the gradient is that of the exact KL."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.kl import adapt_coefficient, k1, k2, k3, k3_plus, log_ratio

VOCABULARY = 5
ALL = torch.ones(VOCABULARY, dtype=torch.bool)


def distributions(seed):
    """Logits of the policy, log-probabilities of sampler and reference."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits[0].requires_grad_(), logits[1].log_softmax(0), logits[2].log_softmax(0)


def exact(logits, reference):
    policy = logits.log_softmax(0)
    return (policy.exp() * (policy - reference)).sum()


def expected(estimator, logits, sampler, reference):
    """Mean over what the sampler draws, every token of the vocabulary once, weighted by its probability."""
    policy = logits.log_softmax(0)
    ratio = log_ratio(policy, sampler, ALL).exp()
    return (sampler.exp() * estimator(policy, reference, ALL, ratio)).sum()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_off_policy_the_expected_gradient_is_that_of_the_exact_kl(seed):
    logits, sampler, reference = distributions(seed)
    truth = torch.autograd.grad(exact(logits, reference), logits)[0]
    for estimator in (k1, k2, k3, k3_plus):
        found = torch.autograd.grad(expected(estimator, logits, sampler, reference), logits)[0]
        assert torch.allclose(found, truth, atol=1e-10), estimator.__name__


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_off_policy_the_expected_value_of_k1_and_k3_is_the_exact_kl(seed):
    logits, sampler, reference = distributions(seed)
    for estimator in (k1, k3, k3_plus):
        assert expected(estimator, logits, sampler, reference).item() == pytest.approx(exact(logits, reference).item())


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_without_the_ratio_k2_and_k3_plus_have_the_exact_gradient_and_k1_has_none(seed):
    logits, _, reference = distributions(seed)
    truth = torch.autograd.grad(exact(logits, reference), logits)[0]
    policy = logits.log_softmax(0)
    for estimator in (k1, k2, k3_plus):
        total = (policy.detach().exp() * estimator(policy, reference, ALL)).sum()
        found = torch.autograd.grad(total, logits, retain_graph=True)[0]
        assert torch.allclose(found, torch.zeros_like(truth) if estimator is k1 else truth, atol=1e-10)


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    policy = torch.tensor([-1.0, -0.2, -3.0, -0.5, -2.0], dtype=torch.float64).requires_grad_()
    reference = torch.tensor([-1.5, -2.0, -0.3, -0.5, -9.0], dtype=torch.float64)
    ratio = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1], dtype=torch.float64)
    assert k3_plus(policy, reference, ALL, ratio).tolist() == k3(policy, reference, ALL, ratio).tolist()
    slopes = [torch.autograd.grad(f(policy, reference, ALL, ratio).sum(), policy)[0] for f in (k3_plus, k2)]
    assert torch.equal(*slopes)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 1.0), (6.6, 1 + 0.1 * 0.064), (60.0, 1 + 0.2 * 0.064), (0.0, 1 - 0.2 * 0.064), (-3.0, 1 - 0.2 * 0.064)],
)
def test_the_coefficient_follows_the_kl_with_a_bounded_error(kl, factor):
    assert adapt_coefficient(0.1, kl, target=6.0, num_samples=64, horizon=1000) == pytest.approx(0.1 * factor)
