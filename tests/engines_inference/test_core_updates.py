"""Weights that change while requests run: which tokens were made by which, and that the cache belongs to the weights."""

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.api.failures import WeightUpdateFailed
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.rollout import GenerationConfig
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tests.engines_inference.test_core_equal import drain, make_core, prompts, run
from tests.tiny import tiny_model, tiny_model_folder

VERSIONS = 9


def weights_of(kind, version):
    """A model of its own for every version: nothing is left of the one before."""
    return tiny_model(kind, seed=100 + version)


def run_with_updates(core, kind, requests, every):
    """Runs the requests, with new weights every few steps."""
    for number, request in requests.items():
        core.add(number, request)
    responses, version, steps = {}, 0, 0
    while core.has_work:
        responses.update(core.step())
        steps += 1
        if steps % every == 0 and version + 1 < VERSIONS:
            version += 1
            core.swap(core.stage(weights_of(kind, version).state_dict().items()), WeightVersion(version))
    return responses


def score(model, response):
    ids = torch.tensor([response.input_ids + response.output_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    start = len(response.input_ids)
    return logprobs[start - 1 : -1].gather(-1, ids[0, start:, None]).squeeze(-1)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen2"])
def test_each_token_has_the_log_probability_of_the_version_that_it_states(kind, tmp_path):
    folder = tiny_model_folder(tmp_path, kind)
    core = make_core(folder)
    core.swap(core.stage(weights_of(kind, 0).state_dict().items()), WeightVersion(0))
    gconfig = GenerationConfig(max_new_tokens=30, min_new_tokens=30)
    # groups, single prompts, and one that is still being prefilled in chunks of 24 tokens when weights change
    ids = [p for p, n in zip(prompts([7, 13, 60, 4, 19]), [4, 1, 1, 1, 3], strict=True) for _ in range(n)]
    requests = {i: LLMRequest(p, gconfig, NoiseKey(5, sample=i)) for i, p in enumerate(ids)}
    responses = run_with_updates(core, kind, requests, every=4)

    models = [weights_of(kind, version) for version in range(VERSIONS)]
    right, wrong = [], []
    for response in responses.values():
        versions = torch.tensor(response.versions)
        assert len(versions.unique()) >= 5 and (versions.diff() >= 0).all()
        scores = torch.stack([score(model, response) for model in models])  # [versions, tokens]
        gaps = (scores - torch.tensor(response.logprobs)).abs()
        right.append(gaps.gather(0, versions[None])[0])
        others = gaps.scatter(0, versions[None], torch.inf)
        wrong.append(others.flatten()[others.flatten().isfinite()])
    assert torch.cat(right).max() <= 1e-4
    assert (torch.cat(wrong) > 1e-3).float().mean() > 0.99  # one wrong stamp would have failed by 10 times


def test_a_group_still_shares_its_prompt_after_an_update(tmp_path):
    core = make_core(tiny_model_folder(tmp_path))
    (prompt,) = prompts([20])
    gconfig = GenerationConfig(max_new_tokens=12, min_new_tokens=12)
    for i in range(8):
        core.add(i, LLMRequest(prompt, gconfig, NoiseKey(i)))
    for _ in range(4):
        core.step()
    held = core.statistics()["kv_reserved_tokens"]
    core.swap(core.stage(weights_of("llama", 1).state_dict().items()), WeightVersion(1))
    assert core.statistics()["kv_reserved_tokens"] == held
    drawn = core.statistics()["generated_tokens"]
    assert (
        core.statistics()["recomputed_tokens"] == 20 + drawn - 8
    )  # the prompt once; the newest token of each is not stored
    drain(core)


def test_keeping_the_cache_over_an_update_recomputes_nothing(tmp_path):
    folder = tiny_model_folder(tmp_path)
    core = make_core(folder)
    gconfig = GenerationConfig(max_new_tokens=12, min_new_tokens=12)
    for i, prompt in enumerate(prompts([20, 20, 8])):
        core.add(i, LLMRequest(prompt, gconfig, NoiseKey(i)))
    for _ in range(6):
        core.step()
    timing = core.swap(core.stage(weights_of("llama", 1).state_dict().items()), WeightVersion(1), keep_kv=True)
    responses = drain(core)
    assert set(timing) == {"pause_s", "recompute_s"}
    assert core.statistics()["recomputed_tokens"] == 0
    assert {v for r in responses.values() for v in r.versions} == {0, 1}


def test_after_an_update_new_requests_are_as_if_the_weights_had_always_been_there(tmp_path):
    core = make_core(tiny_model_folder(tmp_path))
    request = {0: LLMRequest(prompts([9])[0], GenerationConfig(max_new_tokens=8, greedy=True))}
    before = run(core, request)[0]
    model = weights_of("llama", 1)
    core.swap(core.stage(model.state_dict().items()), WeightVersion(1))
    after = run(core, request)[0]
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([request[0].input_ids]),
            attention_mask=torch.ones(1, 9),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=2,
        )
    assert after.output_ids == tuple(expected[0, 9:].tolist()) != before.output_ids
    assert core.version.number == 1


def test_staging_in_another_thread_changes_nothing_before_the_swap(tmp_path):
    core = make_core(tiny_model_folder(tmp_path))
    gconfig = GenerationConfig(max_new_tokens=40, min_new_tokens=40)
    requests = {i: LLMRequest(p, gconfig, NoiseKey(i)) for i, p in enumerate(prompts([6] * 4))}
    expected = run(core, requests)
    staged = []
    tensors = list(weights_of("llama", 1).state_dict().items())
    thread = threading.Thread(target=lambda: staged.append(core.stage(iter(tensors))))
    for number, request in requests.items():
        core.add(number, request)
    thread.start()
    responses = drain(core)
    thread.join(timeout=30)
    assert responses == expected and len(staged) == 1


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_an_update_that_does_not_fit_is_refused_by_name_and_the_old_weights_stay(kind, tmp_path):
    core = make_core(tiny_model_folder(tmp_path, kind))
    request = {0: LLMRequest(prompts([9])[0], GenerationConfig(max_new_tokens=8, greedy=True))}
    before = run(core, request)
    good = dict(weights_of(kind, 1).state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        r"1 of .* missing.*layers\.1\.mlp\.up_proj": {k: v for k, v in good.items() if k != name},
        r"model\.layers\.9\.bogus is not one of": good | {"model.layers.9.bogus": torch.zeros(2)},
        r"up_proj\.weight must be \[64, 32\], got \[2, 2\]": good | {name: torch.zeros(2, 2)},
    }
    for message, tensors in cases.items():
        with pytest.raises(WeightUpdateFailed, match=message):
            core.stage(tensors.items())
    with pytest.raises(WeightUpdateFailed, match="came twice"):
        core.stage([*good.items(), (name, good[name])])
    assert run(core, request) == before and core.version.number == 0


@pytest.mark.slow
def test_the_real_model_gives_generates_tokens_and_log_probabilities():

    folder = resolve("smollm2-135m")
    tokenizer = load_tokenizer(folder)
    questions = [
        "What is 2 + 2?",
        "Name three colours of the rainbow and say why you like them.",
        "Hi",
        "Tell me a story. " * 12,
    ]
    ids = [
        tuple(
            tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )
        for q in questions
    ]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    core = make_core(folder, kv_cache_gib=0.5, prefill_chunk_tokens=48)
    greedy = GenerationConfig(max_new_tokens=72, greedy=True)
    requests = {i: LLMRequest(p, greedy) for i, p in enumerate([*ids, ids[1], ids[1]])}  # the second is a group of three
    responses = run(core, requests)
    for prompt in ids:
        whole = torch.tensor([prompt])
        with torch.no_grad():
            whole = model.generate(whole, attention_mask=torch.ones_like(whole), max_new_tokens=72, do_sample=False)
        for response in (r for r in responses.values() if r.input_ids == prompt):
            assert response.output_ids == tuple(whole[0, len(prompt) :].tolist())
            assert (torch.tensor(response.logprobs) - score(model, response)).abs().max() <= 1e-4
    assert max(len(r.output_ids) for r in responses.values()) >= 64
