"""The reference takes over the actor's weights when it is told to, and only then."""

import pytest
import torch

from tandem.config.errors import ConfigError
from tandem.roles.reference import Reference
from tests.engines_train.steps import engine_on, random_batch, weighted_nll, weights_of
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_refresh_copies_the_weights_bit_for_bit_and_later_steps_leave_them(folder):
    actor, batch = engine_on(folder), random_batch((5, 7))
    reference = Reference(engine_on(folder), refresh_every_steps=2)
    initial = {name: tensor.clone() for name, tensor in weights_of(reference.engine).items()}

    actor.train_batch(batch, weighted_nll)
    versions = iter([1, 2])
    reference.follow(actor, lambda: next(versions))
    reference.refresh_if_due()
    assert same(initial, weights_of(reference.engine)) and reference.refreshed == 0
    reference.refresh_if_due()
    assert reference.refreshed == 2
    assert same(weights_of(actor), weights_of(reference.engine))
    assert torch.equal(reference.compute_logprobs(batch)["reference_logprobs"], actor.forward(batch).logprobs)
    copied = {name: tensor.clone() for name, tensor in weights_of(reference.engine).items()}
    actor.train_batch(batch, weighted_nll)
    assert same(copied, weights_of(reference.engine))  # a copy, not the same memory


def test_without_an_interval_it_never_follows(folder):
    reference, actor = Reference(engine_on(folder)), engine_on(folder)
    actor.train_batch(random_batch((5, 7)), weighted_nll)
    initial = {name: tensor.clone() for name, tensor in weights_of(reference.engine).items()}
    reference.follow(actor, lambda: 2)
    reference.refresh_if_due()
    assert same(initial, weights_of(reference.engine)) and reference.refreshed == 0


def test_another_model_is_refused_by_the_tensor_that_does_not_fit(folder, tmp_path):
    small = engine_on(tiny_model_folder(tmp_path, hidden_size=16))
    reference = Reference(engine_on(folder), refresh_every_steps=1)
    with pytest.raises(ConfigError, match="follows no actor"):
        reference.refresh_if_due()
    reference.follow(small, lambda: 1)
    with pytest.raises(ConfigError, match="cannot be copied into this model"):
        reference.refresh_if_due()
    engine = engine_on(folder)
    with pytest.raises(ConfigError, match="were not given"):
        engine.load_weights(list(engine.weights())[:-1])
