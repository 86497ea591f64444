"""Draws by top-p and top-k are those of a sorted vocabulary, whichever way finds them."""

import pytest
import torch

from tandem.engines.inference.sampler import draw_most_probable
from tests.pretended_gpu import GPU, pretended_gpu


def sorted_reference(probabilities, uniforms, top_p, top_k):
    """Written plainly: tokens in the order of their probabilities, then of their numbers; sums in float64."""
    ordered, tokens = probabilities.double().sort(dim=-1, descending=True, stable=True)
    ordered[torch.arange(ordered.shape[1]) >= top_k[:, None]] = 0
    ordered /= ordered.sum(-1, keepdim=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p.double()[:, None]] = 0
    sums = ordered.cumsum(-1)
    places = torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True)
    return tokens.gather(1, places).squeeze(1)


def one_hot(rows, size):
    return torch.nn.functional.one_hot(torch.arange(rows) * 37 % size, size).float()


def distributions(rows, size):
    generator = torch.Generator().manual_seed(size)
    random = torch.randn(rows, size, generator=generator)
    halves = torch.full((rows, size), 0.5).pow(1 + torch.arange(size).flip(0).clamp(max=200))
    return {
        "sharp": (random * 5).softmax(-1),
        "nearly flat": (random * 0.2).softmax(-1),
        "flat": torch.full((rows, size), 1 / size),
        "ties": (random * 2).round().softmax(-1),
        "one": one_hot(rows, size),
        "nearly one": 0.97 * one_hot(rows, size) + 0.03 / size,
        "halves": halves,
        "most are impossible": random.masked_fill(random < random.amax(-1, keepdim=True) / 2, -torch.inf).softmax(-1),
    }


@pytest.mark.parametrize("size", [5, 1500, 9000])
def test_the_token_is_that_of_a_sorted_vocabulary_in_every_way(size):
    rows = 48
    uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    top_p = torch.tensor([1.0, 0.9, 0.37, 0.999] * 12)
    top_k = torch.tensor([size, size, size, 1, 3, 50, 1024, 1025, 1200, size - 1, 2, size] * 4).clamp(max=size)
    for name, probabilities in distributions(rows, size).items():
        expected = sorted_reference(probabilities, uniforms, top_p, top_k)
        for width in (2, 1024, size):
            found = draw_most_probable(probabilities, uniforms, top_p, top_k, width=width)
            assert torch.equal(found, expected), (name, width)
        few = top_k.clamp(max=1000)
        with pretended_gpu() as waits:
            *given, any_k, few_k = (x.to(GPU) for x in (probabilities, uniforms, top_p, top_k, few))
            waits.places.clear()
            by_digits, by_order = draw_most_probable(*given, any_k).inner, draw_most_probable(*given, few_k, 1000).inner
            assert not waits.places
        assert torch.equal(by_digits, expected), name
        assert torch.equal(by_order, sorted_reference(probabilities, uniforms, top_p, few)), name


def test_what_is_no_number_still_gives_a_token():
    broken = torch.full((3, 3000), torch.nan)
    limits = torch.full((3,), 0.5, dtype=torch.float64), torch.full((3,), 0.9), torch.tensor([5, 2000, 3000])
    for width in (2, 1024):
        tokens = draw_most_probable(broken, *limits, width=width)
        assert bool(((tokens >= 0) & (tokens < 3000)).all())
