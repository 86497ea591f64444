"""Every preset takes a step, and the step does not depend on how the batch is cut, ordered or distributed."""

import functools

import pytest
import torch

from tandem.api.batch import select
from tandem.config.algorithm import PRESETS
from tests.ranks import on_two
from tests.roles.batches import moved, step, weights_of
from tests.roles.presets import full_batch, preset_actor
from tests.tiny import tiny_model_folder

VARIANTS = {name: (name,) for name in PRESETS} | {
    "clip_cov": ("grpo", "algorithm.policy_loss={name: clip_cov, share: 0.3, low: -9, high: 9}"),
    "kl_cov": ("grpo", "algorithm.policy_loss={name: kl_cov, share: 0.3}"),
    "gspo_token": ("gspo", "algorithm.policy_loss=gspo_token"),
    "top_entropy": ("grpo", "algorithm.token_filter=top_entropy"),
    "adaptive": ("grpo", "algorithm.kl={coefficient: 0.1, target: 1.0, horizon: 50}"),
    "importance": ("grpo", "algorithm.kl={coefficient: 0.1, importance: true, estimator: k1}"),
    "rejecting": (
        "grpo",
        "algorithm.correction={weight: truncate, high: 1.05, reject: {name: product, low: 0.9, high: 1.2}}",
    ),
}
"""Presets, and parts that no preset has."""


HALVES = ([4, 5, 6, 2, 0, 3, 1], [13, 11, 14, 12, 7, 8, 10, 9])
"""Another order of the sequences, in which the two mini-batches have the same groups; a sample's trajectories, 7 and 8, keep
their order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def batch(folder):
    return full_batch(folder)


def updated(folder, batch, variant, **settings):
    """Metrics of a batch of two optimizer steps, so that ratios differ from 1; weights before and after."""
    actor = preset_actor(folder, *VARIANTS[variant], mini_batches=2, **settings)
    before = weights_of(actor)
    return step(actor, batch), before, weights_of(actor)


@pytest.fixture(scope="module")
def whole(folder, batch):
    """Variant → its update in one micro-batch on one rank."""
    return functools.cache(lambda variant: updated(folder, batch, variant))


def the_same(one, other):
    (metrics, before, after), (theirs, _, weights) = one, other
    assert theirs == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    assert moved(before, after) > 1e-6
    assert moved(after, weights) <= 1e-3 * moved(before, after)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_neither_micro_batches_nor_order_nor_what_is_not_trained_change_anything(folder, batch, whole, variant):
    other = select(batch, [i for half in HALVES for i in half])
    for name in ("rollout_logprobs", "reference_logprobs", "values"):
        other[name] = other[name].masked_fill(~other["loss_mask"], float("nan"))
    the_same(whole(variant), updated(folder, other, variant, max_tokens=12))


def every_variant(folder, file, ranks):
    batch = torch.load(file, weights_only=False)
    return {name: updated(folder, batch, name, ranks=ranks) for name in VARIANTS}


@pytest.mark.slow
def test_two_ranks_take_the_same_step_as_one(folder, batch, whole, tmp_path):
    torch.save(batch, tmp_path / "batch.pt")
    for found in on_two(every_variant, folder, tmp_path / "batch.pt", out=tmp_path):
        for variant in VARIANTS:
            the_same(whole(variant), found[variant])
