"""A prompt that several samples share is computed once, and nothing else changes."""

import pytest
import torch

from tandem.models.attention import compact
from tandem.models.load import load_causal_lm
from tests.tiny import tiny_model_folder

LENGTHS = [(6, (3, 9, 5)), (4, (2,)), (11, (1, 7)), (5, (0, 4, 4))]
"""Prompt length, completion lengths."""


def grouped_batch(seed: int = 0):
    """Packed sequences ``[T]``, those of one prompt next to each other; their bounds and the mask of the completions."""
    generator = torch.Generator().manual_seed(seed)
    ids, mask, sizes = [], [], [0]
    for prompt_length, completions in LENGTHS:
        prompt = torch.randint(0, 200, (prompt_length,), generator=generator)
        for length in completions:
            ids.append(torch.cat([prompt, torch.randint(0, 200, (length,), generator=generator)]))
            mask.append(torch.tensor([False] * prompt_length + [True] * length))
            sizes.append(prompt_length + length)
    return torch.cat(ids), torch.tensor(sizes).cumsum(0), torch.cat(mask)


def test_each_prompt_stands_once_in_the_compact_row_and_every_token_keeps_a_place():
    ids, cu_seqlens, mask = grouped_batch()
    shared = compact(ids, cu_seqlens.tolist(), mask)

    assert sorted(p.length for p in shared.prompts) == [4, 5, 6, 11]
    assert sum(p.tokens for p in shared.prompts) == len(shared.tokens) == 26 + int(mask.sum())
    assert torch.equal(ids[shared.tokens][shared.place], ids)


def test_sequences_without_a_common_prompt_are_left_as_they_are():
    ids, cu_seqlens = torch.arange(12), torch.tensor([0, 5, 12])
    assert compact(ids, cu_seqlens.tolist(), torch.arange(12) % 5 > 2) is None


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
def test_shared_prompts_give_log_probabilities_and_gradients_of_separate_sequences(tmp_path, kind):
    model = load_causal_lm(str(tiny_model_folder(tmp_path, kind=kind)), torch.float32, "cpu", False)
    ids, cu_seqlens, mask = grouped_batch()
    bounds = cu_seqlens.tolist()
    temperature = torch.linspace(0.7, 1.3, len(bounds) - 1)
    together = model(model.lay_out(ids, cu_seqlens, mask, temperature), True)
    (together.logprobs.sum() + together.entropy.square().sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    alone = []
    for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        own = ids[start:end], torch.tensor([0, end - start]), mask[start:end], temperature[i : i + 1]
        one = model(model.lay_out(*own), True)
        (one.logprobs.sum() + one.entropy.square().sum()).backward()
        alone.append(one)

    assert torch.allclose(together.logprobs, torch.cat([one.logprobs for one in alone]), atol=1e-5)
    assert torch.allclose(together.entropy, torch.cat([one.entropy for one in alone]), atol=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], atol=2e-4 * float(gradients[name].abs().max()) + 1e-6), name
