"""Sums of large tensors by compiled kernels, against torch's operators."""

import pytest
import torch

from tandem.engines.train.holders import Replica
from tandem.models import native
from tandem.models.native import add_to, square_sum
from tests.pretended_gpu import GPU, pretended_gpu
from tests.tiny import tiny_model

SIZES = [0, 1, 15, 33, (1 << 15) + 7, 3 << 15]
compiled = pytest.mark.skipif(native._library() is None, reason="needs a C++ compiler and AVX-512 with bfloat16")


@pytest.mark.parametrize("size", SIZES)
def test_adding_bfloat16_numbers_to_float32_ones_is_torchs_sum_to_the_bit(size):
    total, part = torch.randn(size), torch.randn(size).bfloat16()
    expected = total + part
    add_to(total, part)
    assert torch.equal(total, expected)


def test_tensors_that_lie_in_memory_otherwise_are_added_too():
    total, part = torch.randn(7, 5), torch.randn(5, 7).bfloat16().T
    expected = total + part
    add_to(total, part)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_of_squares_is_exact_to_the_rounding_of_float32_squares(size):
    x = torch.randn(size)
    assert float(square_sum(x)) == pytest.approx(float(x.double().pow(2).sum()), rel=1e-7)


def test_a_number_that_is_not_finite_shows_in_the_sum_of_squares():
    for odd in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(100)
        x[37] = odd
        assert not square_sum(x).isfinite()


@compiled
def test_a_sum_of_squares_does_not_depend_on_the_number_of_threads():
    x, before, found = torch.randn(200_000), torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(float(square_sum(x)))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_the_norm_of_a_float32_model_is_still_torchs_to_the_bit():
    gradient = torch.randn(70_000)
    expected = gradient.pow(2).sum(dtype=torch.float64)
    assert torch.equal(Replica(tiny_model(), torch.float32).square_sum(gradient), expected)
    rounded = Replica(tiny_model(), torch.bfloat16).square_sum(gradient)
    torch.testing.assert_close(rounded, expected, rtol=1e-7, atol=0)


def test_the_norm_that_a_gpu_reads_in_a_few_kernels_is_the_plain_one(monkeypatch):
    gradients = [torch.randn(size) * scale for size, scale in ((70_001, 1.0), (3, 1e3), (1, 1e-3), (4096, 1e-2))]
    model, asked, foreach = Replica(tiny_model(), torch.float32), [], torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda tensors: asked.append(len(tensors)) or foreach(tensors))
    expected = model.square_sums(gradients)
    assert not asked and float(expected) == pytest.approx(sum(float(x.double().square().sum()) for x in gradients), rel=1e-6)
    with pretended_gpu():
        found = model.square_sums([x.to(GPU) for x in gradients]).inner
    assert asked == [4] and found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
