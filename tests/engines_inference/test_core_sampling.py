"""Sampling: distributions, noise, stops, limits, and that a sample does not depend on its neighbours."""

import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.api.failures import DataFailure, NonFinite, WrongWorkflow
from tandem.api.requests import LLMRequest, NoiseKey, StopReason
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.sampler import Forbidden, SamplingRows, sample, stream_of, uniform
from tandem.models.tokenizer import load_tokenizer
from tests.engines_inference.test_core_equal import drain, make_core, prompts, rescore, run
from tests.tiny import VOCAB_SIZE, tiny_model_folder

DRAWS = 20_000


def truncated(logits, temperature, top_p, top_k):
    """The distribution that should be sampled, written plainly."""
    probabilities = (logits / temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = probabilities[order]
    if top_k:
        kept[top_k:] = 0
    kept = kept / kept.sum()
    kept[(kept.cumsum(-1) - kept) >= top_p] = 0
    result = torch.zeros_like(probabilities)
    result[order] = kept / kept.sum()
    return result


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "size"),
    [
        (1.0, 1.0, 0, 300),
        (0.7, 1.0, 0, 300),
        (1.0, 0.8, 0, 300),
        (1.0, 1.0, 5, 300),
        (1.3, 0.9, 20, 300),
        (1.0, 0.999, 0, 1300),
    ],
)
def test_sampled_frequencies_pass_a_chi_square_test(temperature, top_p, top_k, size):
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1.5
    expected = truncated(logits.double(), temperature, top_p, top_k)
    counts = torch.zeros(size, dtype=torch.long)
    rows = SamplingRows(
        torch.full((1000,), temperature),
        top_p=torch.full((1000,), top_p),
        top_k=torch.full((1000,), top_k or size),
    )
    for start in range(0, DRAWS, 1000):
        noise = uniform(torch.full((1000,), stream_of(NoiseKey(3))), torch.arange(start, start + 1000))
        tokens, logprobs = sample(logits.expand(1000, -1).clone(), noise, rows)
        counts += torch.bincount(tokens, minlength=size)
        assert torch.allclose(logprobs, (logits / temperature).log_softmax(-1)[tokens], atol=1e-5)

    assert counts[expected == 0].sum() == 0
    rare = expected * DRAWS < 10  # the test wants expected counts that are not tiny: rare tokens are taken together
    bins = torch.cat((counts[~rare], counts[rare].sum()[None])).double()
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None])) * DRAWS
    used = wanted > 0
    statistic = ((bins[used] - wanted[used]) ** 2 / wanted[used]).sum()
    p_value = torch.special.gammaincc((used.sum() - 1).double() / 2, statistic / 2)
    assert p_value > 1e-3


def test_noise_is_uniform_differs_by_every_field_and_is_a_function():
    key = NoiseKey(1, 2, 3, 4, 5, 6)
    changed = [key._replace(**{name: getattr(key, name) + 1}) for name in key._fields]
    streams = torch.tensor([stream_of(k) for k in (key, *changed)])
    draws = torch.stack([uniform(streams, torch.full_like(streams, p)) for p in range(500)])
    assert len(draws.flatten().unique()) == draws.numel()
    assert torch.equal(draws[7], uniform(streams, torch.full_like(streams, 7)))
    assert draws.min() > 0 and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.02
    assert (torch.corrcoef(draws.T) - torch.eye(len(streams))).abs().max() < 0.2


def test_a_sample_alone_equals_the_same_among_63_others_that_came_at_other_times(tmp_path):
    folder = tiny_model_folder(tmp_path)
    ids = prompts([3, 11, 29, 8, 40, 17, 5, 23] * 8)
    mixed = [
        GenerationConfig(max_new_tokens=12 + i % 20, temperature=(1.0, 0.8)[i % 2], top_p=(1.0, 0.9)[i % 3 == 0])
        for i in range(64)
    ]
    requests = [LLMRequest(ids[i], mixed[i], NoiseKey(seed=9, group=i)) for i in range(64)]
    crowd, together = make_core(folder, max_running=48), {}
    for number, request in enumerate(requests):
        crowd.add(number, request)
        if number % 3 == 0:
            together.update(crowd.step())
    together.update(drain(crowd))

    for number in (0, 13, 31, 40, 63):
        alone = run(make_core(folder), {0: requests[number]})[0]
        assert alone.output_ids == together[number].output_ids
        assert alone.logprobs == pytest.approx(together[number].logprobs, abs=1e-5)


def test_a_group_differs_by_its_noise_and_equals_its_members_alone(tmp_path):
    folder = tiny_model_folder(tmp_path)
    (prompt,) = prompts([30])
    gconfig = GenerationConfig(max_new_tokens=16)
    requests = {i: LLMRequest(prompt, gconfig, NoiseKey(seed=2, sample=i)) for i in range(8)}
    core = make_core(folder)
    group = run(core, requests)

    assert len({response.output_ids for response in group.values()}) == 8
    assert core.statistics()["prefill_tokens"] == 30
    assert core.statistics()["shared_prompt_tokens"] == 7 * 30
    for i in (0, 5):
        assert run(make_core(folder), {0: requests[i]})[0].output_ids == group[i].output_ids


def test_stop_tokens_wait_for_min_new_tokens_and_log_probabilities_stay_true(tmp_path):
    folder = tiny_model_folder(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    stops = tuple(range(150, VOCAB_SIZE))  # about half of all tokens
    gconfig = GenerationConfig(max_new_tokens=40, min_new_tokens=6, stop_token_ids=stops)
    requests = {i: LLMRequest(p, gconfig, NoiseKey(seed=i)) for i, p in enumerate(prompts([5] * 6))}
    for response in run(make_core(folder), requests).values():
        ended = [i for i, token in enumerate(response.output_ids) if token in stops or token == 2]
        assert ended == [len(response.output_ids) - 1] and len(response.output_ids) > 6
        assert response.stop_reason == StopReason.STOP
        assert (torch.tensor(response.logprobs) - rescore(model, response)).abs().max() <= 1e-4


def test_a_stop_string_ends_a_completion_even_across_tokens(tmp_path):
    folder = tiny_model_folder(tmp_path)
    tokenizer = load_tokenizer(folder)
    (prompt,) = prompts([9])
    free = run(make_core(folder), {0: LLMRequest(prompt, GenerationConfig(max_new_tokens=30), NoiseKey(4))})[0]
    text = tokenizer.decode(free.output_ids)
    cut = next(
        text[i : i + 3] for i in range(8, len(text) - 3) if text[i : i + 3].isascii() and text.count(text[i : i + 3]) == 1
    )
    core = make_core(folder)
    stopped = run(core, {0: LLMRequest(prompt, GenerationConfig(max_new_tokens=30, stop=(cut,)), NoiseKey(4))})[0]

    count = len(stopped.output_ids)
    assert stopped.output_ids == free.output_ids[:count] and stopped.stop_reason == StopReason.STOP
    assert cut in tokenizer.decode(stopped.output_ids)
    assert cut not in tokenizer.decode(stopped.output_ids[:-1])


def test_length_and_context_end_a_completion(tmp_path):
    core = make_core(tiny_model_folder(tmp_path), max_model_len=32)
    gconfig = GenerationConfig(max_new_tokens=20, min_new_tokens=20)
    ids = prompts([4, 25])
    responses = run(core, {i: LLMRequest(p, gconfig) for i, p in enumerate(ids)})
    assert [len(responses[i].output_ids) for i in (0, 1)] == [20, 7]
    assert {r.stop_reason for r in responses.values()} == {StopReason.LENGTH}
    with pytest.raises(DataFailure, match=r"prompt_too_long.*32"):
        core.add(9, LLMRequest(prompts([32])[0], gconfig))


def test_bad_requests_are_refused_and_hurt_nobody(tmp_path):
    core = make_core(tiny_model_folder(tmp_path))
    for request in (
        LLMRequest((), GenerationConfig()),
        LLMRequest((VOCAB_SIZE,), GenerationConfig()),
        LLMRequest((5,), GenerationConfig(temperature=0.0)),
    ):
        with pytest.raises(DataFailure, match="bad_request"):
            core.add(0, request)
    assert not core.has_work


def test_what_no_engine_can_do_yet_is_the_workflow_s_mistake(tmp_path):
    core = make_core(tiny_model_folder(tmp_path))
    with pytest.raises(WrongWorkflow, match=r"LLMRequest\.model is set, and no inference engine"):
        core.add(0, LLMRequest((5, 6, 7), GenerationConfig(), model="judge"))
    assert not core.has_work


@pytest.mark.parametrize("sampling", [{}, {"greedy": True}, {"top_p": 0.5}])
def test_weights_that_are_no_numbers_say_so_and_make_no_tokens(tmp_path, sampling):
    folder = tiny_model_folder(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    core = make_core(folder)
    core.add(0, LLMRequest((5, 6, 7), GenerationConfig(max_new_tokens=4, **sampling)))
    with pytest.raises(NonFinite, match=r"version 0 of the weights gives logits that are not finite.*actor\.optimizer\.lr"):
        drain(core)


def test_a_deadline_ends_a_request_with_what_it_has(tmp_path):
    core = make_core(tiny_model_folder(tmp_path))
    gconfig = GenerationConfig(max_new_tokens=400, min_new_tokens=400)
    core.add(0, LLMRequest(prompts([5])[0], gconfig, deadline_s=60.0))
    core.add(1, LLMRequest(prompts([6])[0], gconfig, deadline_s=0.2))
    responses = {}
    until = time.monotonic() + 30
    while 1 not in responses and time.monotonic() < until:
        responses.update(core.step())
    assert responses[1].stop_reason == StopReason.CANCELLED
    assert 0 < len(responses[1].output_ids) == len(responses[1].logprobs) < 400
    assert core.statistics()["running"] == 1


@pytest.mark.parametrize("size", [304, 1300])
def test_tokens_that_are_held_back_leave_the_others_drawable_however_small(size):
    logits = torch.zeros(4, size)
    logits[:, 7] = 500.0  # all other probabilities underflow to 0
    rows = SamplingRows(temperatures=torch.ones(4), uniform_temperature=True)
    forbidden = Forbidden(torch.arange(4), torch.full((4,), 7), torch.arange(4))
    tokens, logprobs = sample(logits.clone(), torch.tensor([0.01, 0.4, 0.6, 0.99], dtype=torch.float64), rows, forbidden)

    assert ((tokens >= 0) & (tokens < size) & (tokens != 7)).all()
    assert logprobs.tolist() == pytest.approx([-500.0] * 4)
