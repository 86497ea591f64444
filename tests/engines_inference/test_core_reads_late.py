"""Tokens that the host sees one step late, as on a GPU: the same requests get the same, by the same engine on a CPU."""

import pytest
import torch

from tandem.api.requests import LLMRequest, NoiseKey, StopReason
from tandem.api.weights import WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.core import EngineCore
from tests.engines_inference.test_core_equal import prompts
from tests.engines_inference.test_core_growth import assert_same, of_lengths
from tests.engines_inference.test_core_memory import GIB_OF_512
from tests.engines_inference.test_core_on_gpu import ODD, requests
from tests.tiny import tiny_model, tiny_model_folder

STOPS = GenerationConfig(max_new_tokens=40, stop_token_ids=tuple(range(3, 300, 9)))


def make(folder, late, **settings):
    config = EmbeddedEngineConfig(**{"kv_cache_gib": 0.01, "prefill_chunk_tokens": 24} | settings)
    return EngineCore(folder, config, torch.float32, "cpu", WeightVersion(0), reads_late=late)


def run_twice(folder, asked, between=lambda core, step: None, **settings):
    """The responses and the statistics of both ways; what is seen on the way is the beginning of the answer."""
    found = []
    for late in (False, True):
        core, responses, step, seen = make(folder, late, **settings), {}, 0, {}
        for number, request in asked.items():
            core.add(number, request)
        while core.has_work:
            responses.update(core.step())
            step += 1
            between(core, step)
            seen |= {number: core.drawn(number, 0)[0] for number in asked if number not in responses and step < 9}
        for number, response in responses.items():
            assert response.output_ids[: len(seen.get(number, ()))] == tuple(seen.get(number, ()))
        found.append((responses, core.statistics()))
    return found


def test_late_is_at_once_for_every_way_of_sampling_and_of_ending(tmp_path):
    asked = dict(enumerate(requests([*ODD, GenerationConfig(max_new_tokens=1)])))
    asked |= {100 + i: LLMRequest(prompt, STOPS, NoiseKey(9, sample=i)) for i, prompt in enumerate(prompts([12] * 6))}
    (at_once, one), (late, other) = run_twice(tiny_model_folder(tmp_path), asked)
    assert_same(at_once, late)
    assert {i: r.stop_reason for i, r in late.items()} == {i: r.stop_reason for i, r in at_once.items()}
    assert {r.stop_reason for r in late.values()} == {StopReason.STOP, StopReason.LENGTH}
    assert other["generated_tokens"] == one["generated_tokens"], "what is drawn behind the end is not counted"
    assert other["steps"] > one["steps"]


@pytest.mark.parametrize("alike", [1, 3])
def test_late_is_at_once_in_a_small_cache_and_with_few_lines(tmp_path, alike):
    asked = of_lengths([100, 30, 100, 7, 100, 60, 100, 100, 12], alike=alike)
    asked |= {50 + i: LLMRequest(p, STOPS, NoiseKey(9, sample=i)) for i, p in enumerate(prompts([12] * 9))}
    (at_once, _), (late, counted) = run_twice(tiny_model_folder(tmp_path), asked, kv_cache_gib=GIB_OF_512, max_running=5)
    assert_same(at_once, late)
    assert counted["preempted"] > 0 and counted["kv_reserved_tokens"] == 0


def test_late_is_at_once_over_a_switch_of_weights_and_a_cancelled_request(tmp_path):
    new = tiny_model(seed=1).eval()

    def switch(core, step):
        if step == 6:
            core.swap(core.stage(new.state_dict().items()), WeightVersion(1))
        if step == 9:
            core.cancel(2)

    asked = of_lengths([6, 7, 30, 30, 30, 20], alike=2)
    (at_once, _), (late, _) = run_twice(tiny_model_folder(tmp_path), asked, switch)
    assert set(late) == {0, 1, 3, 4, 5}
    assert_same(at_once, late)
    assert {i: r.versions for i, r in late.items()} == {i: r.versions for i, r in at_once.items()}
    assert {version for r in late.values() for version in r.versions} == {0, 1}
