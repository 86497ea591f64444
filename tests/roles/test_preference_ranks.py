"""Two ranks take the step that one takes, whatever the loss."""

import pytest
import torch

from tandem.algorithms.preference import PREFERENCE_LOSSES
from tandem.config.algorithm import Component
from tandem.config.train_engine import OptimizerConfig, TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.roles.learners import PreferenceLearner, RewardModel
from tandem.roles.reference import Reference
from tests.ranks import alone_and_on_two
from tests.roles.test_preference_roles import pair_batch
from tests.tiny import tiny_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.invariant]


def engine_on(folder, ranks, head="lm"):
    # a large eps makes Adam's step smooth in the gradient, so that rounding does not turn into a sign
    optimizer = OptimizerConfig(lr=0.1, eps=0.1, max_grad_norm=None)
    config = TrainEngineConfig(
        path=str(folder),
        backend=f"fsdp:d{ranks}",
        dtype="float32",
        optimizer=optimizer,
        max_tokens_per_micro_batch=16,
    )
    return SpreadEngine(config, total_steps=10, head=head)


def steps(folders, ranks):
    """Metrics of two steps, and the weights after them, of every loss and of a reward model."""
    torch.set_num_threads(1)
    found = {}
    for loss in PREFERENCE_LOSSES:
        reference = Reference(engine_on(folders[1], ranks)) if loss in ("dpo", "ipo", "kto") else None
        learner = PreferenceLearner(engine_on(folders[0], ranks), Component(loss), reference=reference)
        batch = learner.compute_reference(pair_batch())
        metrics = [learner.train_preference(learner.compute_baseline(batch)) for _ in range(2)]
        found[loss] = metrics, {name: tensor.clone() for name, tensor in learner.engine.weights()}
    model = RewardModel(engine_on(folders[0], ranks, head="scalar"))
    metrics = [model.train_pairs(pair_batch(margin=0.2)) for _ in range(2)]
    found["reward"] = metrics, {name: tensor.clone() for name, tensor in model.engine.weights()}
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    folders = tiny_model_folder(out, seed=0), tiny_model_folder(out, seed=1)
    return alone_and_on_two(steps, folders, out=out)


@pytest.mark.parametrize("loss", [*PREFERENCE_LOSSES, "reward"])
def test_two_ranks_take_the_step_of_one(runs, loss):
    alone, both = runs
    for rank in both:
        for ours, theirs in zip(alone[loss][0], rank[loss][0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        assert all(torch.allclose(alone[loss][1][name], rank[loss][1][name], atol=1e-4) for name in alone[loss][1])
