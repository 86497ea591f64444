"""What the worker extension makes of a sampler of vLLM's: the log-probabilities that the embedded engine gives."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from tandem.engines.inference.remote.foreign.in_server.tandem_vllm_worker import TandemWorker
from tandem.engines.inference.sampler import Forbidden, SamplingRows
from tandem.engines.inference.sampler import sample as embedded_sample


class Tensors(NamedTuple):
    """As `LogprobsTensors`: the drawn token first."""

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor


@dataclass
class Metadata:
    """What the sampler reads of `SamplingMetadata`, with its names."""

    temperature: torch.Tensor | None
    top_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    max_num_logprobs: int | None = 0
    logitsprocs: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(non_argmax_invariant=[]))


class MinTokens:
    """As vLLM's processor: row → stop tokens that may not come yet."""

    def __init__(self, min_toks):
        self.min_toks = min_toks

    def apply(self, logits):
        for row, tokens in self.min_toks.items():
            logits[row, list(tokens)] = -torch.inf
        return logits


class Sampler(torch.nn.Module):
    """vLLM's order: processors, temperature, top-k, top-p, and then the log-probabilities (``processed_logprobs``)."""

    topk_topp_sampler = None

    def forward(self, logits, sampling_metadata, predict_bonus_token=False):
        logits = logits.to(torch.float32)  # the same memory where it is float32 already
        for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
            logits = processor.apply(logits)
        if sampling_metadata.temperature is not None:
            logits.div_(torch.where(sampling_metadata.temperature < 1e-5, 1.0, sampling_metadata.temperature)[:, None])
        if sampling_metadata.top_k is not None:
            least = logits.sort(descending=True).values.gather(-1, sampling_metadata.top_k[:, None] - 1)
            logits[logits < least] = -torch.inf
        if sampling_metadata.top_p is not None:
            order = logits.sort(descending=True)
            before = order.values.softmax(-1).cumsum(-1) - order.values.softmax(-1)
            logits.scatter_(
                -1, order.indices, order.values.masked_fill(before >= sampling_metadata.top_p[:, None], -torch.inf)
            )
        logprobs = logits.log_softmax(-1)
        tokens = logprobs.argmax(-1, keepdim=True)
        given = None if sampling_metadata.max_num_logprobs is None else Tensors(tokens.int(), logprobs.gather(-1, tokens))
        return SimpleNamespace(sampled_token_ids=tokens.int(), logprobs_tensors=given)


@pytest.fixture
def sampler():
    worker = TandemWorker()
    worker.model_runner = SimpleNamespace(sampler=Sampler())
    worker.tandem_whole_logprobs()
    worker.tandem_whole_logprobs()  # a second run asks for it again
    return worker.model_runner.sampler


class SecondSampler:
    """As that of vLLM's second model runner: logits are copied, and log-probabilities made of what `sample` returns."""

    def __init__(self, temperature, top_k):
        self.temperature, self.top_k = temperature, top_k
        self.needs_logits_processing = (temperature != 1.0).numpy() | (top_k < 300).numpy()
        self.sampling_states = self

    def apply_temperature(self, logits, rows, requests):
        logits.div_(torch.where(self.temperature == 0, 1.0, self.temperature)[rows, None])

    def sample(self, logits, rows, requests, requests_np, *rest, return_logprobs=False):
        if not self.needs_logits_processing[requests_np].any():
            return logits.argmax(-1), logits
        logits = logits.float().clone()
        self.apply_temperature(logits, rows, requests_np)
        least = logits.sort(descending=True).values.gather(-1, self.top_k[rows, None] - 1)
        logits[logits < least] = -torch.inf
        return logits.argmax(-1), logits

    def __call__(self, logits):
        rows = torch.arange(len(logits))
        tokens, scores = self.sample(logits, rows, rows, rows.numpy(), None, return_logprobs=True)
        return tokens, scores.log_softmax(-1).gather(-1, tokens[:, None]).flatten()


def logits(rows=3, seed=0):
    return torch.randn(rows, 300, generator=torch.Generator().manual_seed(seed)) * 3


def embedded(found, temperature, forbidden=None):
    """The embedded engine's log-probabilities of its most probable tokens."""
    rows = SamplingRows(temperature, greedy=torch.ones(len(found), dtype=torch.bool))
    return embedded_sample(found.clone(), torch.full((len(found),), 0.5, dtype=torch.float64), rows, forbidden)


NARROW = {
    "top_p": {"top_p": torch.tensor([0.5, 0.9, 1.0])},
    "top_k": {"top_k": torch.tensor([1, 5, 300])},
    "both": {"top_p": torch.tensor([0.5, 0.9, 1.0]), "top_k": torch.tensor([2, 2, 300])},
    "none": {},
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_before_truncation(sampler, name, dtype):
    temperature, found = torch.tensor([0.7, 1.0, 1.3]), logits().to(dtype)
    output = sampler(
        logits=found.clone(), sampling_metadata=Metadata(temperature, **NARROW[name]), predict_bonus_token=False
    )
    tokens, logprobs = embedded(found.float(), temperature)
    assert output.sampled_token_ids.flatten().tolist() == tokens.tolist()
    assert torch.allclose(output.logprobs_tensors.logprobs.flatten(), logprobs, atol=1e-5)


@pytest.mark.parametrize("temperature", [torch.tensor([0.7, 1.0, 1.3]), None])
def test_log_probabilities_are_those_with_the_stop_tokens_that_are_suppressed(sampler, temperature):
    found = logits(seed=1)
    first = found.argmax(-1)
    metadata = Metadata(temperature)
    metadata.logitsprocs.non_argmax_invariant.append(MinTokens({0: [int(first[0])], 2: [int(first[2])]}))
    output = sampler(found.clone(), metadata)
    rows = torch.tensor([0, 2])
    forbidden = Forbidden(rows, first[rows], rows)
    tokens, logprobs = embedded(found, torch.ones(3) if temperature is None else temperature, forbidden)
    assert output.sampled_token_ids.flatten().tolist() == tokens.tolist() and tokens[0] != first[0]
    assert torch.allclose(output.logprobs_tensors.logprobs.flatten(), logprobs, atol=1e-5)


def test_whoever_asks_for_no_log_probabilities_gets_none(sampler):
    found = logits()
    assert sampler(found, Metadata(torch.ones(3), **NARROW["top_k"], max_num_logprobs=None)).logprobs_tensors is None


@pytest.mark.parametrize("top_k", [1, 300])
@pytest.mark.parametrize("temperature", [torch.tensor([0.7, 1.0, 1.3]), torch.ones(3)])
def test_the_sampler_of_the_second_model_runner_gives_them_too(top_k, temperature):
    worker, found = TandemWorker(), logits(seed=2)
    sampler = SecondSampler(temperature, torch.full((3,), top_k))
    worker.model_runner = SimpleNamespace(sampler=sampler)
    worker.tandem_whole_logprobs()
    worker.tandem_whole_logprobs()
    before = found.clone()
    tokens, logprobs = sampler(found)
    assert torch.equal(found, before)
    expected, whole = embedded(found, temperature)
    assert tokens.tolist() == expected.tolist() and torch.allclose(logprobs, whole, atol=1e-5)


def test_a_sampler_of_another_kind_is_left_alone():
    worker = TandemWorker()
    worker.model_runner = SimpleNamespace(sampler=SimpleNamespace())
    worker.tandem_whole_logprobs()
    assert vars(worker.model_runner.sampler) == {}
