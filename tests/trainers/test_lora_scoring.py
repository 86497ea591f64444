"""Versions of an adapter are scored as an engine served them: merged into the base, and rounded then."""

import pytest
import torch

from tandem.api.team import Team
from tandem.config.rollout import VerifyConfig
from tandem.proof.verification import Scorer, Verifier
from tandem.weights.channel import LocalSource
from tandem.weights.publisher import VersionArchive
from tests.engines_train.adapters import lora_on
from tests.engines_train.steps import random_batch, weighted_nll
from tests.tiny import tiny_model_folder

BATCH = random_batch((30, 40, 30), seed=5)


def test_what_rounding_leaves_of_an_adapter_is_measured_and_told_once(tmp_path, caplog):
    world = World(tiny_model_folder(tmp_path), "bfloat16")
    verifier = Verifier(world.scorer, VerifyConfig(every_steps=None), torch.bfloat16)
    assert verifier.verify_if_due(BATCH) == {}  # B is 0
    world.learn(1)
    adapter, served = world.trainer.adapter, Scorer(world.trainer, world.archive, torch.float32, Team(), rounds=False)
    small = verifier.verify_if_due(BATCH)["gap/adapter_surviving"]
    verifier.verify_if_due(BATCH)
    assert 0 <= small < 0.5 and len(caplog.records) == 1 and "rollout.dtype=float32" in caplog.text
    assert adapter.surviving(torch.float32) > 0.9 and served.surviving() is None
    world.trainer.load_weights([(name, 30 * tensor.clone()) for name, tensor in adapter.weights()])
    large = verifier.verify_if_due(BATCH)["gap/adapter_surviving"]
    assert 0.95 < large < 1.05 and len(caplog.records) == 1


class World:
    """A trained adapter, of which every version is kept."""

    def __init__(self, folder, dtype):
        self.trainer = lora_on(folder, dtype=dtype, rank=16, lr=2e-4)
        self.archive = VersionArchive(lambda number: True, 100)
        self.scorer = Scorer(self.trainer, self.archive, torch.bfloat16, Team(), rounds=True)

    def learn(self, version):
        self.trainer.train_batch(random_batch((7, 5, 9), seed=version), weighted_nll)
        self.archive.keep(version, LocalSource(tuple((n, t.clone()) for n, t in self.trainer.adapter.weights())))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kept_version_scores_to_the_bit_as_when_it_was_the_newest(dtype, tmp_path):
    world, newest = World(tiny_model_folder(tmp_path), dtype), {}
    for version in (1, 2, 3):
        world.learn(version)
        newest[version] = world.scorer.score(BATCH, None)
    for version, scored in newest.items():
        assert torch.equal(world.scorer.score(BATCH, version), scored)
    assert not torch.equal(newest[1], newest[3])
    own = world.trainer.forward(BATCH).logprobs
    assert not torch.equal(own, newest[3])  # what trains is neither merged nor rounded
