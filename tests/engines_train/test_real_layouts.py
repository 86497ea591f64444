"""The built-in model, once under each backend: 9 heads on 3, which two ranks cannot halve and three can divide."""

from importlib.util import find_spec

import pytest
import torch

from tandem.models.catalog import resolve
from tests.engines_train.layouts import engine_on
from tests.engines_train.steps import distance, random_batch, weighted_nll
from tests.ranks import on
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.slow
ZERO = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed, an extra, is not installed")
LAYOUTS = {"shards": ("d2", "d1c2"), "pieces": ("d1t3",), "deepspeed": ("zero1:d2", "zero2:d2", "zero3:d2")}
STEPS = 2


def steps(folder, layouts, ranks):
    """By layout: some of the weights before and after, and metrics."""
    torch.set_num_threads(1)
    found = {}
    for layout in layouts:
        # two micro-batches; with this offset Adam's step is the gradient, which it would hide otherwise
        engine = engine_on(folder, layout, lr=1e-2, eps=1e-2, max_tokens=40)
        batch = random_batch((9, 17, 4, 12, 20, 11), vocab_size=VOCAB_SIZE)
        before = chosen(engine)
        metrics = [engine.train_batch(batch, weighted_nll, entropy=True) for _ in range(STEPS)]
        found[layout] = {"before": before, "after": chosen(engine), "metrics": metrics}
        del engine
    return found


def chosen(engine):
    """Of the first and the last layer, and of the embedding, the first rows: all would not go through a file quickly."""
    return {
        name: tensor[:VOCAB_SIZE].clone()
        for name, tensor in engine.weights()
        if "embed" in name or ".0." in name or ".29." in name
    }


@pytest.fixture(scope="module")
def one():
    """What one process finds."""
    return steps(resolve("smollm2-135m"), ("d1",), ranks=1)["d1"]


@pytest.mark.parametrize("kind", ["shards", "pieces", pytest.param("deepspeed", marks=ZERO)])
def test_steps_of_the_real_model_are_those_of_one_process(kind, one, tmp_path):
    ranks = int(LAYOUTS[kind][0][-1])
    moved = distance(one["before"], one["after"])
    assert moved > 0
    for number, found in enumerate(on(ranks, steps, resolve("smollm2-135m"), LAYOUTS[kind], out=tmp_path)):
        for layout in LAYOUTS[kind]:
            assert distance(found[layout]["before"], one["before"]) == 0, (layout, number)
            assert distance(found[layout]["after"], one["after"]) <= 1e-3 * moved, (layout, number)
            for ours, theirs in zip(one["metrics"], found[layout]["metrics"], strict=True):
                assert theirs == pytest.approx(ours, rel=2e-3), (layout, number)
