"""Two processes do the same as one."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.api.team import Team
from tests.engines_train.steps import distance, engine_on, random_batch, weighted_nll, weights_of
from tests.ranks import alone_and_on_two
from tests.tiny import tiny_model_folder

BATCHES = {"many": (3, 14, 2, 5, 9, 9, 4), "one": (7,)}  # one sequence: the other rank has nothing to do


def run_all(folder, out, ranks):
    """Two steps, a forward pass, a save and a load; returns what can be compared."""
    torch.set_num_threads(1)
    found = {}
    for name, lengths in BATCHES.items():
        engine = engine_on(folder, max_tokens=15, ranks=ranks, max_grad_norm=0.05)
        batch = random_batch(lengths)
        metrics = [engine.train_batch(batch, weighted_nll, entropy=True) for _ in range(2)]
        outputs = engine.forward(batch, entropy=True)
        found[name] = {"metrics": metrics, "outputs": tuple(outputs[:2]), "weights": weights_of(engine)}
    found["eval"] = engine.eval_batch(batch, weighted_nll)
    engine.save(out / f"saved-{ranks}")
    fresh = engine_on(folder, ranks=ranks)
    fresh.load(out / f"saved-{ranks}")
    found["loaded"] = weights_of(fresh)
    copy = engine_on(folder, ranks=ranks)
    copy.load_weights(engine.weights())
    found["copied"] = {"weights": weights_of(copy), "logprobs": copy.forward(batch).logprobs}
    found["original"] = engine.forward(batch).logprobs
    other = {name: tensor + 0.01 for name, tensor in weights_of(engine).items()}
    with engine.using(Team().spread(other.items())):
        found["elsewhere"] = engine.forward(batch).logprobs
    found["back"] = {"weights": weights_of(engine), "logprobs": engine.forward(batch).logprobs}
    rough, batch = engine_on(folder, dtype="bfloat16", ranks=ranks, beta1=0.0), random_batch(BATCHES["many"])
    warm = batch.clone().update({"temperature": torch.full_like(batch["temperature"], 1.001)})
    mild = warm.clone().update({"temperature": torch.ones_like(batch["temperature"])})
    found["warm"], found["mild"] = (rough.forward(one).logprobs for one in (warm, mild))
    found["bfloat16"] = rough.train_batch(batch, weighted_nll)
    moments = rough.optimizer.tensors()
    found["gradients"] = [x.flatten() for name, x in moments if name.endswith("/exp_avg")]  # beta1 is 0
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The findings of one process, and those of each of two."""
    out = tmp_path_factory.mktemp("ranks")
    folder = tiny_model_folder(out, "smollm")
    one, two = alone_and_on_two(run_all, folder, out, out=out)
    return one, two, out, folder


@pytest.mark.parametrize("name", BATCHES)
def test_steps_do_not_depend_on_the_number_of_ranks(runs, name):
    one, two, _, folder = runs
    initial = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    for found in two:
        for ours, theirs in zip(one[name]["metrics"], found[name]["metrics"], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-4)
        moved = distance(initial, one[name]["weights"])
        assert moved > 0
        assert distance(one[name]["weights"], found[name]["weights"]) <= 1e-3 * moved


@pytest.mark.parametrize("name", BATCHES)
def test_every_rank_gets_the_whole_forward_pass_in_order(runs, name):
    one, two, _, _ = runs
    for found in two:
        torch.testing.assert_close(found[name]["outputs"], one[name]["outputs"], atol=1e-4, rtol=1e-4)


def test_evaluation_saving_and_loading_are_the_same(runs):
    one, two, out, _ = runs
    saved = AutoModelForCausalLM.from_pretrained(out / "saved-2")
    for found in two:
        assert found["eval"] == pytest.approx(one["eval"], rel=1e-4)
        assert distance(found["loaded"], dict(saved.named_parameters())) == 0
        assert distance(found["loaded"], found["one"]["weights"]) == 0


def test_weights_copied_from_one_engine_to_another_are_used_on_every_rank(runs):
    one, two, _, _ = runs
    for found in (one, *two):
        assert distance(found["copied"]["weights"], found["loaded"]) == 0
        assert torch.equal(found["copied"]["logprobs"], found["original"])


def test_other_weights_are_computed_with_on_every_rank_and_its_own_come_back(runs):
    one, two, _, _ = runs
    for found in two:
        assert torch.allclose(found["elsewhere"], one["elsewhere"], atol=1e-4)
        assert not torch.allclose(found["elsewhere"], found["original"], atol=1e-2)
        assert distance(found["back"]["weights"], found["copied"]["weights"]) == 0
        assert torch.equal(found["back"]["logprobs"], found["original"])


def test_bfloat16_agrees_within_its_precision(runs):
    one, two, _, _ = runs
    assert two[0]["bfloat16"]["loss"] == pytest.approx(one["bfloat16"]["loss"], rel=0.02)
    assert two[0]["bfloat16"]["grad_norm"] == pytest.approx(one["bfloat16"]["grad_norm"], rel=0.02)


def test_beside_bfloat16_temperatures_and_sums_of_gradients_are_float32(runs):
    one, two, _, _ = runs
    for found in (one, *two):
        assert not torch.equal(found["warm"], found["mild"]), "bfloat16 would round 1.001 to 1"
    for found in two:  # each rank's own gradient is rounded, their sum is not
        gradient = torch.cat(found["gradients"])
        assert (gradient != gradient.bfloat16()).float().mean() > 0.2
