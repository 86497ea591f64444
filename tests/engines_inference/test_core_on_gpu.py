"""The ways that the embedded engine takes on a GPU, on one that is pretended: the same tokens, one wait a step."""

import dataclasses

import pytest
import torch

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import FolderSource, WeightVersion
from tandem.config.generation import GenerationConfig
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.paged import PackedPrefill
from tandem.models import varlen
from tests.engines_inference.test_core_equal import prompts
from tests.pretended_gpu import GPU, OnGpu, pretended_gpu
from tests.tiny import tiny_model_folder
from tests.varlen_reference import varlen_reference

SETTINGS = EmbeddedEngineConfig(kv_cache_gib=0.01, prefill_chunk_tokens=24)
PLAIN = GenerationConfig(max_new_tokens=10)
ODD = (
    PLAIN,
    dataclasses.replace(PLAIN, temperature=0.7, max_new_tokens=6),
    dataclasses.replace(PLAIN, top_p=0.9),
    dataclasses.replace(PLAIN, greedy=True),
    dataclasses.replace(PLAIN, min_new_tokens=8, first_token_temperature=1.4),
    dataclasses.replace(PLAIN, stop=("e",)),
)


def requests(gconfigs):
    """Groups of three of each, and prompts of their own that take two pieces of prefill."""
    shared, long = prompts([7] * len(gconfigs)), prompts([30] * len(gconfigs), seed=1)
    for i, gconfig in enumerate(gconfigs):
        for sample, prompt in enumerate([shared[i]] * 3 + [long[i]]):
            yield LLMRequest(prompt, gconfig, NoiseKey(seed=i, sample=sample))


def answers(folder, gconfigs, device, waits=None):
    """Tokens and log-probabilities by request, and the waits of each step."""
    core = EngineCore(folder, SETTINGS, torch.float32, device, WeightVersion(0))
    for number, request in enumerate(requests(gconfigs)):
        core.add(number, request)
    found, of_steps = {}, []
    while core.has_work:
        if waits is not None:
            waits.places.clear()
        found.update(core.step())
        if waits is not None:
            of_steps.append(dict(waits.places))
        if len(of_steps or found) == 4:  # what runs is computed again
            core.swap(core.stage(FolderSource(folder).tensors()), WeightVersion(1))
    return {i: (one.output_ids, one.logprobs) for i, one in found.items()}, of_steps


def _varlen(*args, **settings):
    return OnGpu(varlen.by_torch(varlen_reference)(*(x.inner if isinstance(x, OnGpu) else x for x in args), **settings))


@pytest.mark.parametrize(("kind", "packed"), [("llama", False), ("gemma2", False), ("llama", True), ("mistral", True)])
def test_a_gpu_draws_what_the_cpu_draws_and_makes_the_host_wait_once_for_each_draw(tmp_path, kind, packed, monkeypatch):
    folder = tiny_model_folder(tmp_path, kind)
    on_cpu, _ = answers(folder, ODD, torch.device("cpu"))
    monkeypatch.setattr(PackedPrefill, "takes", lambda kernel: packed)  # a GPU's kernel takes no float32
    monkeypatch.setattr(varlen, "KERNEL", _varlen)
    with pretended_gpu() as waits:
        on_gpu, of_steps = answers(folder, ODD, GPU, waits)
    assert {i: tokens for i, (tokens, _) in on_gpu.items()} == {i: tokens for i, (tokens, _) in on_cpu.items()}
    for i, (_, logprobs) in on_gpu.items():
        assert logprobs == pytest.approx(on_cpu[i][1], abs=1e-4)
    for found in of_steps:  # a round may draw twice: first tokens behind a prefill, and those of a decode step
        assert {name.partition(" in ")[2].rpartition(":")[0] for name in found} <= {"upload.py:wait"}, found
        assert sum(found.values()) <= 2
    assert min(sum(found.values()) for found in of_steps) <= 1
