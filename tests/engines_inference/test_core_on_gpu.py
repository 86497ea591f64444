"""The ways that the embedded engine takes on a GPU, on one that is pretended: the same tokens, one wait a step."""

import dataclasses

import pytest
import torch

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import FolderSource, WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference import paged_kernel
from tandem.engines.inference.attention import PackedPrefill
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.sampler import draw_most_probable, draw_tokens, running_sums
from tandem.models import attention
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


def answers(folder, gconfigs, device, waits=None, *, deterministic=False):
    """Tokens and log-probabilities by request, and the waits of each step."""
    core = EngineCore(folder, SETTINGS, torch.float32, device, WeightVersion(0), deterministic)
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
    return OnGpu(attention.by_torch(varlen_reference)(*(x.inner if isinstance(x, OnGpu) else x for x in args), **settings))


def slow(*values):
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.invariant])


@pytest.mark.parametrize(
    ("kind", "packed"), [("llama", False), slow("gemma2", False), slow("llama", True), ("mistral", True)]
)
def test_a_gpu_draws_what_the_cpu_draws_and_makes_the_host_wait_once_for_each_draw(tmp_path, kind, packed, monkeypatch):
    folder = tiny_model_folder(tmp_path, kind)
    on_cpu, _ = answers(folder, ODD, torch.device("cpu"))
    monkeypatch.setattr(PackedPrefill, "takes", lambda kernel: packed)  # a GPU's kernel takes no float32
    monkeypatch.setattr(attention, "KERNEL", _varlen)
    with pretended_gpu() as waits:
        on_gpu, of_steps = answers(folder, ODD, GPU, waits)
    assert {i: tokens for i, (tokens, _) in on_gpu.items()} == {i: tokens for i, (tokens, _) in on_cpu.items()}
    for i, (_, logprobs) in on_gpu.items():
        assert logprobs == pytest.approx(on_cpu[i][1], abs=1e-4)
    for found in of_steps:  # a round may draw twice: first tokens behind a prefill, and those of a decode step
        assert {name.partition(" in ")[2].rpartition(":")[0] for name in found} <= {"hardware.py:wait"}, found
        assert sum(found.values()) <= 2
    assert min(sum(found.values()) for found in of_steps) <= 1


def test_without_a_compiler_for_the_decode_kernel_a_gpu_draws_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(paged_kernel, "has_triton", lambda: True)
    monkeypatch.setattr(paged_kernel, "has_compiler", lambda: True)
    assert [paged_kernel.takes(dim) for dim in (8, 64, 256, 512)] == [False, True, True, False]
    monkeypatch.setattr(paged_kernel, "has_compiler", lambda: False)
    takes, folder = paged_kernel.takes, tiny_model_folder(tmp_path)
    assert not takes(64)
    on_cpu, _ = answers(folder, ODD, torch.device("cpu"))
    with pretended_gpu():
        paged_kernel.takes, paged_kernel.attend = takes, None  # a call of it would fail; both are put back behind the block
        on_gpu, _ = answers(folder, ODD, GPU)
    assert {i: tokens for i, (tokens, _) in on_gpu.items()} == {i: tokens for i, (tokens, _) in on_cpu.items()}


def test_a_deterministic_engine_has_no_operation_that_torch_refuses_on_a_gpu(tmp_path):
    folder = tiny_model_folder(tmp_path)
    on_cpu, _ = answers(folder, ODD, torch.device("cpu"), deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        with pretended_gpu():
            on_gpu, _ = answers(folder, ODD, GPU, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {i: tokens for i, (tokens, _) in on_gpu.items()} == {i: tokens for i, (tokens, _) in on_cpu.items()}


def sharp(rows, size, spread, seed):
    """Distributions with many equal and many vanishing probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, size, generator=generator) * spread).round(decimals=1)
    return torch.softmax(logits, dim=-1), torch.rand(rows, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("rows", "size"), [(5000, 300), (800, 5003), (40, 151_936)])
def test_a_gpu_draws_the_tokens_that_cumulative_sums_in_float64_give(rows, size):
    for seed, spread in enumerate((0.1, 3.0, 30.0)):
        probabilities, uniforms = sharp(rows, size, spread, seed)
        with pretended_gpu():
            on_gpu = draw_tokens(probabilities.to(GPU), uniforms.to(GPU)).inner
        assert torch.equal(on_gpu, draw_tokens(probabilities, uniforms))
        assert bool((probabilities.gather(1, on_gpu[:, None]) > 0).all())


@pytest.mark.parametrize("size", [300, 5003, 20_000])
def test_a_gpu_truncates_as_cumulative_sums_in_float64_do(size):
    for seed, spread in enumerate((0.1, 3.0, 30.0)):
        probabilities, uniforms = sharp(64, size, spread, seed)
        limits = torch.linspace(0.05, 1.0, 64), torch.tensor([1, 7, 90, size] * 16)
        with pretended_gpu():
            on_gpu = draw_most_probable(*(one.to(GPU) for one in (probabilities, uniforms, *limits))).inner
        assert torch.equal(on_gpu, draw_most_probable(probabilities, uniforms, *limits, width=size))
        assert torch.equal(on_gpu, draw_most_probable(probabilities, uniforms, *limits))


@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, 1000])
def test_running_sums_of_a_gpu_never_fall_and_stand_still_at_nothing(size):
    generator = torch.Generator().manual_seed(size)
    values = torch.rand(2000, size, generator=generator, dtype=torch.float64) ** 30
    values[torch.rand(2000, size, generator=generator) < 0.3] = 0.0
    before = values.clone()
    with pretended_gpu():
        sums = running_sums(values.to(GPU)).inner
    steps = sums.diff(dim=-1)
    assert bool((steps >= 0).all()) and bool((steps[values[:, 1:] == 0] == 0).all())
    assert torch.equal(values, before)
    exact = values.cumsum(-1)
    assert bool(((sums - exact).abs() <= size * 2.0**-53 * exact[:, -1:]).all())
