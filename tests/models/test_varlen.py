"""The order of operations of attention on a GPU, with a reference in the place of the kernel: equal to what a CPU does."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tandem.models.attention import (
    LengthRun,
    Packing,
    PromptCompletions,
    SummedRows,
    attend_by_calls,
    by_torch,
    packed_attention,
    plan_calls,
    takes_kernel,
)
from tandem.models.packed import keeping_products
from tests.engines_train.steps import engine_on
from tests.models.test_prefixes import grouped_batch
from tests.pretended_gpu import GPU, pretended_gpu
from tests.tiny import tiny_model_folder
from tests.varlen_reference import varlen_reference


def torch_2_11(query, key, value, *bounds, return_aux=None, scale=None, window_size=(-1, -1)):
    return varlen_reference(query, key, value, *bounds, scale=scale, window_size=window_size)  # refuses fewer heads


KERNELS = {
    "torch 2.12": by_torch(varlen_reference),
    "torch 2.11": by_torch(torch_2_11),
}

BATCHES = {
    "packed": (LengthRun(2, 5), LengthRun(1, 9), LengthRun(3, 1)),
    "shared": (
        PromptCompletions(6, (3, 9, 5)),
        PromptCompletions(4, (2,)),
        PromptCompletions(11, (1, 7)),
        PromptCompletions(5, (0, 4, 4)),
    ),
    "mixed": (PromptCompletions(7, (2, 2)), LengthRun(2, 4), PromptCompletions(0, (3, 8)), PromptCompletions(3, (0, 0))),
}


def tensors(total, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, total, 8), (1, kv_heads, total, 8), (1, kv_heads, total, 8))
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_variable_length_calls_give_the_values_and_gradients_of_one_call_a_sequence(name, window, kernel):
    runs = BATCHES[name]
    total = sum(run.tokens for run in runs)
    longest = max(run.length + max(getattr(run, "completions", (0,))) for run in runs)
    packing = Packing(torch.tensor([0, total], dtype=torch.int32), runs, longest)
    direction = torch.randn(1, total, 4, 8, generator=torch.Generator().manual_seed(1))
    given = tensors(total)
    expected, _ = packed_attention(None, *given, None, packing=packing, sliding_window=window)
    gradients = torch.autograd.grad(expected, given, direction)

    found = attend_by_calls(*given, plan_calls(runs), 8**-0.5, window, KERNELS[kernel])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(torch.autograd.grad(found, given, direction), gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@torch.library.custom_op("of_tests::_varlen_attn", mutates_args=())
def varlen_operator(x: torch.Tensor) -> torch.Tensor:
    CALLS.append("varlen")
    return x * x


@torch.library.custom_op("another::kernel", mutates_args=())
def another_operator(x: torch.Tensor) -> torch.Tensor:
    CALLS.append("another")
    return x * x


for operator in (varlen_operator, another_operator):
    operator.register_autograd(
        lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
CALLS = []


def test_selective_checkpointing_keeps_the_output_of_attention():
    CALLS.clear()
    x = torch.ones(3, requires_grad=True)
    found = checkpoint(
        lambda y: another_operator(varlen_operator(y)).sin(), x, use_reentrant=False, context_fn=keeping_products
    )
    found.sum().backward()
    assert CALLS == ["varlen", "another", "another"]


def test_a_layer_makes_two_calls_for_any_prompts_and_reads_one_once_a_completion():
    alone, completions = plan_calls((PromptCompletions(2, (1, 3)), PromptCompletions(3, (1,))))
    assert alone.queries.tolist() == alone.keys.tolist() == [0, 1, 6, 7, 8]
    assert alone.cu_queries.tolist() == alone.cu_keys.tolist() == [0, 2, 5]
    assert completions.queries.tolist() == [2, 3, 4, 5, 9]
    assert completions.keys.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert (completions.cu_queries.tolist(), completions.cu_keys.tolist()) == ([0, 1, 4, 5], [0, 3, 8, 12])
    assert len(plan_calls((LengthRun(3, 5), LengthRun(1, 2)))) == 1 and plan_calls((LengthRun(3, 5),))[0].queries is None


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_model_with_shared_prompts_attends_on_a_gpu_by_these_calls_alone(tmp_path, kind, monkeypatch):
    ids, cu_seqlens, mask = grouped_batch()
    temperature = torch.ones(len(cu_seqlens) - 1)
    folder = tiny_model_folder(tmp_path, kind)

    def scored(device):
        model = engine_on(folder, dtype="bfloat16", device=device).model
        found = model(model.lay_out(ids, cu_seqlens, mask, temperature, torch.device(device))).logprobs
        found.sum().backward()  # the masters take the gradients, which the step of an engine compares
        return found.detach()

    expected = scored("cpu")
    monkeypatch.setattr("tandem.models.attention.scaled_dot_product_attention", None)  # no other way is taken
    with pretended_gpu():
        found = scored(GPU).cpu()
    assert float((found - expected).abs().mean()) < 0.05


def test_gradients_of_a_shared_prompt_are_summed_in_float32_and_twice_alike():
    calls = plan_calls((PromptCompletions(40, (3,) * 16), PromptCompletions(9, (4,) * 8)))
    index = calls[1].keys
    total = 40 + 48 + 9 + 32
    grad = torch.randn(len(index), 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.zeros(total, 2, 16, dtype=torch.float64).index_add_(0, index, grad.double())

    one_by_one = torch.zeros(total, 2, 16, dtype=torch.bfloat16)  # as a GPU's atomic sums round
    for row, part in zip(index.tolist(), grad, strict=True):
        one_by_one[row] += part

    def summed():
        x = torch.zeros(total, 2, 16, dtype=torch.bfloat16, requires_grad=True)
        SummedRows.apply(x, index).backward(grad)
        return x.grad

    def error(found):
        return float((found.double() - exact).abs().sum())

    assert torch.equal(summed(), summed())
    assert error(summed()) <= 1.01 * error(exact.bfloat16()) < error(one_by_one) / 2


@pytest.mark.parametrize(
    ("generation", "installed", "exact", "taken"),
    [((9, 0), True, False, True), ((9, 0), False, False, False), ((9, 0), True, True, False), ((8, 0), True, False, False)],
)
def test_flash_attention_3_attends_on_hopper_where_it_is_installed(generation, installed, exact, taken, monkeypatch):
    activated, runs = [], (LengthRun(2, 5),)
    monkeypatch.setattr(
        "tandem.models.attention.find_spec", lambda name: (installed and name == "flash_attn_interface") or None
    )
    monkeypatch.setattr(torch.nn.attention, "list_flash_attention_impls", lambda: ["FA3"], raising=False)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append, raising=False)
    takes_kernel.cache_clear()
    torch.use_deterministic_algorithms(exact)
    try:
        with pretended_gpu():
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: generation)
            packing = Packing(torch.tensor([0, 5, 10], dtype=torch.int32), runs, 5).on(GPU)  # as a batch of training is
    finally:
        torch.use_deterministic_algorithms(False)
        takes_kernel.cache_clear()
    assert packing.calls and activated == ["FA3"] * taken
