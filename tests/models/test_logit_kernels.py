"""The head of a language model by compiled kernels in bfloat16, against torch's operators."""

import pytest
import torch

from tandem.models import logprobs
from tandem.models.logprobs import FACTS, chunked_logprobs, logit_kernels
from tandem.models.packed import PackedCausalLM
from tests.models.test_packed import random_pack
from tests.tiny import tiny_model

BF16 = torch.bfloat16
KERNELS = logit_kernels(torch.zeros(1, dtype=BF16), torch.zeros(1, dtype=BF16))
compiled = pytest.mark.skipif(KERNELS is None, reason="needs a C++ compiler and AVX-512 with bfloat16")


def head(rows=37, hidden=32, vocab=1003, scale=0.2):
    """Hidden states, weights, targets, temperatures, and directions for the gradients of both results."""
    generator = torch.Generator().manual_seed(rows)
    drawn = [torch.randn(n, hidden, generator=generator) for n in (rows, vocab)]
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    pulls = torch.randn(2, rows, generator=generator)
    pulls[:, 1::5] = 0  # a row without a loss
    return drawn[0].to(BF16), (drawn[1] * scale).to(BF16), targets, torch.rand(rows, generator=generator) + 0.5, pulls


def results(given, chunk_tokens=1024, warm=True, softcap=None, entropy=True, retain=False):
    """Values and gradients of `chunked_logprobs`; ``retain``: gradients of the second of two backward passes."""
    hidden, weight, targets, temperature, pulls = given
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    settings = {"softcap": softcap, "entropy": entropy, "chunk_tokens": chunk_tokens}
    out = chunked_logprobs(*leaves, targets, temperature if warm else None, **settings)
    loss = (out.logprobs * pulls[0]).sum()
    if entropy:
        loss = loss + (out.entropy * pulls[1]).sum()
    if retain:
        torch.autograd.grad(loss, leaves, retain_graph=True)
    gradients = torch.autograd.grad(loss, leaves)
    return [x.detach() for x in out if x is not None], [x.float() for x in gradients]


def with_operators(monkeypatch, *arguments, **settings):
    with monkeypatch.context() as patch:
        patch.setattr(logprobs, "logit_kernels", lambda hidden, weight: None)
        return results(*arguments, **settings)


def close(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], atol=2e-5, rtol=1e-6)
    for one, other in zip(ours[1], theirs[1], strict=True):  # bfloat16 has steps of 1/128
        torch.testing.assert_close(one, other, rtol=1 / 64, atol=1e-3 * float(other.abs().max()))


@compiled
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("scale", [0.2, 40.0])  # the larger one makes logits of more than 1,000
def test_kernels_give_what_torchs_operators_give(softcap, entropy, warm, scale, monkeypatch):
    given, settings = head(scale=scale), {"softcap": softcap, "entropy": entropy, "warm": warm}
    close(results(given, **settings), with_operators(monkeypatch, given, **settings))


@compiled
@pytest.mark.parametrize("vocab", [1, 15, 64, 97])
def test_a_vocabulary_of_any_size_is_read_to_its_end(vocab, monkeypatch):
    given = head(rows=5, vocab=vocab)
    close(results(given), with_operators(monkeypatch, given))


@compiled
@pytest.mark.parametrize("chunk_tokens", [1, 3, 9, 37])  # four times as many rows are one chunk
def test_a_head_in_chunks_is_the_whole_head(chunk_tokens):
    given = head()
    whole, cut = results(given), results(given, chunk_tokens=chunk_tokens)
    close(cut, whole)
    assert all(torch.equal(x, y) for x, y in zip(cut[0], whole[0], strict=True))


@compiled
def test_a_second_backward_pass_gives_the_same_gradients():
    given = head()
    once, again = results(given, chunk_tokens=4), results(given, chunk_tokens=4, retain=True)
    assert all(torch.equal(x, y) for x, y in zip(once[1], again[1], strict=True))


@compiled
def test_results_do_not_depend_on_the_number_of_threads():
    hidden, weight, targets, temperature, pulls = head()
    logits, found, before = hidden @ weight.T, [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            facts, slope = torch.empty(len(logits), FACTS), logits.clone()
            KERNELS.read(logits, targets, temperature, 5.0, True, facts)
            KERNELS.differentiate(slope, targets, temperature, 5.0, facts, *pulls)
            found.append((facts, slope))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for others in found[1:] for x, y in zip(others, found[0], strict=True))


@compiled
def test_logits_far_apart_and_of_minus_infinity_have_finite_gradients():
    logits = torch.tensor([[1e4, -1e4, 0.0, -1e4], [-torch.inf, 2.0, 1.0, -torch.inf], [0.0, -torch.inf, -1e4, 1e4]])
    targets, facts = torch.tensor([0, 1, 0]), torch.empty(3, FACTS)
    finite = logits.to(BF16).double().clamp(min=-1e6).requires_grad_()
    logp = torch.log_softmax(finite, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    (logp.gather(1, targets[:, None]).sum() + entropy.sum()).backward()

    ours = logits.to(BF16)
    KERNELS.read(ours, targets, None, None, True, facts)
    KERNELS.differentiate(ours, targets, None, None, facts, torch.ones(3), torch.ones(3))
    torch.testing.assert_close(facts[:, 2:], torch.stack([logp.gather(1, targets[:, None])[:, 0], entropy], 1).float())
    torch.testing.assert_close(ours.double(), finite.grad, atol=1e-6, rtol=1 / 128)


@compiled
def test_a_logit_that_is_not_a_number_shows_in_the_log_probability():
    logits, facts = torch.zeros(2, 40, dtype=BF16), torch.empty(2, FACTS)
    logits[1, 7] = torch.nan
    KERNELS.read(logits, torch.zeros(2, dtype=torch.int64), None, None, True, facts)
    assert facts[0].isfinite().all() and facts[1, 2:].isnan().all()


@compiled
def test_a_target_outside_the_vocabulary_is_refused():
    hidden, weight, targets, temperature, _ = head(rows=3, vocab=9)
    targets[1] = 9
    with pytest.raises(IndexError, match="9 tokens"):
        chunked_logprobs(hidden, weight, targets, temperature)


@compiled
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_has_the_gradients_that_it_has_with_operators(tied, monkeypatch):
    model = tiny_model("llama").to(BF16)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    pack, found = random_pack((13, 13, 1, 5, 20)), []
    ours = PackedCausalLM(model, chunk_tokens=3)
    for kernels in (logit_kernels, lambda hidden, weight: None):
        monkeypatch.setattr(logprobs, "logit_kernels", kernels)
        model.zero_grad()
        ours(ours.lay_out(**pack)).logprobs.sum().backward()
        found.append([p.grad.float() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


@compiled
def test_nothing_to_predict_gives_a_gradient_of_zeros():
    model, pack = PackedCausalLM(tiny_model().to(BF16)), random_pack((3, 1))
    pack["loss_mask"] = torch.tensor([True, False, False, True])  # only first tokens
    model(model.lay_out(**pack)).logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_float32_takes_torchs_operators():
    assert logit_kernels(torch.zeros(1), torch.zeros(1)) is None
