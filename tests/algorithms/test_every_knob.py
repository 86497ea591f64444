"""No knob is ignored: changing it changes what the function gives."""

import pytest
import torch

from tandem.algorithms.registry import (
    ADVANTAGES,
    FILTERS,
    POLICY_LOSSES,
    PREPARATIONS,
    REJECTIONS,
    SHAPING,
    TOKEN_FILTERS,
    own_knobs,
    preparation_of,
)
from tandem.config.parts import PARTS
from tests.algorithms.tensors import packed

OTHER = {
    "clip_low": 0.05,
    "clip_high": 0.05,
    "clip": 0.1,
    "dual_clip": 1.01,
    "two_sided": 1.01,
    "tau_positive": 2.0,
    "tau_negative": 2.0,
    "drift": 0.5,
    "drift_cap": 0.05,
    "power_positive": 1.0,
    "rate_positive": 1.0,
    "power_negative": 1.0,
    "rate_negative": 1.0,
    "share": 0.7,
    "coefficient": 0.3,
    "low": -0.2,
    "high": 0.4,
    "gamma": 0.5,
    "lam": 0.5,
    "whitened": False,
    "weights": "b=3",
    "weighting": "none",
    "divergence": "kl",
    "factor": 2.0,
    "offset": 1.0,
    "penalty": 3.0,
    "max_tokens": 4,
    "buffer_tokens": 3,
}
BY_CHOICE = {("m2po", "threshold"): 0.001, ("dppo", "threshold"): 0.001, ("negative_drift", "threshold"): 0.01}
BY_CHOICE |= {("product", "low"): 0.95, ("product", "high"): 1.05, ("geometric", "low"): 0.5, ("geometric", "high"): 3.0}
BY_CHOICE |= {("clip_cov", "low"): 0.0, ("clip_cov", "high"): 0.0}
WIDE = {"clip_cov": {"share": 0.5, "low": -9.0, "high": 9.0}, "kl_cov": {"share": 0.2}}
"""Settings with which the other knobs of a choice matter on a small batch."""
PAIRS = [(choice, knob) for choice, part in PARTS["policy_loss"].items() for knob in part.knobs]


def tensors():
    return packed([9, 12, 7, 10, 8], seed=5, spread=0.4)


def loss(choice, knobs):
    function = POLICY_LOSSES.get(choice)
    given, before = packed([5, 6, 4, 7] * 5, seed=5, spread=0.4), preparation_of(function)
    if before is not None:
        mine = {k: v for k, v in knobs.items() if k in own_knobs(before)}
        given["prepared"] = before(**{k: given[k] for k in PREPARATIONS.inputs_of(before)}, **mine)
    policy = given["policy"].requires_grad_()
    own = {k: v for k, v in knobs.items() if k in own_knobs(function)}
    losses, _ = function(**{k: given[k] for k in POLICY_LOSSES.inputs_of(function)}, **own)
    return torch.stack([losses.detach(), torch.autograd.grad(losses.sum(), policy)[0]])


@pytest.mark.parametrize(("choice", "knob"), PAIRS)
def test_every_knob_of_a_policy_loss_changes_loss_or_gradient(choice, knob):
    base = WIDE.get(choice, {}) | ({"drift": 0.5} if choice == "cpgd" and knob == "drift_cap" else {})
    value = BY_CHOICE.get((choice, knob), OTHER.get(knob))
    assert not torch.equal(loss(choice, base), loss(choice, base | {knob: value}))


@pytest.mark.parametrize("choice", ["gae", "gdpo", "cpgd"])
def test_every_knob_of_an_advantage_changes_it(choice):
    given = tensors() | {
        "token_rewards": tensors()["entropy"],
        "values": tensors()["policy"],
        "bootstrap_value": torch.ones(5),
        "cut": torch.tensor([True, False, True, False, True]),
    }
    given |= {
        "rewards": torch.tensor([1.0, 0, 0, 1, 0.5]),
        "group_id": torch.tensor([1, 1, 1, 2, 2]),
        "in_statistics": torch.ones(5, dtype=torch.bool),
        "named_rewards": {"a": torch.tensor([1.0, 0, 0, 1, 0]), "b": torch.tensor([0.0, 0, 1, 1, 0])},
    }
    function = ADVANTAGES.get(choice)
    inputs = {k: given[k] for k in ADVANTAGES.inputs_of(function)}

    def of(**knobs):
        found = function(**inputs, **knobs)
        return found[0] if isinstance(found, tuple) else found

    for knob in own_knobs(function):
        assert not torch.equal(of(), of(**{knob: OTHER[knob]})), knob


@pytest.mark.parametrize(("choice", "knob"), [(c, k) for c, part in PARTS["correction.reject"].items() for k in part.knobs])
def test_every_knob_of_a_rejection_rule_changes_what_is_kept(choice, knob):
    given = packed([3, 4, 2, 3, 4], seed=8, spread=0.05)
    given["advantages"] = -given["advantages"].abs()
    rule = REJECTIONS.get(choice)
    inputs = {k: given[k] for k in REJECTIONS.inputs_of(rule)}
    changed = rule(**inputs, **{knob: BY_CHOICE[choice, knob]})
    if choice == "geometric":  # its default bounds drop all of these; each opens one side
        assert bool(changed.any())
    assert not torch.equal(rule(**inputs), changed)


def test_the_share_of_the_token_filter_changes_what_is_kept():
    given = tensors()
    rule = TOKEN_FILTERS.get("top_entropy")
    found = [int(rule(given["entropy"], given["mask"], given["noise"], share=share).sum()) for share in (0.2, 0.5)]
    assert found == [9, 21]


def test_every_knob_of_shaping_changes_the_reward():
    given = {
        "rewards": torch.tensor([2.0, -3.0, 0.5]),
        "lengths": torch.tensor([2, 3, 9]),
        "truncated": torch.tensor([False, True, True]),
    }
    for choice, part in PARTS["shaping"].items():
        function = SHAPING.get(choice)
        base = {"max_tokens": 10} if choice == "overlong" else {}
        inputs = {k: given[k] for k in SHAPING.inputs_of(function)}
        for knob in part.knobs:
            assert not torch.equal(function(**inputs, **base), function(**inputs, **base | {knob: OTHER[knob]})), (
                choice,
                knob,
            )


def test_the_band_of_the_accuracy_filter_decides():
    band = FILTERS.get("accuracy_band")
    assert band([0.5, 0.0], [0, 0])[0] and not band([0.5, 0.0], [0, 0], low=0.3)[0]
    assert not band([0.5, 0.0], [0, 0], high=0.2)[0]
