"""An adapter that is published alone makes the weights that the merged ones are."""

import asyncio

import pytest
import torch

from tandem.api.failures import WeightUpdateFailed
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightUpdate, WeightVersion, version_digest
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.weights.channel import LocalChannel
from tandem.weights.disk import DiskChannel
from tandem.weights.publisher import WeightPublisher
from tests.engines_train.adapters import adapter_of, lora_on, trained
from tests.rollout.clockwork import ClockworkEngine
from tests.tiny import tiny_model_folder

ENGINE = EmbeddedEngineConfig(max_running=8, kv_cache_gib=0.01, threads=1)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def folder(request, tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"), request.param)


def engine_of(folder, placement="colocate", dtype="float32"):
    rollout = RolloutConfig(dtype=dtype, engine=ENGINE)
    return build_inference_engine(rollout, folder=folder, placement=placement, threads=1, device="cpu", deterministic=False)


def answers(engine, count=4):
    gconfig = GenerationConfig(max_new_tokens=12, min_new_tokens=12)
    requests = [LLMRequest((5, 9, 44, 7), gconfig, noise_key=NoiseKey(seed=1, sample=i)) for i in range(count)]

    async def all_of_them():  # one by one: how many are computed together changes last digits
        return [await engine.agenerate(request) for request in requests]

    return [(r.output_ids, r.logprobs, r.versions) for r in asyncio.run(asyncio.wait_for(all_of_them(), 60))]


@pytest.mark.parametrize(
    ("placement", "dtype"),
    [
        ("colocate", "float32"),
        ("colocate", "bfloat16"),
        pytest.param("decoupled", "bfloat16", marks=[pytest.mark.slow, pytest.mark.invariant]),
    ],
)
def test_engines_generate_the_same_from_an_adapter_as_from_merged_weights(folder, placement, dtype, tmp_path):
    trainer, dtype_of = lora_on(folder, dtype=dtype), getattr(torch, dtype)
    one, other = engine_of(folder, placement, dtype), engine_of(folder, "colocate", dtype)
    # the engine reads folders too; whole models go through them
    alone = WeightPublisher(trainer, one, run="a", dtype=dtype_of)
    merged = WeightPublisher(trainer, other, run="b", dtype=dtype_of, channel=DiskChannel(tmp_path / "weights", folder))
    try:
        first = answers(one)
        assert first == answers(other)
        for _ in range(2):
            trained(trainer, steps=2)
            sizes = [publisher.publish()["weights/delivered_mib"] for publisher in (alone, merged)]
            assert sizes[0] * 2**20 == sum(tensor.nbytes for tensor in adapter_of(trainer).values())
            found = answers(one)
            assert found == answers(other)  # to the bit: tokens, log-probabilities and versions
            assert found[0][2][0] == alone.version.number and found[0][1] != first[0][1]
    finally:
        for closed in (alone, merged, one, other):
            closed.close()


class Takes(ClockworkEngine):
    """An engine that says what it takes."""

    def __init__(self, *capabilities):
        super().__init__()
        self.takes = frozenset(capabilities)

    @property
    def capabilities(self):
        return self.takes


def test_an_adapter_goes_alone_only_where_every_engine_takes_it(folder):
    trainer = lora_on(folder)
    for engines, alone in (([Takes("adapter")], True), ([Takes("adapter"), Takes()], False)):
        publisher = WeightPublisher(trainer, engines, run="a", dtype=torch.bfloat16)
        assert publisher.state_dict()["adapter"] == alone


def test_a_publisher_that_goes_on_delivers_the_adapter_under_its_old_number(folder):
    trainer, engine = lora_on(folder), engine_of(folder)
    publisher = WeightPublisher(trainer, engine, run="a", dtype=torch.float32)
    trained(trainer, steps=1)
    publisher.publish()
    trained(trainer, steps=1)
    publisher.publish()
    wanted, state, tensors = answers(engine), publisher.state_dict(), adapter_of(trainer)
    engine.close()
    again, engine = lora_on(folder), engine_of(folder)
    publisher = WeightPublisher(again, engine, run="a", dtype=torch.float32)
    again.load_weights(tensors.items())
    publisher.load_state_dict(state)
    assert publisher.version.number == 2
    assert answers(engine) == wanted
    engine.close()


@pytest.mark.parametrize("merged_first", [False, True])
def test_a_run_goes_on_with_merged_weights_after_adapters_and_the_reverse(folder, merged_first, tmp_path):
    def publisher_of(trainer, engine, merged):
        channel = DiskChannel(tmp_path / f"weights{merged}", folder) if merged else None
        return WeightPublisher(trainer, engine, run="a", dtype=torch.float32, channel=channel)

    trainer, engine = lora_on(folder), engine_of(folder)
    publisher = publisher_of(trainer, engine, merged_first)
    trained(trainer, steps=1)
    publisher.publish()
    wanted, state, before = answers(engine), publisher.state_dict(), publisher.version
    publisher.close()
    engine.close()
    engine = engine_of(folder)
    publisher = publisher_of(trainer, engine, not merged_first)
    publisher.load_state_dict(state)
    assert answers(engine) == wanted
    assert publisher.version.number == 1 and publisher.version.digest != before.digest
    assert publisher.history[1] == publisher.version == engine.version
    publisher.close()
    engine.close()


def test_a_second_head_beside_a_saved_model_does_not_keep_an_engine_from_opening_it(folder, tmp_path):
    lora_on(folder, head="both").save(tmp_path / "saved")
    assert (tmp_path / "saved/value_head.safetensors").is_file()
    engine = engine_of(tmp_path / "saved")
    assert len(answers(engine, count=1)[0][0]) == 12
    engine.close()


def test_an_adapter_of_another_model_is_refused_by_name_and_the_old_weights_stay(folder):
    engine = engine_of(folder)
    before, terms = answers(engine), lora_on(folder).adapter.terms
    tensors = {f"model.layers.9.self_attn.q_proj.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    delivery = LocalChannel().put(tensors.items(), torch.float32)
    version = WeightVersion(1, version_digest(delivery.digests), "a")
    with pytest.raises(WeightUpdateFailed, match=r"layers\.9.* belongs to no matrix"):
        engine.prepare_weights(WeightUpdate(version, delivery.source, delivery.digests, terms))
    assert answers(engine) == before
    engine.close()
