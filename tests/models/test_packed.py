"""Packed = padded, chunked = unchunked, for every architecture that works."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.models.attention import Packing, positions
from tandem.models.logprobs import chunked_logprobs
from tandem.models.packed import PackedCausalLM
from tests.tiny import KINDS, tiny_model

LENGTHS = (13, 13, 1, 5, 20)  # two neighbours of equal length, a single token, longer than the tiny windows


def random_pack(lengths, vocab_size=304, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return {
        "input_ids": torch.randint(0, vocab_size, (total,), generator=generator),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "temperature": torch.rand(len(lengths), generator=generator) + 0.5,
        "loss_mask": torch.rand(total, generator=generator) > 0.3,
    }


def padded_reference(model, pack):
    """Log-probabilities and entropies [T] by transformers alone: right-padded rows, eager attention, whole logits."""
    bounds = pack["cu_seqlens"].tolist()
    rows = [pack["input_ids"][a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attention_mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=attention_mask).logits.float()
    logprobs, entropies = [], []
    for i, row in enumerate(rows):
        scaled = torch.log_softmax(logits[i, : len(row) - 1] / pack["temperature"][i], -1)
        first = scaled.new_zeros(1)
        logprobs.append(torch.cat([first, scaled.gather(1, row[1:, None])[:, 0]]))
        entropies.append(torch.cat([first, -(scaled.exp() * scaled).sum(-1)]))
    mask = pack["loss_mask"]
    return torch.cat(logprobs) * mask, torch.cat(entropies) * mask


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_padded_in_values_and_gradients(kind):
    model = tiny_model(kind)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    pack = random_pack(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(sum(LENGTHS), generator=generator) for _ in range(2)]

    ours = PackedCausalLM(model, chunk_tokens=7)
    packed = ours(ours.lay_out(**pack), entropy=True)
    padded = padded_reference(reference, pack)

    torch.testing.assert_close(packed.logprobs, padded[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(packed.entropy, padded[1], atol=2e-5, rtol=1e-5)
    sum((x * d).sum() for x, d in zip(packed[:2], direction, strict=True)).backward()
    sum((x * d).sum() for x, d in zip(padded, direction, strict=True)).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 2e-5 * theirs.grad.abs().max(), name


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_gradient_checkpointing_changes_nothing(kind):
    pack, gradients = random_pack(LENGTHS), []
    for checkpointing in (False, True):
        model = PackedCausalLM(tiny_model(kind))
        if checkpointing:
            model.enable_gradient_checkpointing()
        model(model.lay_out(**pack)).logprobs.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_sequence_does_not_see_its_neighbours():
    model = PackedCausalLM(tiny_model("gemma2"))
    pack = random_pack((9, 12, 9))
    whole = model(model.lay_out(**pack)).logprobs[9:21]
    own = pack["input_ids"][9:21], torch.tensor([0, 12]), pack["loss_mask"][9:21], pack["temperature"][1:2]
    alone = model(model.lay_out(*own)).logprobs
    torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-5)


def test_bounds_that_do_not_cover_the_tokens_are_refused():
    model, pack = PackedCausalLM(tiny_model()), random_pack((4, 4))
    pack["cu_seqlens"] = torch.tensor([0, 4, 7])
    with pytest.raises(ValueError, match="rise from 0 to 8"):
        model(model.lay_out(**pack))


def test_nothing_to_predict_gives_zeros_and_a_graph():
    model, pack = PackedCausalLM(tiny_model()), random_pack((3, 1))
    pack["loss_mask"] = torch.tensor([True, False, False, True])  # only first tokens
    logprobs = model(model.lay_out(**pack)).logprobs
    logprobs.sum().backward()
    assert logprobs.tolist() == [0, 0, 0, 0]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def head_inputs(dtype=torch.float64, rows=11, hidden=6, vocab=17):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, hidden, dtype=dtype, generator=generator).requires_grad_(),
        torch.randn(vocab, hidden, dtype=dtype, generator=generator).requires_grad_(),
        torch.randint(0, vocab, (rows,), generator=generator),
    )


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_chunked_equals_unchunked(chunk_tokens, entropy, softcap):
    hidden, weight, targets = head_inputs(torch.float32)
    temperature = torch.linspace(0.5, 2, len(hidden))
    ours = chunked_logprobs(
        hidden, weight, targets, temperature, softcap=softcap, entropy=entropy, chunk_tokens=chunk_tokens
    )
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    full = torch.log_softmax(logits / temperature[:, None], -1)
    theirs = [full.gather(1, targets[:, None])[:, 0]] + ([-(full.exp() * full).sum(-1)] if entropy else [])
    ours = [x for x in ours if x is not None]
    total = [sum((x * torch.arange(1, 12)).sum() * (i + 1) for i, x in enumerate(xs)) for xs in (ours, theirs)]
    gradients = [torch.autograd.grad(x, (hidden, weight)) for x in total]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*gradients)


def test_temperature_is_a_division_of_logits():
    hidden, weight, targets = head_inputs(torch.float32)
    ours = chunked_logprobs(hidden, weight, targets, torch.full((11,), 0.7)).logprobs
    theirs = torch.log_softmax(hidden @ weight.T / 0.7, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(ours, theirs)


def test_equal_neighbours_form_runs_and_positions_start_anew():
    packing = Packing.from_cu_seqlens(torch.tensor([0, 3, 6, 6, 11]))
    assert packing.runs == ((2, 3), (1, 5))
    assert packing.longest == 5
    assert positions(torch.tensor([0, 3, 6, 6, 11]), 11).tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_head_is_the_plain_one_by_the_same_programs_for_any_rows(dtype, monkeypatch):
    monkeypatch.setattr("tandem.models.logprobs.logit_kernels", lambda hidden, weight: None)
    generator, found, programs = torch.Generator().manual_seed(2), [], []
    for rows in (13, 29):
        hidden, weight, targets = head_inputs(dtype, rows, vocab=500)
        temperature, pulls = torch.rand(rows, generator=generator) + 0.5, torch.randn(2, rows, generator=generator)
        for compiled in (False, True):
            settings = {"softcap": 3.0, "entropy": True, "chunk_tokens": 8, "compiled": compiled}
            out = chunked_logprobs(hidden, weight, targets, temperature, **settings)
            loss = (out.logprobs * pulls[0] + out.entropy * pulls[1]).sum()
            found.append((*out, *torch.autograd.grad(loss, (hidden, weight))))
            programs.append(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))
    for plain, fused in (found[:2], found[2:]):
        for one, other in zip(fused, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5 if one.dtype == torch.float32 else 1 / 64, atol=1e-4)
    assert programs[3] == programs[1] > programs[0], "other numbers of rows need no other program"


def test_the_backward_pass_of_the_head_does_not_reduce_logits_again():
    """Counted: passes over a chunk's logits that sum or find the largest."""

    class Reductions(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            name = operator.__name__.partition(".")[0]
            if name in ("_log_softmax", "_softmax", "logsumexp", "amax", "sum") and args[0].dim() == 2:
                self.names += (name,)
            return operator(*args, **(kwargs or {}))

    for entropy in (False, True):
        with Reductions() as forward:
            out = chunked_logprobs(*head_inputs(torch.float32), None, entropy=entropy)
        with Reductions() as backward:
            sum(x.sum() for x in out if x is not None).backward()
        assert "_log_softmax" in forward.names and backward.names == ()
