"""Opens a model for training."""

import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.errors import ConfigError
from tandem.models.architecture import Architecture
from tandem.models.attention import NAME
from tandem.models.catalog import resolve
from tandem.models.packed import PackedCausalLM


def load_causal_lm(
    path: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    *,
    chunk_tokens: int = 1024,
) -> PackedCausalLM:
    """The model at ``path`` (folder, hub name, built-in name) with packed attention, its weights in ``dtype``.

    Dropout is off: a policy's log-probabilities must not be random. ``gradient_checkpointing`` keeps only the input of each
    layer and computes the rest again in the backward pass.

    Raises:
        ConfigError: no such model, a damaged folder, or an architecture that is not computed exactly.
    """
    folder = resolve(path)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"config.json of {folder} cannot be read: {error}") from error
    Architecture.from_config(config)  # refuse before reading gigabytes
    config.attention_dropout = 0.0
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, attn_implementation=NAME)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the weights in {folder} cannot be read: {error}") from error
    model.to(device)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # transformers recomputes layers only in training mode, and nothing else depends on it once dropout is 0
    model.train(gradient_checkpointing)
    return PackedCausalLM(model, chunk_tokens=chunk_tokens)
