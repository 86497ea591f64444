"""Attention of short sequences in bfloat16 on a CPU, against torch's in float32."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tandem.models import short_attention
from tandem.models.attention import causal_attention, visible_keys


def gap(given, expected):
    return float((given.float() - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("count", "queries", "keys"), [(1, 1, 1), (3, 20, 20), (2, 7, 31), (1, 256, 256)])
def test_output_and_gradients_are_those_of_float32_attention(count, queries, keys, window):
    torch.manual_seed(queries)
    given = [torch.randn(count, s, h, 32).bfloat16().requires_grad_() for s, h in ((queries, 6), (keys, 2), (keys, 2))]
    exact = [x.detach().float().requires_grad_() for x in given]
    upstream = torch.randn(count, 6, queries, 32).bfloat16()
    out = causal_attention(*(x.transpose(1, 2) for x in given), 0.2, window, None)
    mask = visible_keys(queries, keys, window, torch.device("cpu"))
    arguments = {"attn_mask": mask, "scale": 0.2, "enable_gqa": True}
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in exact), **arguments)
    out.backward(upstream)
    expected.backward(upstream.float())

    assert type(out.grad_fn).__name__.startswith("GeneratedBackwardFor_tandem_short_attention")
    assert gap(out, expected) <= 0.004
    if keys > 1:  # with one key the weight is 1, whatever its score
        assert max(gap(x.grad, y.grad) for x, y in zip(given, exact, strict=True)) <= 0.006


def test_long_and_float32_sequences_take_the_fused_kernel():
    assert not short_attention.takes(torch.zeros(1, dtype=torch.bfloat16), short_attention.LONGEST + 1)
    assert not short_attention.takes(torch.zeros(1), 8)


def test_a_batch_without_sequences_has_an_empty_output_and_a_gradient():
    given = torch.zeros(0, 2, 5, 32, dtype=torch.bfloat16, requires_grad=True)
    out = causal_attention(given, given, given, 0.2, None, None)
    out.sum().backward()

    assert out.shape == given.grad.shape == (0, 2, 5, 32)
