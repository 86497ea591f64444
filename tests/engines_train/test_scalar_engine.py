"""The engine with a scalar head: the same step however the batch is cut, on one process and on two."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.engines_train.steps import distance, engine_on, random_batch, weights_of
from tests.ranks import alone_and_on_two
from tests.tiny import tiny_model_folder

LENGTHS = (3, 14, 2, 5, 9, 9, 4)


def regression(outputs, view):
    """Scores of every token towards its advantage."""
    assert outputs.logprobs.numel() == 0
    return (outputs.scores - view["advantages"]).square() * view["loss_mask"], {"score": outputs.scores.detach()}


def run_all(folder, out, ranks):
    """Three steps (the head begins at 0: the backbone moves from the second on), a forward pass, a save and a load."""
    torch.set_num_threads(1)
    found = {}
    for name, lengths in {"many": LENGTHS, "one": (7,)}.items():
        engine = engine_on(folder, max_tokens=15, ranks=ranks, max_grad_norm=0.05, head="scalar")
        batch = random_batch(lengths)
        found[f"{name}/metrics"] = [engine.train_batch(batch, regression) for _ in range(3)]
        found[f"{name}/scores"] = engine.forward(batch).scores
        found[f"{name}/weights"] = weights_of(engine)
    engine.save(out / f"saved-{ranks}")
    fresh = engine_on(folder, ranks=ranks, head="scalar")
    fresh.load(out / f"saved-{ranks}")
    found["loaded"] = weights_of(fresh)
    found["bfloat16"] = engine_on(folder, dtype="bfloat16", ranks=ranks, head="scalar").train_batch(batch, regression)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What one process found, and what each of two found."""
    out = tmp_path_factory.mktemp("ranks")
    folder = tiny_model_folder(out, "smollm")
    one, two = alone_and_on_two(run_all, folder, out, out=out)
    return one, two, out, folder


@pytest.mark.parametrize("name", ["many", "one"])
def test_steps_and_scores_do_not_depend_on_the_number_of_ranks(runs, name):
    one, two, _, folder = runs
    initial = weights_of(engine_on(folder, head="scalar"))
    moved = distance(initial, one[f"{name}/weights"])
    backbone = {n for n in initial if n != "score.weight"}
    assert sum(float((initial[n] - one[f"{name}/weights"][n]).abs().sum()) for n in backbone) > 0
    for found in two:
        for ours, theirs in zip(one[f"{name}/metrics"], found[f"{name}/metrics"], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-4)
        assert distance(one[f"{name}/weights"], found[f"{name}/weights"]) <= 1e-3 * moved
        torch.testing.assert_close(found[f"{name}/scores"], one[f"{name}/scores"], atol=1e-4, rtol=1e-4)


def test_saving_and_loading_are_the_same(runs):
    one, two, out, _ = runs
    saved = AutoModelForSequenceClassification.from_pretrained(out / "saved-2")
    for found in (one, *two):
        assert distance(found["loaded"], found["one/weights"]) == 0
        assert found["bfloat16"]["loss"] == pytest.approx(one["bfloat16"]["loss"], rel=0.02)
    assert distance(two[0]["loaded"], dict(saved.named_parameters())) == 0
    assert not (out / "saved-2" / "generation_config.json").exists()


@pytest.mark.parametrize("max_tokens", [1, 15, 30])
def test_a_step_does_not_depend_on_micro_batching(tmp_path, max_tokens):
    folder, batch = tiny_model_folder(tmp_path), random_batch(LENGTHS)
    whole, split = engine_on(folder, head="scalar"), engine_on(folder, head="scalar", max_tokens=max_tokens)
    initial = weights_of(whole)
    for _ in range(2):
        assert split.train_batch(batch, regression) == pytest.approx(whole.train_batch(batch, regression), rel=1e-4)
    assert distance(weights_of(whole), weights_of(split)) <= 1e-3 * distance(initial, weights_of(whole))


def test_entropy_of_a_scalar_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no entropy"):
        engine_on(tiny_model_folder(tmp_path), head="scalar").forward(random_batch((3,)), entropy=True)
