"""A cache too small for all that is asked for: rows grow, and who came last gives way and comes back."""

import random

import pytest
import torch

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.rollout import GenerationConfig
from tests.engines_inference.test_core_equal import drain, make_core, prompts, run
from tests.engines_inference.test_core_memory import GIB_OF_512
from tests.tiny import tiny_model, tiny_model_folder


def of_lengths(lengths, prompt_length=20, alike=1, first=0):
    """Requests that may draw 100 tokens and draw as many as said; ``alike`` of them share a prompt."""
    asked = prompts([prompt_length] * (len(lengths) // alike + 1))
    return {
        first + i: LLMRequest(asked[i // alike], GenerationConfig(max_new_tokens=n, min_new_tokens=n), NoiseKey(i))
        for i, n in enumerate(lengths)
    }


def learnt_short(folder, **settings):
    """An engine that has seen short completions only."""
    core = make_core(folder, **settings)
    run(core, of_lengths([8] * 8, first=1000))
    return core


def assert_same(one, other):
    assert {i: r.output_ids for i, r in one.items()} == {i: r.output_ids for i, r in other.items()}
    for i, response in one.items():
        torch.testing.assert_close(torch.tensor(response.logprobs), torch.tensor(other[i].logprobs), atol=1e-4, rtol=0)


@pytest.mark.parametrize("alike", [1, 5])
def test_what_gave_way_and_came_back_is_what_would_have_come_uninterrupted(tmp_path, alike):
    folder = tiny_model_folder(tmp_path)
    requests = of_lengths(random.Random(1).choices((10, 40, 100), k=20), alike=alike)
    core = learnt_short(folder, kv_cache_gib=GIB_OF_512)
    for number, request in requests.items():
        core.add(number, request)
    responses = {}
    while core.has_work:
        responses.update(core.step())
        assert core.statistics()["kv_reserved_tokens"] <= 512
        assert core.statistics()["kv_held_bytes"] <= 512 * 256
    assert core.statistics()["preempted"] > 3
    assert core.statistics()["kv_reserved_tokens"] == 0
    assert_same(responses, run(make_core(folder), requests))


def test_more_run_at_once_in_short_rows_before_and_after_completions_turn_out_short(tmp_path):
    folder = tiny_model_folder(tmp_path)
    may_draw_100 = GenerationConfig(max_new_tokens=100)
    running = []
    new, learnt = (make(folder, kv_cache_gib=GIB_OF_512) for make in (make_core, learnt_short))
    for core, count in ((new, 4), (learnt, 16), (make_core(folder, kv_cache_gib=GIB_OF_512), 16)):
        for i, prompt in enumerate(prompts([20] * count)):
            core.add(i, LLMRequest(prompt, may_draw_100, NoiseKey(i)))
        core.step()
        running.append((core.statistics()["running"], core.statistics()["kv_reserved_tokens"]))
    assert running == [(4, 4 * 128), (16, 16 * 32), (16, 16 * 32)], "whole rows only where all that wait fit so"


def test_a_new_engine_with_a_small_cache_draws_the_same_as_one_with_room(tmp_path):
    """Nothing has ended when the first give way: all may draw, and draw, as many tokens."""
    folder = tiny_model_folder(tmp_path)
    requests = of_lengths([100] * 12)
    core = make_core(folder, kv_cache_gib=GIB_OF_512)
    responses = run(core, requests)
    assert 0 < core.statistics()["preempted"] < 40
    assert_same(responses, run(make_core(folder), requests))


def test_a_deterministic_engine_reserves_whole_rows_and_nothing_gives_way(tmp_path):
    folder = tiny_model_folder(tmp_path)
    core = make_core(folder, deterministic=True, kv_cache_gib=GIB_OF_512)
    run(core, of_lengths([8] * 8, first=1000))
    for number, request in of_lengths([100] * 9).items():
        core.add(number, request)
    core.step()
    assert core.statistics()["running"] == 4
    drain(core)
    assert core.statistics()["preempted"] == 0


def test_weights_change_while_some_have_given_way(tmp_path):
    """Every token has the log-probability of the version that is stamped on it, also where its row was computed anew."""
    models = {number: tiny_model(seed=number).eval() for number in range(3)}
    core = learnt_short(tiny_model_folder(tmp_path), kv_cache_gib=GIB_OF_512)
    core.swap(core.stage(models[0].state_dict().items()), WeightVersion(0))
    for number, request in of_lengths([100] * 12, alike=3).items():
        core.add(number, request)
    responses, gave_way, steps = {}, [], 0
    while core.has_work:
        responses.update(core.step())
        steps += 1
        if steps in (60, 120):
            gave_way.append(core.statistics()["preempted"])
            core.swap(core.stage(models[len(gave_way)].state_dict().items()), WeightVersion(len(gave_way)))
    assert gave_way[0] > 0
    seen = set()
    for response in responses.values():
        with torch.no_grad():
            ids = torch.tensor([response.input_ids + response.output_ids])
            logprobs = {n: model(ids).logits[0].log_softmax(-1) for n, model in models.items()}
        start = len(response.input_ids) - 1
        for i, (token, number) in enumerate(zip(response.output_ids, response.versions, strict=True)):
            assert abs(response.logprobs[i] - float(logprobs[number][start + i, token])) < 1e-3
        seen |= set(response.versions)
    assert seen == {0, 1, 2}


def test_what_gave_way_can_be_cancelled_and_leaves_nothing(tmp_path):
    core = learnt_short(tiny_model_folder(tmp_path), kv_cache_gib=GIB_OF_512, max_running=8)
    for number, request in of_lengths([100] * 8).items():
        core.add(number, request)
    while not core.statistics()["preempted"]:
        core.step()
    assert core.statistics()["waiting"] > 0 and len(core.drawn(7, 0)[0]) > 0, "its tokens are kept"
    for number in range(8):
        core.cancel(number)
    assert not core.has_work and core.statistics()["kv_reserved_tokens"] == 0
    assert len(run(core, of_lengths([100] * 8))) == 8, "no line of the tables is lost"
