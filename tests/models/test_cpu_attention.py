"""The compiled attention of training, against torch's own."""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from tandem.models import cpu_attention
from tandem.models.attention import Packing, PromptCompletions, packed_attention, visible_keys
from tandem.models.cpu_attention import QueryRange, QueryRanges, attend
from tandem.models.packed import PackedCausalLM, keeping_products
from tests.models.test_packed import random_pack
from tests.tiny import tiny_model

DTYPES = pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])


@pytest.fixture(autouse=True)
def has_kernel(request):
    """Leaves out what this machine has no instructions or no compiler for."""
    case = getattr(request.node, "callspec", None)
    if cpu_attention.kernel(case.params.get("dtype", torch.float32) if case else torch.float32) is None:
        pytest.skip("no kernel for such numbers here")


PROMPT = range(37)
ALONE = [range(138, 339), range(339, 340), range(340, 372), range(372, 405)]
GROUPS = [
    [QueryRange(PROMPT, PROMPT), *(QueryRange(own, own, PROMPT) for own in (range(37, 38), range(38, 138)))],
    *([QueryRange(own, own)] for own in ALONE),
]
"""A prompt with completions of 1 and 100; sequences of 201, 1, 32 and 33."""


def reference(q, k, v, groups, scale, window):
    """QueryRange by segment, with a mask."""
    outputs = []
    for segment in itertools.chain(*groups):
        rows = [*segment.prompt, *segment.keys]
        mask = visible_keys(len(segment.queries), len(rows), window, q.device)
        given = (x[list(index)].transpose(0, 1)[None] for x, index in ((q, segment.queries), (k, rows), (v, rows)))
        found = scaled_dot_product_attention(*given, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(found[0].transpose(0, 1))
    return torch.cat(outputs)


def gap(found, expected):
    return float((found.detach().float() - expected.detach()).norm() / expected.detach().norm())


def random_tensors(dtype, heads, kv_heads, dim, queries=405, keys=405):
    torch.manual_seed(dim)
    shapes = (queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def same_as_reference(given, groups, window, limit):
    exact = [x.detach().float().requires_grad_() for x in given]
    upstream = torch.randn(given[0].shape).to(given[0].dtype)
    out = attend(*given, QueryRanges.of(groups), 0.2, window)
    expected = reference(*exact, groups, 0.2, window)
    out.backward(upstream)
    expected.backward(upstream.float())
    assert max(gap(out, expected), *(gap(x.grad, y.grad) for x, y in zip(given, exact, strict=True))) <= limit


@pytest.mark.parametrize("window", [None, 2, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (4, 2, 96), (2, 1, 128)])
@DTYPES
def test_output_and_gradients_are_those_of_torch(dtype, limit, heads, kv_heads, dim, window):
    same_as_reference(random_tensors(dtype, heads, kv_heads, dim), GROUPS, window, limit)


@pytest.mark.parametrize("window", [None, 40])
@DTYPES
def test_queries_that_are_the_last_of_more_keys_see_all_before_them(dtype, limit, window):
    groups = [
        [QueryRange(range(7), range(31))],
        [QueryRange(range(7, 8), range(31, 100))],
        [QueryRange(range(8, 78), range(100, 171))],
    ]
    same_as_reference(random_tensors(dtype, 4, 2, 32, 78, 171), groups, window, limit)


@DTYPES
def test_the_number_of_threads_and_the_neighbours_change_no_bit(dtype, limit):
    results = []
    for threads, groups in ((1, GROUPS), (2, GROUPS), (3, GROUPS[:2])):
        torch.set_num_threads(threads)
        count = groups[-1][-1].queries.stop
        given = [x[:count].detach().requires_grad_() for x in random_tensors(dtype, 9, 3, 64)]
        out = attend(*given, QueryRanges.of(groups), 0.2, None)
        out.backward(out.detach())
        results.append([x[:339] for x in (out.detach(), *(x.grad for x in given))])
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))


@DTYPES
def test_tensors_laid_out_by_head_with_gaps_and_by_odd_numbers_are_read_as_they_are(dtype, limit):
    q, k, v = random_tensors(dtype, 4, 2, 32)
    by_head = q.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    gaps = torch.cat([k.detach()] * 2, 2)[:, :, :32].requires_grad_()
    odd = torch.cat([v.detach(), v.detach()[:, :, :1]], 2)[:, :, :32].requires_grad_()
    expected = attend(q, k, v, QueryRanges.of(GROUPS), 0.2, None)
    found = attend(by_head, gaps, odd, QueryRanges.of(GROUPS), 0.2, None)
    expected.backward(expected.detach())
    found.backward(expected.detach())

    assert torch.equal(found, expected)
    assert all(torch.equal(x.grad, y.grad) for x, y in ((by_head, q), (gaps, k), (odd, v)))


@pytest.mark.parametrize("factor", [1e-20, 1e4])
def test_equal_scores_and_scores_far_apart_give_the_weights_of_torch(factor):
    q, k, v = (x.detach() for x in random_tensors(torch.float32, 4, 2, 32))
    out, expected = (
        attend(q * factor, k, v, QueryRanges.of(GROUPS), 0.2, None),
        reference(q * factor, k, v, GROUPS, 0.2, None),
    )
    assert gap(out, expected) <= 1e-3  # a score of 10,000 has steps of a thousandth


def test_what_is_not_a_number_stays_in_its_sequence_and_reaches_all_who_see_it():
    q, k, v = (x.detach() for x in random_tensors(torch.float32, 4, 2, 32))
    v[200] = float("nan")
    wrong = attend(q, k, v, QueryRanges.of(GROUPS), 0.2, None).isnan().flatten(1).any(1)
    assert wrong[200:339].all() and not wrong[:138].any() and not wrong[339:].any()


def test_keys_that_no_query_sees_have_gradients_of_0():
    groups, given = [[QueryRange(range(70), range(10, 80))]], random_tensors(torch.float32, 4, 2, 32, 70, 100)
    for _ in range(3):
        torch.full((2, 4, 100, 32), 7.0)  # what is freed is not zeroed for its next owner
        out = attend(*given, QueryRanges.of(groups), 0.2, None)
        out.sum().backward()
    assert all(x.grad[:10].eq(0).all() and x.grad[80:].eq(0).all() and x.grad[10:80].ne(0).any() for x in given[1:])


def test_tensors_that_do_not_fit_each_other_are_refused():
    q, k, v = (x.detach() for x in random_tensors(torch.float32, 4, 2, 32))
    wrong = (q, k.bfloat16(), v), (q[:, :3], k, v), (q, k, v[:, :, :16]), (q, k[:100], v), (q, k[:, :1], v)
    for given in wrong:
        with pytest.raises(ValueError, match="must have one dtype and one head dimension"):
            attend(*given, QueryRanges.of(GROUPS), 0.2, None)


def test_a_packing_that_was_first_used_without_gradients_can_be_trained_on():
    packing, given = Packing.from_cu_seqlens(torch.tensor([0, 30, 40])), random_tensors(torch.float32, 4, 2, 32, 40, 40)
    with torch.inference_mode():
        attend(*given, packing.segments, 0.2, None)
    attend(*given, packing.segments, 0.2, None).sum().backward()
    assert all(x.grad.isfinite().all() for x in given)


def test_no_tokens_give_an_empty_output_and_gradient():
    given = [torch.zeros(0, heads, 32, requires_grad=True) for heads in (4, 2, 2)]
    out = attend(*given, QueryRanges.of([]), 0.2, None)
    out.sum().backward()
    assert out.shape == given[0].grad.shape == (0, 4, 32)


def test_a_head_dimension_without_a_kernel_a_gpu_and_a_switch_take_torchs():
    assert cpu_attention.takes(torch.zeros(1, 64))
    assert not cpu_attention.takes(torch.zeros(1, 48)) and not cpu_attention.takes(torch.zeros(1, 544))
    assert not cpu_attention.takes(torch.zeros(1, 64, device="meta"))
    assert not cpu_attention.takes(torch.zeros(1, 64, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_a_model_gives_the_values_and_gradients_that_it_gives_with_torchs_kernel(kind, monkeypatch):
    model = PackedCausalLM(tiny_model(kind, head_dim=32))
    pack = random_pack([9, 40, 3, 70])
    ids, mask = pack["input_ids"], pack["loss_mask"]
    ids[9:18], mask[:18] = ids[:9], True
    mask[:5], mask[9:14] = False, False  # a prompt of five tokens, which the first two share
    results = []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(cpu_attention, "takes", lambda query: False)
        model.zero_grad()
        out = model(model.lay_out(**pack)).logprobs
        out.sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    assert max(gap(x, y) for x, y in zip(*results, strict=True)) <= 1e-4


def test_a_checkpoint_that_keeps_attention_does_not_attend_again():
    given = random_tensors(torch.float32, 4, 2, 32)
    calls = []
    library = cpu_attention.kernel(torch.float32)
    forward = library.attend
    library.attend = lambda *arguments: (calls.append(1), forward(*arguments))
    try:
        run = lambda *x: attend(*x, QueryRanges.of(GROUPS), 0.2, None) * 1.0  # noqa: E731
        checkpoint(run, *given, use_reentrant=False, context_fn=keeping_products).sum().backward()
    finally:
        library.attend = forward
    assert len(calls) == 1 and all(x.grad.isfinite().all() for x in given)


def test_a_packing_names_each_prompt_once_and_every_completion_behind_it():
    packing = Packing.from_prompts(torch.tensor([0, 5, 8]), [PromptCompletions(2, (3, 0, 1)), PromptCompletions(0, (4,))])
    assert packing.segments.segments.tolist() == [
        [0, 2, 0, 2, 0, 0],
        [2, 3, 2, 3, 0, 2],
        [5, 1, 5, 1, 0, 2],
        [6, 4, 6, 4, 6, 0],
    ]
    assert packing.segments.groups.tolist() == [0, 3, 4]
    given = [torch.randn(1, heads, 10, 32) for heads in (4, 2, 2)]
    assert packed_attention(torch.nn.Identity(), *given, None, packing=packing)[0].shape == (1, 10, 4, 32)
