"""The equalities once more, on the built-in model."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.models.catalog import built_in, resolve
from tandem.models.load import load_causal_lm
from tandem.models.tokenizer import check_chat_template, load_tokenizer
from tests.models.test_packed import padded_reference

pytestmark = pytest.mark.slow
ROWS = ("What is 12+345?", "Name three colours.", "hi", "There are 15 trees in the grove. Workers will plant trees today.")


@pytest.fixture(scope="module")
def folder():
    return resolve("smollm2-135m")


def test_it_is_made_once_with_template_stop_token_and_single_digits(folder):
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert built_in("smollm2-135m") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    tokenizer = load_tokenizer(folder)
    check_chat_template(tokenizer)
    assert [tokenizer.decode([i]) for i in tokenizer("345")["input_ids"]] == ["3", "4", "5"]
    assert tokenizer.decode([AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id]) == "<|im_end|>"


def test_the_cache_is_where_the_environment_says(folder, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    os.symlink(folder, tmp_path / "models" / "smollm2-135m")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    assert resolve("smollm2-135m").is_relative_to(Path(tmp_path))


def test_packed_equals_padded_in_values_and_gradients(folder):
    tokenizer = load_tokenizer(folder)
    rows = [torch.tensor(tokenizer(row)["input_ids"]) for row in ROWS]
    total = sum(map(len, rows))
    pack = {
        "input_ids": torch.cat(rows),
        "cu_seqlens": torch.tensor([0, *map(len, rows)]).cumsum(0),
        "temperature": torch.tensor([1.0, 0.7, 1.0, 1.3]),
        "loss_mask": torch.ones(total, dtype=torch.bool),
    }
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = load_causal_lm(folder, torch.float32, chunk_tokens=16)
    packed = model(model.lay_out(**pack), entropy=True)
    pack["loss_mask"][pack["cu_seqlens"][:-1]] = False  # the reference gives 0 there as well
    padded = padded_reference(reference, pack)
    torch.testing.assert_close(packed.logprobs, padded[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(packed.entropy, padded[1], atol=1e-4, rtol=1e-4)
    (packed.logprobs - 0.1 * packed.entropy).sum().backward()
    (padded[0] - 0.1 * padded[1]).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        # float32 rounding through 30 layers leaves 1.3e-4
        assert (ours.grad - theirs.grad).norm() <= 1e-3 * theirs.grad.norm(), name
