"""The compiled kernels against torch's operators, which stay the reference."""

import random

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.attention import DecodePlan, Kernel, PrefillPlan, PrefillSpan
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.decoder import rotary_table, rotate
from tandem.engines.inference.kernels import RowAttention, kernels
from tandem.engines.inference.kv_cache import KVCache
from tandem.engines.inference.sampler import Forbidden, SamplingRows, draw_tokens, sample
from tandem.models.architecture import Rope
from tests.engines_inference.test_core_equal import prompts, rescore, run
from tests.tiny import tiny_model_folder

CPU = torch.device("cpu")
LAYERS = 2
NEEDS = "needs a C++ compiler, and AVX2 (float32) or AVX-512 with bfloat16"
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(kernels(dtype) is None, reason=NEEDS))
    for dtype in (torch.bfloat16, torch.float32)
]


@pytest.fixture(params=["bfloat16", "float32", pytest.param("float32 with AVX2 alone", marks=pytest.mark.slow)])
def compiled(request, monkeypatch):
    if "AVX2" in request.param:
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    found = kernels.__wrapped__(getattr(torch, request.param.split()[0]))
    if found is None:
        pytest.skip(NEEDS)
    return found


def normal(*shape, dtype):
    return torch.randn(shape).to(dtype)


class Case:
    """Rows of random lengths in a filled cache."""

    def __init__(self, compiled, heads, kv_heads, dim, seed):
        torch.manual_seed(seed)
        self.choose = random.Random(seed)
        self.compiled, self.dtype = compiled, compiled.dtype
        self.kernel = Kernel(heads, kv_heads, dim, dim**-0.5, None, self.dtype, CPU)
        self.caches = [self.cache(), self.cache()]
        self.rope = rotary_table(Rope(1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)), 2048, self.dtype, CPU)
        self.norms = normal(dim, dtype=self.dtype), normal(dim, dtype=self.dtype), 1e-5

    def cache(self):
        return KVCache(LAYERS, self.kernel.kv_heads, self.kernel.head_dim, self.dtype, CPU, 0.1)

    def rows(self, pool, lengths):
        """The same rows in both caches, with the same keys and values."""
        rows = [[cache.allocate(pool, cache.capacity_for(length)) for length in lengths] for cache in self.caches]
        for one, other in zip(*rows, strict=True):
            for mine, theirs in ((one.slab.keys, other.slab.keys), (one.slab.values, other.slab.values)):
                for a, b in zip(mine, theirs, strict=True):
                    a[one.index] = normal(*a[one.index].shape, dtype=self.dtype)
                    b[other.index] = a[one.index]
        return rows

    def plain(self, qkv, positions, normed):
        """Queries, keys and values for torch's path, rotated."""
        kernel, count = self.kernel, self.kernel.heads + self.kernel.kv_heads
        heads = qkv.view(len(qkv), -1, kernel.head_dim)
        rotated, values = heads[:, :count], heads[:, count:]
        if normed:
            weights = [w.expand(n, -1) for w, n in zip(self.norms, (kernel.heads, kernel.kv_heads), strict=False)]
            rotated = functional.rms_norm(rotated, (kernel.head_dim,), None, 1e-5) * torch.cat(weights)
        rotated = rotate(rotated, self.rope[0][positions], self.rope[1][positions])
        return rotated[:, : kernel.heads], rotated[:, kernel.heads :], values

    def compare(self, ours, theirs, qkv, positions, window, normed=False):
        expected = theirs(1, window, *self.plain(qkv.clone(), positions, normed))
        given = ours(1, window, qkv.clone(), positions, self.rope, self.norms if normed else None)
        # Both round to bfloat16, at different places: rotated numbers, weights, outputs.
        near, far = (0.03, 0.006) if self.dtype == torch.bfloat16 else (2e-5, 2e-6)
        torch.testing.assert_close(given.float(), expected.float(), rtol=near, atol=near)
        assert (given.float() - expected.float()).square().mean().sqrt() <= far * expected.float().square().mean().sqrt()
        for slab, other in zip(self.caches[0].slabs.values(), self.caches[1].slabs.values(), strict=True):
            torch.testing.assert_close(slab.values[1], other.values[1], rtol=0, atol=0)
            torch.testing.assert_close(slab.keys[1], other.keys[1], rtol=near, atol=1.4 * near)
        return given


SHAPES = [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 1, 256)]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_in_one_call_equals_a_call_a_slab(compiled, shape, window):
    case = Case(compiled, *shape, seed=1)
    alone = [case.choose.randint(1, 300) for _ in range(9)]
    prompts = [1, 31, 200]
    grouped = [case.choose.randint(1, 90) for _ in range(14)]
    whole, shared, suffix = case.rows("whole", alone), case.rows("prompt", prompts), case.rows("suffix", grouped)
    member = [case.choose.randrange(3) for _ in grouped]
    # Torch's path wants the rows of a slab together, those with a prompt last.
    order = [
        *sorted(range(9), key=lambda i: (whole[0][i].slab.capacity, whole[0][i].index)),
        *sorted(range(9, 23), key=lambda i: (suffix[0][i - 9].slab.capacity, suffix[0][i - 9].index)),
    ]
    lengths = [(alone + grouped)[i] for i in order]
    starts = [0 if i < 9 else prompts[member[i - 9]] for i in order]

    def arguments(side):
        rows = [(whole[side] + suffix[side])[i] for i in order]
        return rows, [None if i < 9 else shared[side][member[i - 9]] for i in order]

    (rows, before), (other_rows, other_before) = arguments(0), arguments(1)
    ours = RowAttention(compiled, case.kernel, rows, lengths, before, starts)
    theirs = DecodePlan(case.kernel, other_rows, other_before, lengths, starts, {window})
    qkv = normal(23, (shape[0] + 2 * shape[1]) * shape[2], dtype=compiled.dtype)
    positions = torch.tensor(starts) + torch.tensor(lengths) - 1
    together = case.compare(ours, theirs, qkv, positions, window)

    for i in range(23):  # the same to the bit whatever runs beside it
        one = RowAttention(compiled, case.kernel, rows[i : i + 1], lengths[i : i + 1], before[i : i + 1], starts[i : i + 1])
        alone_out = one(1, window, qkv[i : i + 1].clone(), positions[i : i + 1], case.rope, None)
        assert torch.equal(alone_out[0], together[i])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_in_one_call_equals_a_call_a_piece(compiled, shape, window):
    case = Case(compiled, *shape, seed=2)
    rows, prompts = case.rows("whole", [100, 7, 260, 33, 60]), case.rows("prompt", [70])

    def pieces(side):
        own, prompt = rows[side], prompts[side][0]
        return [
            PrefillSpan(own[0], 0, 100),
            PrefillSpan(own[1], 0, 7),
            PrefillSpan(own[2], 128, 132),
            PrefillSpan(own[3], 0, 33, prompt, 70),
            PrefillSpan(own[4], 20, 30),
        ]

    ours, theirs = RowAttention.of_pieces(compiled, case.kernel, pieces(0)), PrefillPlan(case.kernel, pieces(1), {window})
    positions = torch.cat([torch.arange(p.count) + p.start + p.prompt_length for p in pieces(0)])
    qkv = normal(len(positions), (shape[0] + 2 * shape[1]) * shape[2], dtype=compiled.dtype)

    case.compare(ours, theirs, qkv, positions, window, normed=True)


def test_norm_and_gate_equal_torch(compiled):
    dtype = compiled.dtype
    x, weight, both = normal(37, 579, dtype=dtype), normal(579, dtype=dtype), 3 * normal(37, 2 * 203, dtype=dtype)
    gate, up = both.float().chunk(2, dim=-1)
    norm = functional.rms_norm(x.float(), (579,), weight.float(), 1e-5)
    near = {"rtol": 0.005 if dtype == torch.bfloat16 else 2e-6, "atol": 1e-6}

    torch.testing.assert_close(compiled.rms_norm(x, weight, 1e-5), norm.to(dtype), **near)
    torch.testing.assert_close(compiled.silu_gate(both), (functional.silu(gate) * up).to(dtype), **near)


@pytest.mark.parametrize("size", [5, 256, 1000, 49152])
def test_the_compiled_draw_is_that_of_torch(compiled, size):
    torch.manual_seed(size)
    logits, temperatures = 3 * normal(64, size, dtype=compiled.dtype), torch.rand(64) + 0.5
    uniforms, greedy = torch.rand(64, dtype=torch.float64), torch.arange(64) < 35
    rows = torch.arange(30, 40)
    best = logits.float().argmax(dim=-1)
    forbidden = Forbidden(rows.repeat_interleave(2), torch.stack((best[rows], best[rows] * 0), 1).flatten(), rows)
    sampling = SamplingRows(temperatures, greedy=greedy, minimums=True)
    tokens, logprobs = sample(logits, uniforms, sampling, forbidden, compiled)
    expected, expected_logprobs = sample(logits.float(), uniforms, sampling, forbidden)

    assert torch.equal(tokens[:35], expected[:35])
    assert (tokens == expected).float().mean() >= 0.98  # a number at a border may fall on either side
    same = tokens == expected
    torch.testing.assert_close(logprobs[same], expected_logprobs[same], rtol=1e-5, atol=1e-5)
    assert not (tokens[rows] == best[rows]).any()


def test_every_token_is_drawn_as_often_as_it_is_probable(compiled):
    logits = torch.tensor([0.0, -torch.inf, 1.0, 2.0, -torch.inf]).to(compiled.dtype).expand(2000, -1).contiguous()
    uniforms = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    tokens, _ = compiled.draw(logits, torch.ones(2000), uniforms, None, None)

    assert torch.equal(tokens, draw_tokens(torch.softmax(logits.float(), dim=-1), uniforms))


def test_others_are_drawn_where_a_token_that_is_banned_has_all_the_probability(compiled):
    logits = torch.zeros(2, 1000)
    logits[:, 1], logits[0, 2], logits[1, 2] = 1.0, 12.0, 110.0
    temperatures, uniforms = torch.tensor([0.1, 1.0]), torch.tensor([0.5, 0.5], dtype=torch.float64)
    forbidden = torch.tensor([0, 1]), torch.tensor([2, 2])
    tokens, logprobs = compiled.draw(logits.to(compiled.dtype), temperatures, uniforms, None, forbidden)

    assert tokens.tolist() == [1, 499]
    assert logprobs.tolist() == [-110, -110]


def test_logits_that_are_not_numbers_give_a_log_probability_that_is_none(compiled):
    logits = normal(3, 300, dtype=compiled.dtype)
    logits[1, 7] = torch.nan
    logits[2, 9] = torch.inf
    _, logprobs = compiled.draw(logits, torch.ones(3), torch.full((3,), 0.5, dtype=torch.float64), None, None)

    assert logprobs.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "smollm3", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_with_kernels_scores_as_transformers_does(dtype, kind, tmp_path):
    folder = tiny_model_folder(tmp_path, kind, head_dim=32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).float().eval()
    config = EmbeddedEngineConfig(kv_cache_gib=0.01, prefill_chunk_tokens=24)
    core = EngineCore(folder, config, dtype, CPU, WeightVersion(0))
    ids = [p for p, n in zip(prompts([6, 33, 12, 40]), [1, 1, 4, 2], strict=True) for _ in range(n)]
    gconfig = GenerationConfig(max_new_tokens=24, min_new_tokens=10)
    requests = {i: LLMRequest(p, gconfig, NoiseKey(seed=1, sample=i)) for i, p in enumerate(ids)}
    gaps = torch.cat([torch.tensor(r.logprobs) - rescore(model, r) for r in run(core, requests).values()])

    mean, most = (0.02, 0.15) if dtype == torch.bfloat16 else (1e-6, 1e-5)
    assert len(gaps) > 80 and gaps.abs().mean() <= mean and gaps.abs().max() <= most


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_deterministic_engine_gives_the_same_whatever_runs_beside_it(dtype, tmp_path):
    folder = tiny_model_folder(tmp_path, "llama", head_dim=32)
    config = EmbeddedEngineConfig(kv_cache_gib=0.01, prefill_chunk_tokens=24)
    gconfig = GenerationConfig(max_new_tokens=16, min_new_tokens=8)
    requests = {i: LLMRequest(p, gconfig, NoiseKey(seed=1, sample=i)) for i, p in enumerate(prompts([6, 33, 12, 40, 9, 17]))}

    def engine():
        return EngineCore(folder, config, dtype, CPU, WeightVersion(0), deterministic=True)

    together = run(engine(), requests)
    for i, request in requests.items():
        alone = run(engine(), {i: request})[i]
        assert alone.output_ids == together[i].output_ids, f"request {i}"
        rounding = 0 if dtype == torch.bfloat16 else 1e-5  # a product of float32 may sum in another order for more rows
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=rounding, rel=0), f"request {i}"
