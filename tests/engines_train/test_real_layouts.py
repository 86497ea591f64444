"""The built-in model, once under each layout: 9 heads on 3, which two ranks cannot halve and three can divide."""

import pytest
import torch

from tandem.models.catalog import resolve
from tests.engines_train.layouts import engine_on
from tests.engines_train.steps import distance, random_batch, weighted_nll, weights_of
from tests.ranks import alone_and_on
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.slow

LAYOUTS = {1: ("d1",), 2: ("d2", "d1c2"), 3: ("d1t3",)}


def three_steps(folder, ranks):
    """By layout: how far the weights moved, and the weights after, in few numbers (all of them would not go through a file
    quickly): the first matrix and vector of some layers, and the embedding's first rows."""
    torch.set_num_threads(1)
    found = {}
    for layout in LAYOUTS[ranks]:
        engine = engine_on(folder, layout, lr=1e-2, eps=1e-2, max_tokens=40)
        batch = random_batch((9, 17, 4, 12, 20, 11), vocab_size=VOCAB_SIZE)
        before = chosen(weights_of(engine))
        metrics = [engine.train_batch(batch, weighted_nll, entropy=True) for _ in range(3)]
        found[layout] = {"before": before, "after": chosen(weights_of(engine)), "metrics": metrics}
    return found


def chosen(weights):
    return {
        name: tensor[:VOCAB_SIZE].clone()
        for name, tensor in weights.items()
        if "embed" in name or ".0." in name or ".29." in name
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_three_steps_of_the_real_model_are_those_of_one_process(ranks, tmp_path):
    one, several = alone_and_on(ranks, three_steps, resolve("smollm2-135m"), out=tmp_path)
    one = one["d1"]
    moved = distance(one["before"], one["after"])
    assert moved > 0
    for layout in LAYOUTS[ranks]:
        for found in several:
            assert distance(found[layout]["after"], one["after"]) <= 1e-3 * moved, layout
            for ours, theirs in zip(one["metrics"], found[layout]["metrics"], strict=True):
                assert theirs == pytest.approx(ours, rel=2e-3), layout
