"""Preference and reward-model losses: worked numbers, gradients, and what becomes of them at the ends."""

import math

import pytest
import torch

from tandem.algorithms.losses import bradley_terry, distillation_advantages, step_cross_entropy
from tandem.algorithms.preference import (
    PREFERENCE_LOSSES,
    dpo,
    ipo,
    kto,
    mismatch_baseline,
    orpo,
    simpo,
)
from tandem.config.parts import PARTS


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def pair_arguments(seed=0, size=4):
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, 9, (2, size), generator=generator).double()
    policy, reference = (-length * (0.2 + torch.rand(2, size, generator=generator).double()) for _ in range(2))
    return {
        "chosen": policy[0],
        "rejected": policy[1],
        "chosen_reference": reference[0],
        "rejected_reference": reference[1],
        "chosen_length": length[0],
        "rejected_length": length[1],
    }


def called(name, arguments, **knobs):
    function = PREFERENCE_LOSSES.get(name)
    return function(**{asked: arguments[asked] for asked in PREFERENCE_LOSSES.inputs_of(function)}, **knobs)


def test_dpo_on_worked_numbers():
    # Δ_chosen = 2, Δ_rejected = -1, h = 3; σ(0.3) = 0.574443
    losses, better, worse = dpo(t(-3.0), t(-6.0), t(-5.0), t(-5.0))
    assert losses.item() == pytest.approx(0.554355, abs=1e-6)
    assert (better.item(), worse.item()) == pytest.approx((0.2, -0.1))
    smoothed, _, _ = dpo(t(-3.0), t(-6.0), t(-5.0), t(-5.0), label_smoothing=0.1)
    assert smoothed.item() == pytest.approx(0.9 * 0.554355 + 0.1 * 0.854355, abs=1e-6)
    assert dpo(t(-1.0), t(-2.0), t(-1.0), t(-2.0))[0].item() == pytest.approx(math.log(2))  # the start of every run


def test_ipo_on_worked_numbers():
    # mean Δ: (−3 + 5)/4 = 0.5 and (−6 + 5)/2 = −0.5; (1 − 5)² = 16
    losses, better, worse = ipo(t(-3.0), t(-6.0), t(-5.0), t(-5.0), t(4.0), t(2.0))
    assert losses.item() == pytest.approx(16.0)
    assert (better.item(), worse.item()) == pytest.approx((0.05, -0.05))
    assert ipo(t(-3.0), t(-6.0), t(-5.0), t(-5.0), t(4.0), t(2.0), beta=0.5)[0].item() == pytest.approx(0.0)


def test_simpo_on_worked_numbers():
    # means −0.75 and −1.25: 2.5·0.5 − 1.375 = −0.125
    losses, better, worse = simpo(t(-3.0), t(-2.5), t(4.0), t(2.0))
    assert losses.item() == pytest.approx(math.log(1 + math.exp(0.125)))
    assert (better.item(), worse.item()) == pytest.approx((-1.875, -3.125))


def test_orpo_on_worked_numbers():
    # means log ½ and log ¼: odds 1 and ⅓, log σ(log 3) = log ¾
    losses, better, worse = orpo(t(2 * math.log(0.5)), t(3 * math.log(0.25)), t(2.0), t(3.0))
    assert losses.item() == pytest.approx(math.log(2) - 0.1 * math.log(0.75))
    assert (better.item(), worse.item()) == pytest.approx((0.0, math.log(1 / 3)))


def test_kto_on_worked_numbers():
    policy, reference, label = t(-3.0, -6.0), t(-5.0, -5.0), torch.tensor([True, False])
    losses, score, _ = kto(policy, reference, label, t(0.5, 0.5))
    expected = [1 - 1 / (1 + math.exp(-0.1 * 1.5)), 1 - 1 / (1 + math.exp(-0.1 * 1.5))]
    assert losses.tolist() == pytest.approx(expected)
    assert score.tolist() == pytest.approx([0.2, -0.1])
    weighted, _, _ = kto(policy, reference, label, t(0.5, 0.5), desirable_weight=2.0, undesirable_weight=0.5)
    assert weighted.tolist() == pytest.approx([2 * expected[0], 0.5 * expected[1]])


def test_the_baseline_is_a_mean_that_is_never_negative_and_carries_no_gradient():
    policy = t(-1.0, -2.0).requires_grad_()
    assert mismatch_baseline(policy, t(-2.0, -5.0)).item() == pytest.approx(2.0)
    assert mismatch_baseline(policy, t(0.0, 0.0)).item() == 0.0
    assert mismatch_baseline(t(), t()).item() == 0.0
    assert not mismatch_baseline(policy, t(-2.0, -5.0)).requires_grad


@pytest.mark.parametrize("name", [name for name in PREFERENCE_LOSSES if PARTS["loss"][name].is_paired])
def test_gradients_of_paired_losses_are_those_of_finite_differences(name):
    arguments = pair_arguments()
    inputs = [arguments[side].clone().requires_grad_() for side in ("chosen", "rejected")]

    def loss(chosen, rejected):
        return called(name, arguments | {"chosen": chosen, "rejected": rejected})[0]

    assert torch.autograd.gradcheck(loss, inputs)


def test_gradients_of_unpaired_losses_are_those_of_finite_differences():
    label = torch.tensor([True, False, False])
    policy = t(-3.0, -6.0, -1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: kto(p, t(-5.0, -5.0, -5.0), label, t(0.3, 0.3, 0.3))[0], [policy])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_dpo_becomes_the_difference_of_log_probabilities_as_beta_vanishes(smoothing):
    arguments = pair_arguments(seed=1)
    chosen, rejected = (arguments[side].clone().requires_grad_() for side in ("chosen", "rejected"))
    beta = 1e-6
    losses, _, _ = called("dpo", arguments | {"chosen": chosen, "rejected": rejected}, beta=beta, label_smoothing=smoothing)
    (losses.sum() / beta).backward()
    assert chosen.grad.tolist() == pytest.approx([-0.5 * (1 - 2 * smoothing)] * 4, rel=1e-4)
    assert rejected.grad.tolist() == pytest.approx([0.5 * (1 - 2 * smoothing)] * 4, rel=1e-4)


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
def test_no_loss_is_nan_at_the_ends_of_what_a_model_says(name):
    function = PREFERENCE_LOSSES.get(name)
    policy = torch.tensor([0.0, -1e-8, -50.0, -1e4], requires_grad=True)
    if PARTS["loss"][name].is_paired:
        arguments = {key: torch.ones(4) for key in PREFERENCE_LOSSES.inputs_of(function)}
        arguments |= {"chosen": policy, "rejected": policy.detach().flip(0)}
        arguments |= {key: torch.full((4,), -2.0) for key in arguments if key.endswith("reference")}
    else:
        label = torch.tensor([True, False, True, False])
        arguments = {"policy": policy, "reference": torch.zeros(4), "desirable": label, "baseline": torch.zeros(4)}
    losses = function(**arguments)[0]
    losses.sum().backward()
    assert losses.isfinite().all()
    assert policy.grad.isfinite().all()


def test_what_a_loss_needs_follows_from_what_it_asks_for():
    losses = PARTS["loss"]
    assert {name for name, part in losses.items() if not part.needs_reference} == {"simpo", "orpo"}
    assert [name for name, part in losses.items() if part.needs_baseline] == ["kto"]


def test_ranked_pairs_on_worked_numbers():
    losses = bradley_terry(t(2.0, 2.0), t(1.0, 1.0), t(0.0, 1.0))
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-1)), math.log(2)])
    scores = t(0.3, -0.2).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: bradley_terry(s[:1], s[1:], t(0.5)), [scores])


def test_judged_steps_on_worked_numbers():
    scores = t(2.0, math.inf, -1.0).requires_grad_()
    losses = step_cross_entropy(scores, torch.tensor([True, True, True]), torch.tensor([True, False, True]))
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-2)), 0.0, math.log(1 + math.exp(1))])
    losses.sum().backward()
    assert scores.grad.tolist() == pytest.approx([1 / (1 + math.exp(-2)) - 1, 0.0, 1 / (1 + math.exp(1)) - 1])


def test_distillation_has_the_gradient_of_the_kl_to_the_teacher():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    advantages = distillation_advantages(teacher, policy, torch.ones(7, dtype=torch.bool))
    expected_loss = -(policy.detach().exp() * advantages * policy).sum()  # the expectation of −A log π over the vocabulary
    (found,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    assert torch.allclose(found, exact, atol=1e-12)
    masked = distillation_advantages(t(math.nan, -1.0), t(-1.0, -3.0), torch.tensor([False, True]))
    assert masked.tolist() == [0.0, 2.0]
