"""FIRE: the first token of a reply has its own temperature and its true log-probability."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.api.failures import DataFailure
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tests.tiny import tiny_model_folder

PROMPT = (1, 40, 41, 42)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
    config = RolloutConfig(dtype="float32", engine=EmbeddedEngineConfig(max_running=8, kv_cache_gib=0.02, threads=1))
    one = build_inference_engine(config, folder=folder, placement="colocate", threads=1, device="cpu", deterministic=True)
    yield one
    one.close()


def ask(engine, *configs):
    async def together():
        requests = [LLMRequest(PROMPT, gconfig, NoiseKey(3, sample=i)) for i, gconfig in enumerate(configs)]
        return await asyncio.gather(*(engine.agenerate(request) for request in requests))

    return asyncio.run(together())


def reference(folder, response, temperatures):
    """Log-probabilities by transformers, each token at its own temperature."""
    ids = [*response.input_ids, *response.output_ids]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    start = len(response.input_ids)
    found = [
        torch.log_softmax(logits[start + t - 1] / temperature, -1)[ids[start + t]]
        for t, temperature in enumerate(temperatures)
    ]
    return torch.stack(found)


@pytest.mark.parametrize(("temperature", "first"), [(1.0, 4.0), (0.7, 3.0), (2.0, 1.0), (0.7, None), (1.0, None)])
def test_log_probabilities_are_those_of_each_tokens_own_temperature(engine, folder, temperature, first):
    gconfig = GenerationConfig(max_new_tokens=6, temperature=temperature, first_token_temperature=first)
    other = GenerationConfig(max_new_tokens=6)  # beside it, in the same decode steps
    responses = ask(engine, gconfig, other, gconfig)
    for response, own, hot in zip(responses, (temperature, 1.0, temperature), (first, None, first), strict=True):
        expected = reference(folder, response, [hot or own] + [own] * (len(response.output_ids) - 1))
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=1e-4, atol=1e-4)
        assert response.temperature == own
        assert response.untrained_tokens == (hot is not None)


def test_the_first_token_is_drawn_hotter_and_the_rest_is_not(engine):
    cold = GenerationConfig(max_new_tokens=4, temperature=0.01)
    hot = GenerationConfig(max_new_tokens=4, temperature=0.01, first_token_temperature=50.0)
    assert len({r.output_ids for r in ask(engine, *[cold] * 8)}) == 1
    drawn = ask(engine, *[hot] * 8)
    assert len({response.output_ids[0] for response in drawn}) >= 7
    assert all(logprob > -0.5 for response in drawn for logprob in response.logprobs[1:])


def test_a_temperature_of_0_for_the_first_token_is_refused(engine):
    with pytest.raises(DataFailure, match="temperatures"):
        ask(engine, GenerationConfig(max_new_tokens=2, first_token_temperature=0.0))
