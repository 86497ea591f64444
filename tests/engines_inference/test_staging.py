"""What is proven of an update is the copy that will be served, not the memory that it was read from."""

import time

import pytest
import torch

from tandem.api.failures import WeightUpdateFailed
from tandem.api.requests import LLMRequest
from tandem.api.weights import WeightUpdate, WeightVersion, version_digest
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.driver import stage_update
from tandem.weights.channel import LocalChannel
from tandem.weights.shared_memory import SharedMemoryChannel
from tests.engines_inference.test_core_equal import make_core, prompts, run
from tests.tiny import tiny_model, tiny_model_folder

NAME = "model.layers.0.mlp.down_proj.weight"


class SlowCore:
    """A core whose copying is slow; meanwhile somebody writes to the memory that the tensor ``NAME`` came from."""

    def __init__(self, core, source):
        self._core, self._source, self.device = core, source, core.device

    def stage(self, named_tensors):
        return self._core.stage(self._overwriting(named_tensors))

    def _overwriting(self, named_tensors):
        for name, tensor in named_tensors:
            if name == NAME:
                time.sleep(0.3)  # the digest of so small a tensor is computed by now
                dict(self._source.tensors())[NAME].fill_(3.0)
            yield name, tensor


def put(channel, model):
    delivery = channel.put(model.state_dict().items(), torch.float32)
    return WeightUpdate(WeightVersion(1, version_digest(delivery.digests)), delivery.source, delivery.digests)


@pytest.mark.parametrize("channel", [SharedMemoryChannel, LocalChannel])
def test_what_the_senders_memory_gets_during_the_copy_does_not_reach_the_engine(channel, tmp_path):
    core, channel = make_core(tiny_model_folder(tmp_path)), channel()
    request = {0: LLMRequest(prompts([9])[0], GenerationConfig(max_new_tokens=8, greedy=True))}
    update = put(channel, tiny_model(seed=5))
    core.swap(stage_update(core, update), update.version)
    expected = run(core, request)[0]

    staged = stage_update(SlowCore(core, update.source), update)
    core.swap(staged, update.version)

    assert run(core, request)[0].logprobs == expected.logprobs
    channel.close()


def test_memory_that_changed_before_it_is_copied_is_refused_by_name(tmp_path):
    core, channel = make_core(tiny_model_folder(tmp_path)), SharedMemoryChannel()
    update = put(channel, tiny_model(seed=5))
    dict(update.source.tensors())[NAME][0, 0] += 1.0

    with pytest.raises(WeightUpdateFailed, match=rf"{NAME}.*the bytes changed in transit"):
        stage_update(core, update)
    channel.close()
