"""Opens a model for training."""

import os
from pathlib import Path

import torch
from transformers import PretrainedConfig

from tandem.models.architecture import Architecture
from tandem.models.catalog import resolve
from tandem.models.foreign import read_hf_config, read_weights
from tandem.models.heads import (
    ClassLabel,
    PackedActorCritic,
    PackedScalarModel,
    read_classifier,
    refuse_classifier,
)
from tandem.models.media.families import family_of, opener
from tandem.models.packed import PackedCausalLM
from tandem.models.stopping import set_stop_ids

DROPOUT = ("attention_dropout", "dropout", "activation_dropout", "encoder_layerdrop")
"""Settings that make a forward pass random, in the configurations of transformers."""


def load_causal_lm(
    path: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    *,
    selective_checkpointing: bool = False,
    chunk_tokens: int = 1024,
    value_head: bool = False,
) -> PackedCausalLM:
    """The model at ``path`` (folder, hub name, built-in name) with packed attention, its weights in ``dtype``.
    For the device ``meta`` only the headers of its files are read, which tells whether it can be opened.

    Dropout is off: a policy's log-probabilities must not be random. ``gradient_checkpointing`` keeps only the input of each
    layer (with ``selective_checkpointing`` the results of products too) and computes the rest again in the backward pass.
    ``value_head``: with a second head that begins at 0, a `PackedActorCritic`.

    Raises:
        ConfigError: no such model, a damaged folder, weights that are missing, a reward model, or an architecture that is
            not computed exactly.
    """
    folder = resolve(path)
    config = read_config(folder)
    refuse_classifier(folder, config)
    family = family_of(folder, config)
    kind, attention = opener(family)
    model = read_weights(kind, folder, config, dtype, device, attention=attention)
    set_stop_ids(model, folder)
    model.to(device)
    wrapper = PackedActorCritic if value_head else PackedCausalLM
    packed = wrapper(model, chunk_tokens=chunk_tokens, family=family)
    if gradient_checkpointing:
        packed.enable_gradient_checkpointing(selective_checkpointing)
    return packed


def load_scalar_model(
    path: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    *,
    selective_checkpointing: bool = False,
    class_label: ClassLabel | None = None,
) -> PackedScalarModel:
    """The model at ``path`` with one number a token as its head: a critic, or a reward model.

    A sequence classifier brings its head; from a causal language model the head begins as zeros. ``class_label``: the class
    whose log-odds are the number, of a classifier with several.

    Raises:
        ConfigError: what `load_causal_lm` refuses, a classifier with several labels of which none is chosen, or no such
            class.
    """
    folder = resolve(path)
    config = read_config(folder)
    packed = read_classifier(folder, config, dtype, device, class_label)
    packed.model.to(device)
    if gradient_checkpointing:
        packed.enable_gradient_checkpointing(selective_checkpointing)
    return packed


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration, if the architecture is computed exactly; without dropout."""
    config = read_hf_config(folder)
    Architecture.from_config(config)  # refuse before reading gigabytes
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name in DROPOUT:
            if hasattr(part, name):
                setattr(part, name, 0.0)
    return config
