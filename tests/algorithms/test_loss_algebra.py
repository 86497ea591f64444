"""What holds for every policy loss, whatever its numbers."""

import contextlib
import math
import unittest.mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.advantages import dr_grpo, rloo
from tandem.algorithms.correction import behaviour_ratio
from tandem.algorithms.losses import clipped_value_loss, sequence_mean, token_mean
from tandem.algorithms.registry import (
    IMPORTANCE_WEIGHTS,
    KL,
    POLICY_LOSSES,
    PREPARATIONS,
    REJECTIONS,
    TOKEN_FILTERS,
    preparation_of,
)
from tests.algorithms.tensors import finite_difference, packed

SAME_GRADIENT = [
    "ppo_clip",
    "cispo",
    "gspo",
    "gspo_token",
    "gmpo",
    "dppo",
    "reinforce",
    "sapo",
    "vespo",
    "m2po",
    "cpgd",
    "kl_cov",
]
SIZES = st.lists(st.integers(2, 7), min_size=1, max_size=5)
GARBAGE = [math.inf, -math.inf, math.nan, 1e30, -1e4]


def prepared(name, tensors):
    """The tensors with what the loss prepares."""
    before = preparation_of(POLICY_LOSSES.get(name))
    if before is None:
        return tensors
    prepared = before(**{k: tensors[k] for k in PREPARATIONS.inputs_of(before)})
    return tensors | {"prepared": prepared.to(tensors["policy"].dtype)}


def losses_of(name, tensors, policy=None):
    function = POLICY_LOSSES.get(name)
    given = tensors if policy is None else tensors | {"policy": policy}
    return function(**{k: given[k] for k in POLICY_LOSSES.inputs_of(function)})


def slope_of(name, tensors, weights):
    policy = tensors["policy"].clone().requires_grad_()
    losses, _ = losses_of(name, tensors, policy)
    return torch.autograd.grad((losses * weights).sum(), policy)[0]


@contextlib.contextmanager
def weights_held_at(base, policy):
    """Inside, what a loss computes without gradient from ``policy`` it computes from ``base``, as a gradient does."""
    real = torch.Tensor.detach
    with unittest.mock.patch.object(torch.Tensor, "detach", lambda self: base if self is policy else real(self)):
        yield


def on_policy(sizes, seed):
    tensors = packed(sizes, seed)
    return tensors | {"proximal": tensors["policy"], "rollout": tensors["policy"]}


@settings(max_examples=25, deadline=None)
@given(SIZES, st.integers(0, 999))
def test_on_policy_all_losses_have_the_gradient_of_the_policy_gradient(sizes, seed):
    tensors = on_policy(sizes, seed)
    weights = sequence_mean(tensors["mask"], tensors["sample"]).double()
    expected = -tensors["advantages"] * weights
    for name in SAME_GRADIENT:
        slope = slope_of(name, prepared(name, tensors), weights)
        if name == "kl_cov":  # |log ρ| has a kink there
            chosen = prepared(name, tensors)["prepared"] > 0
            slope, expected_here = slope[~chosen], expected[~chosen]
        else:
            expected_here = expected
        assert torch.allclose(slope, expected_here, rtol=1e-6, atol=1e-9), name


def test_luspo_and_clip_cov_are_the_only_other_losses():
    assert set(POLICY_LOSSES) == {*SAME_GRADIENT, "luspo", "clip_cov"}


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_the_gradient_is_that_of_finite_differences(name):
    """Of losses whose weight has no gradient, that of the weight held fixed times the log-probability."""
    tensors = prepared(name, packed([5, 3, 6], seed=4, spread=0.1))
    weights = token_mean(tensors["mask"]).double()
    slope = slope_of(name, tensors, weights)
    held = "gspo" if name == "gspo_token" else name  # gspo's gradient, by another way to write it

    def loss(policy):
        with weights_held_at(tensors["policy"], policy):
            return losses_of(held, tensors, policy)[0] * weights

    expected = finite_difference(loss, tensors["policy"])
    assert torch.allclose(slope, expected, rtol=1e-5, atol=1e-8)
    assert slope.abs().max() > 0


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_what_is_masked_changes_nothing(name, garbage):
    tensors = prepared(name, packed([4, 3, 5]))
    mask = tensors["mask"]
    dirty = {
        key: value.masked_fill(~mask, garbage) if value.is_floating_point() and key not in ("noise",) else value
        for key, value in tensors.items()
    }
    weights = token_mean(mask).double()
    clean_losses, clean_metrics = losses_of(name, tensors)
    losses, metrics = losses_of(name, dirty)
    assert losses[~mask].tolist() == [0] * int((~mask).sum())
    assert torch.equal(losses, clean_losses)
    assert torch.equal(slope_of(name, dirty, weights), slope_of(name, tensors, weights))
    for key, value in metrics.items():
        assert torch.equal(value[mask], clean_metrics[key][mask])


@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_masked_changes_no_selection(garbage):
    tensors = packed([4, 3, 5])
    dirty = {k: v.masked_fill(~tensors["mask"], garbage) if v.is_floating_point() else v for k, v in tensors.items()}
    befores = [preparation_of(POLICY_LOSSES.get(name)) for name in POLICY_LOSSES]
    for before in [b for b in befores if b is not None] + [TOKEN_FILTERS.get(name) for name in TOKEN_FILTERS]:
        clean, found = (before(**{k: t[k] for k in PREPARATIONS.inputs_of(before)}) for t in (tensors, dirty))
        assert torch.equal(clean[tensors["mask"]], found[tensors["mask"]])


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_is_masked_changes_no_correction(garbage, level):
    tensors = packed([4, 3, 5])
    mask = tensors["mask"]
    dirty = {k: v.masked_fill(~mask, garbage) if v.is_floating_point() else v for k, v in tensors.items()}

    def of(t):
        ratio = behaviour_ratio(t["proximal"], t["rollout"], mask, t["sequence"], level)
        weights = [IMPORTANCE_WEIGHTS.get(name)(ratio) for name in IMPORTANCE_WEIGHTS]
        rules = [REJECTIONS.get(name) for name in REJECTIONS]
        return [x[mask] for x in weights + [rule(**{k: t[k] for k in REJECTIONS.inputs_of(rule)}) for rule in rules]]

    assert all(torch.equal(a, b) for a, b in zip(of(tensors), of(dirty), strict=True))


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", list(KL))
def test_what_is_masked_changes_no_kl(name, garbage):
    tensors = packed([4, 3, 5])
    mask = tensors["mask"]

    def of(t):
        policy = t["policy"].clone().requires_grad_()
        found = KL.get(name)(policy, t["reference"], mask)
        return found.detach(), torch.autograd.grad(found.sum(), policy)[0]

    dirty = {k: v.masked_fill(~mask, garbage) if v.is_floating_point() else v for k, v in tensors.items()}
    assert all(torch.equal(a, b) for a, b in zip(of(tensors), of(dirty), strict=True))


def permuted(tensors, order):
    """The sequences in another order."""
    rows = torch.cat([(tensors["sequence"] == i).nonzero().flatten() for i in order])
    moved = {key: value[rows] for key, value in tensors.items()}
    number = torch.empty(len(order), dtype=torch.int64)
    number[torch.tensor(order)] = torch.arange(len(order))
    return moved | {"sequence": number[moved["sequence"]], "sample": number[moved["sequence"]]}, rows


@settings(max_examples=15, deadline=None)
@given(st.data(), SIZES, st.integers(0, 999))
def test_the_order_of_sequences_changes_nothing(data, sizes, seed):
    tensors = packed(sizes, seed)
    other, rows = permuted(tensors, data.draw(st.permutations(range(len(sizes)))))
    for name in POLICY_LOSSES:
        mine, theirs = prepared(name, tensors), prepared(name, other)
        weights = sequence_mean(tensors["mask"], tensors["sample"]).double()
        assert torch.allclose(slope_of(name, theirs, weights[rows]), slope_of(name, mine, weights)[rows], atol=1e-12), name


@settings(max_examples=15, deadline=None)
@given(SIZES, st.integers(0, 999))
def test_cutting_the_batch_between_sequences_changes_nothing(sizes, seed):
    tensors = packed(sizes, seed)
    weights = sequence_mean(tensors["mask"], tensors["sample"]).double()
    for name in POLICY_LOSSES:
        whole = prepared(name, tensors)
        parts = []
        for i in range(len(sizes)):
            inside = whole["sequence"] == i
            part = {k: v[inside] for k, v in whole.items()} | {"sequence": torch.zeros(int(inside.sum()), dtype=torch.int64)}
            parts.append(slope_of(name, part, weights[inside]))
        assert torch.allclose(torch.cat(parts), slope_of(name, whole, weights), atol=1e-12), name


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=9))
def test_dr_grpo_is_rloo_scaled(rewards):
    values, group, inside = torch.tensor(rewards), torch.zeros(len(rewards)).long(), torch.ones(len(rewards)).bool()
    scale = (len(rewards) - 1) / len(rewards)
    assert torch.allclose(dr_grpo(values, group, inside), rloo(values, group, inside) * scale, atol=1e-5)


@given(st.integers(1, 6), st.integers(1, 6))
def test_token_mean_is_sequence_mean_at_equal_lengths(count, length):
    sample = torch.arange(count).repeat_interleave(length)
    mask = torch.ones(count * length, dtype=torch.bool)
    assert torch.allclose(token_mean(mask), sequence_mean(mask, sample))


@pytest.mark.parametrize(("name", "like"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3_plus", "k2")])
def test_the_gradient_of_a_kl_form_is_that_of_finite_differences(name, like):
    tensors = packed([5, 3, 6], seed=4)
    policy = tensors["policy"].clone().requires_grad_()
    reference, mask = tensors["policy"] + 0.3 * torch.sin(torch.arange(len(policy)).double()), tensors["mask"]
    (slope,) = torch.autograd.grad(KL.get(name)(policy, reference, mask).sum(), policy)
    assert torch.allclose(slope, finite_difference(lambda p: KL.get(like)(p, reference, mask), tensors["policy"]), atol=1e-7)
    assert slope.abs().max() > 0


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_gradient_of_the_value_loss_is_that_of_finite_differences(clip):
    draw = torch.Generator().manual_seed(1)
    values, old, returns = (torch.randn(40, generator=draw, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(40) % 5 > 0
    leaf = values.clone().requires_grad_()
    (slope,) = torch.autograd.grad(clipped_value_loss(leaf, old, returns, mask, clip=clip)[0].sum(), leaf)
    expected = finite_difference(lambda v: clipped_value_loss(v, old, returns, mask, clip=clip)[0], values)
    assert torch.allclose(slope, expected, atol=1e-6)
    assert (slope[mask] == 0).any() == (clip is not None)  # some values are held by the clip
