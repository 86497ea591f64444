"""The ways that training takes on a GPU, on one that is pretended: tensors of one device, and a host that does not wait."""

import pytest
import torch

from tandem.engines.train.engine import SpreadEngine
from tandem.roles.actor import Actor
from tandem.roles.reference import Reference
from tests.engines_train.steps import engine_on, random_batch, weighted_nll
from tests.pretended_gpu import GPU, REFUSED, OnGpu, pretended_gpu
from tests.roles.batches import step
from tests.roles.presets import actor_config, algorithm_of, full_batch
from tests.tiny import tiny_model_folder

TO_THE_HOST = {
    "tolist in spread.py:_numbers": "the metrics of a step, together",
    "_local_scalar_dense in optimizer.py:_gradient_norm": "whether and how far to step",
    "_to_copy in engine.py:forward": "the outputs of a pass, which the host keeps",
}
"""What the host waits for, once an optimizer step or a pass, however many micro-batches it has."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"), num_hidden_layers=1)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def squares(outputs, view):
    return (outputs.scores - 1).square(), {"score/max": outputs.scores.detach()}


def places(waits):
    """Place → times, without the number of the line."""
    return {name.rpartition(":")[0]: times for name, times in waits.places.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_on_a_gpu_is_that_of_the_cpu(folder, dtype):
    batch = random_batch([9, 5, 12, 7, 3, 8])
    on_cpu = engine_on(folder, max_tokens=16, dtype=dtype).train_batch(batch, weighted_nll, entropy=True)
    with pretended_gpu():
        engine = engine_on(folder, max_tokens=16, dtype=dtype, device=GPU)
        on_gpu = engine.train_batch(batch, weighted_nll, entropy=True)
        assert all(isinstance(p, OnGpu) for p in engine.model.parameters())
    assert on_gpu == pytest.approx(on_cpu, rel=1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("max_tokens", [1000, 40, 16])
def test_the_host_waits_once_a_step_and_once_a_pass_for_any_number_of_micro_batches(folder, max_tokens):
    batch = random_batch([9, 5, 12, 7, 3, 8, 11, 6])
    batch["loss_weights"][:9] = 0  # a sequence without weight gets a forward pass of its own
    with pretended_gpu() as waits:
        engine = engine_on(folder, max_tokens=max_tokens, dtype="bfloat16", device=GPU)
        waits.places.clear()
        engine.train_batch(batch, weighted_nll, entropy=True)
        engine.forward(batch, entropy=True)
    assert places(waits) == dict.fromkeys(TO_THE_HOST, 1)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "vespo", "cpgd"])
def test_a_policy_loss_does_not_make_the_host_wait_for_a_micro_batch(folder, preset):
    batch, config = full_batch(folder), actor_config(folder, max_tokens=60)
    with pretended_gpu() as waits:
        actor = Actor(
            SpreadEngine(config, total_steps=100, device=GPU),
            algorithm_of(preset),
            config,
            reference=Reference(None),
            max_new_tokens=10,
        )
        waits.places.clear()
        step(actor, batch)
    assert places(waits).items() <= dict.fromkeys(TO_THE_HOST, 1).items()


@pytest.mark.parametrize("head", ["scalar", "both"])
def test_a_critic_does_not_make_the_host_wait_either(folder, head):
    batch = random_batch([9, 5, 12, 7, 3, 8])

    with pretended_gpu() as waits:
        engine = engine_on(folder, max_tokens=16, dtype="float32", device=GPU, head=head)
        waits.places.clear()
        metrics = engine.train_batch(batch, squares)
    assert places(waits).keys() <= TO_THE_HOST.keys() and waits.count == 2
    assert metrics["score/max"] == metrics["score/max"]


@pytest.mark.parametrize("head", ["lm", "both"])
def test_a_deterministic_step_has_no_operation_that_torch_refuses_on_a_gpu(folder, deterministic, head):
    batch = random_batch([9, 5, 12, 7, 3, 8])
    with pretended_gpu():
        engine = engine_on(folder, max_tokens=16, dtype="bfloat16", device=GPU, head=head)
        metrics = engine.train_batch(batch, weighted_nll if head == "lm" else squares)
        engine.forward(batch, entropy=head == "lm")
    assert metrics["grad_norm"] > 0


def test_the_operations_that_are_refused_are_those_of_torchs_documentation():
    listed = torch.use_deterministic_algorithms.__doc__.partition("deterministic operations will throw a")[2].partition(
        "In addition"
    )[0]
    named = {line.split("`torch.")[1].split("`")[0] for line in listed.splitlines() if line.strip().startswith("* :")}
    assert len(named) > 15 and named <= REFUSED.keys()
    for names in REFUSED.values():
        assert all(hasattr(torch.ops.aten, name) for name in names.split())


def test_sums_that_have_no_order_are_refused_on_the_pretended_gpu(deterministic):
    with pretended_gpu():
        numbers = torch.ones(3).to(GPU)
        with pytest.raises(RuntimeError, match="cumsum does not have a deterministic implementation"):
            numbers.cumsum(0)
        assert numbers.long().cumsum(0).tolist() == [1, 2, 3]


def test_what_mixes_devices_fails_as_on_a_gpu():
    with pretended_gpu() as waits:
        there = torch.ones(3).to(GPU)
        with pytest.raises(RuntimeError, match="cuda:0 and on cpu"):
            there + torch.ones(3)
        assert bool((there + 1).sum() == 6) and there.tolist() == [1, 1, 1]
    assert waits.count == 3  # an upload, a truth value, a list
