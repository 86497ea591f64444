"""The reference takes over the actor's weights when it is told to, and only then."""

import pytest
import torch

from tandem.api.failures import ConfigError
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
    assert not reference.refresh_if_due(actor, 1)
    assert same(initial, weights_of(reference.engine))
    assert reference.refresh_if_due(actor, 2)
    assert reference.refreshed == 2
    assert same(weights_of(actor), weights_of(reference.engine))
    assert torch.equal(reference.compute_logprobs(batch)["reference_logprobs"], actor.forward(batch).logprobs)
    copied = {name: tensor.clone() for name, tensor in weights_of(reference.engine).items()}
    actor.train_batch(batch, weighted_nll)
    assert same(copied, weights_of(reference.engine))  # a copy, not the same memory


def test_without_an_interval_it_never_follows(folder):
    reference = Reference(engine_on(folder))
    assert not any(reference.refresh_if_due(engine_on(folder), version) for version in range(4))


def test_another_model_is_refused_by_the_tensor_that_does_not_fit(folder, tmp_path):
    small = engine_on(tiny_model_folder(tmp_path, hidden_size=16))
    with pytest.raises(ConfigError, match="cannot be copied into this model"):
        Reference(engine_on(folder), refresh_every_steps=1).refresh_if_due(small, 1)
    engine = engine_on(folder)
    with pytest.raises(ConfigError, match="were not given"):
        engine.load_weights(list(engine.weights())[:-1])
