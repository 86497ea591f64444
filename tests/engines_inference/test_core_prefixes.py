"""Prompts that begin alike: what is copied equals what is computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.rollout import GenerationConfig
from tests.engines_inference.test_core_equal import drain, make_core, prompts, rescore, run
from tests.tiny import KINDS, tiny_model_folder

SYSTEM, QUESTIONS = prompts([40])[0], prompts([9, 3, 21, 14], seed=1)
ALIKE = [SYSTEM + question for question in QUESTIONS]


def sampled(i, prompt, new=16):
    return LLMRequest(prompt, GenerationConfig(max_new_tokens=new, min_new_tokens=new), NoiseKey(seed=2, group=i))


@pytest.mark.parametrize("kind", KINDS)
def test_a_common_beginning_is_computed_once_and_changes_neither_tokens_nor_logprobs(kind, tmp_path):
    folder = tiny_model_folder(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    core = make_core(folder)  # chunks of 24 tokens: the beginning itself takes two passes
    together = run(core, {i: sampled(i, p) for i, p in enumerate(ALIKE)})

    assert core.statistics()["shared_prompt_tokens"] == 3 * len(SYSTEM)
    assert core.statistics()["prefill_tokens"] == len(SYSTEM) + sum(map(len, QUESTIONS))
    for i, prompt in enumerate(ALIKE):
        alone = run(make_core(folder), {0: sampled(i, prompt)})[0]
        assert together[i].output_ids == alone.output_ids
        assert (torch.tensor(together[i].logprobs) - rescore(model, together[i])).abs().max() <= 1e-4


def test_groups_copy_the_beginning_of_another_groups_prompt(tmp_path):
    folder = tiny_model_folder(tmp_path)
    core = make_core(folder)
    requests = {10 * i + s: sampled(10 * i + s, p) for i, p in enumerate(ALIKE[:2]) for s in range(3)}
    responses = run(core, requests)

    assert core.statistics()["prefill_tokens"] == len(SYSTEM) + len(QUESTIONS[0]) + len(QUESTIONS[1])
    for number, request in requests.items():
        alone = run(make_core(folder), {0: request})[0]
        assert responses[number].output_ids == alone.output_ids


def test_who_waits_for_a_beginning_that_is_cancelled_computes_it(tmp_path):
    folder = tiny_model_folder(tmp_path)
    core = make_core(folder)
    for i in (0, 1):
        core.add(i, sampled(i, ALIKE[i]))
    core.step()  # 24 of the first prompt's 49 tokens
    assert core.statistics()["prefill_tokens"] == 24
    core.cancel(0)
    responses = drain(core)

    assert core.statistics()["shared_prompt_tokens"] == 0
    assert responses[1].output_ids == run(make_core(folder), {0: sampled(1, ALIKE[1])})[0].output_ids


def test_nobody_waits_a_pass_for_a_few_more_tokens_than_can_be_copied_at_once(tmp_path):
    folder = tiny_model_folder(tmp_path)
    core = make_core(folder)  # chunks of 24 tokens
    early, rest, other = prompts([40, 14, 4], seed=5)
    nearly = early[:20] + rest[:4]  # 20 tokens in common with what is there, 24 with each other
    requests = {0: sampled(0, early, new=30), 1: sampled(1, nearly + rest[4:8]), 2: sampled(2, nearly + other)}
    core.add(0, requests[0])
    for _ in range(3):
        core.step()
    before = core.statistics()
    core.add(1, requests[1])
    core.add(2, requests[2])
    responses = core.step()
    after = core.statistics()

    assert after["prefill_tokens"] - before["prefill_tokens"] == 8 + 8  # both in the one pass
    assert after["shared_prompt_tokens"] - before["shared_prompt_tokens"] == 20 + 20
    responses = dict(responses) | drain(core)
    for number, request in requests.items():
        alone = run(make_core(folder), {0: request})[0]
        assert responses[number].output_ids == alone.output_ids


def test_who_would_gain_much_by_waiting_waits(tmp_path):
    folder = tiny_model_folder(tmp_path)
    core = make_core(folder, prefill_chunk_tokens=64)  # room for both in one pass
    early, longer, *ends = prompts([40, 20, 4, 4], seed=6)
    core.add(0, sampled(0, early, new=30))
    for _ in range(3):
        core.step()
    before = core.statistics()
    common = early[:18] + longer  # 18 tokens are there; 20 more are about to be
    for number, end in enumerate(ends, 1):
        core.add(number, sampled(number, common + end))
    drain(core)

    after = core.statistics()
    assert after["prefill_tokens"] - before["prefill_tokens"] == 20 + 4 + 4
    assert after["shared_prompt_tokens"] - before["shared_prompt_tokens"] == 18 + 38


@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("steps", range(1, 6))
def test_after_an_update_nothing_is_copied_from_older_weights(keep_kv, steps, tmp_path):
    first, second = tiny_model_folder(tmp_path / "a"), tiny_model_folder(tmp_path / "b")
    other = AutoModelForCausalLM.from_pretrained(second)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * 0.5)
    core = make_core(first)
    for i in (0, 1):
        core.add(i, sampled(i, ALIKE[i], new=40))
    for _ in range(steps):  # in the middle of the beginning, after it, and while both decode
        core.step()
    core.swap(core.stage(other.state_dict().items()), WeightVersion(1), keep_kv=keep_kv)
    late = sampled(2, ALIKE[2])
    core.add(2, late)
    responses = drain(core)

    assert set(responses[2].versions) == {1}
    assert (torch.tensor(responses[2].logprobs) - rescore(other, responses[2])).abs().max() <= 1e-3


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_tokens_do_not_depend_on_who_begins_alike_or_when_they_come_and_go(tmp_path_factory, data):
    folder = tiny_model_folder(tmp_path_factory.getbasetemp())
    core = make_core(folder)
    number, expected, cancelled, responses = 0, {}, set(), {}
    for _ in range(data.draw(st.integers(2, 8))):
        action = data.draw(st.sampled_from(["add", "add", "step", "cancel"]))
        if action == "add":
            prompt = SYSTEM[: data.draw(st.integers(1, 40))] + data.draw(st.sampled_from(QUESTIONS))
            expected[number] = sampled(number, prompt, new=data.draw(st.integers(1, 8)))
            core.add(number, expected[number])
            number += 1
        elif action == "step":
            responses.update(core.step())
        elif number:
            gone = data.draw(st.integers(0, number - 1))
            core.cancel(gone)
            cancelled |= {gone} - responses.keys()
    responses.update(drain(core))
    assert responses.keys() == expected.keys() - cancelled
    for i, response in responses.items():
        assert response.output_ids == run(make_core(folder), {0: expected[i]})[0].output_ids
    assert core.statistics()["kv_reserved_tokens"] == 0
