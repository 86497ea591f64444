"""The engine against transformers: greedy tokens and log-probabilities, for each architecture, in float32."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.api.requests import LLMRequest, NoiseKey, StopReason
from tandem.api.weights import WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.core import EngineCore
from tests.tiny import KINDS, VOCAB_SIZE, tiny_model_folder


def make_core(folder, deterministic=False, **settings):
    config = EmbeddedEngineConfig(**{"kv_cache_gib": 0.01, "prefill_chunk_tokens": 24} | settings)
    return EngineCore(folder, config, torch.float32, torch.device("cpu"), WeightVersion(0), deterministic)


def run(core, requests):
    """Responses by request, all submitted at once."""
    for number, request in requests.items():
        core.add(number, request)
    return drain(core)


def drain(core):
    responses = {}
    while core.has_work:
        responses.update(core.step())
    return responses


def prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()) for length in lengths]


def rescore(model, response, temperature=1.0):
    """Log-probabilities of the response's tokens by one plain forward pass."""
    ids = torch.tensor([response.input_ids + response.output_ids])
    with torch.no_grad():
        logits = model(ids).logits[0].float() / temperature
    start = len(response.input_ids)
    return logits.log_softmax(-1)[start - 1 : -1].gather(-1, ids[0, start:, None]).squeeze(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate_with_mixed_lengths_groups_and_chunked_prefill(kind, tmp_path):
    folder = tiny_model_folder(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    # 40 tokens are prefilled in two chunks; two prompts are groups, and one of those is longer than a window
    ids = [p for p, n in zip(prompts([1, 5, 17, 40, 9, 30]), [1, 1, 3, 1, 1, 2], strict=True) for _ in range(n)]
    gconfig = GenerationConfig(max_new_tokens=20, greedy=True)
    responses = run(make_core(folder), {i: LLMRequest(p, gconfig) for i, p in enumerate(ids)})

    for i, prompt in enumerate(ids):
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=20, do_sample=False
            )
        assert responses[i].output_ids == tuple(expected[0, len(prompt) :].tolist()), f"request {i}"
        assert responses[i].stop_reason == (StopReason.STOP if responses[i].output_ids[-1] == 2 else StopReason.LENGTH)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_the_divided_logits(kind, temperature, tmp_path):
    folder = tiny_model_folder(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    gconfig = GenerationConfig(max_new_tokens=24, temperature=temperature)
    ids = [p for p, n in zip(prompts([6, 33, 12]), [1, 1, 4], strict=True) for _ in range(n)]
    requests = {i: LLMRequest(p, gconfig, NoiseKey(seed=1, sample=i)) for i, p in enumerate(ids)}

    for response in run(make_core(folder), requests).values():
        recorded = torch.tensor(response.logprobs)
        assert (recorded - rescore(model, response, temperature)).abs().max() <= 1e-4
        assert response.temperature == temperature
