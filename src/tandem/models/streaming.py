"""Loads a model piece by piece: it is made without memory, then filled from its files while it is sharded over ranks.

A rank thus holds its own part, and for a moment one layer or the embedding, never the whole model.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from tandem.api.activity import did
from tandem.api.weight_files import stored_entries
from tandem.config.errors import ConfigError
from tandem.models.catalog import resolve
from tandem.models.foreign import (
    UNREADABLE,
    error_words,
    no_progress_bars,
    no_report,
    read_generation_config,
    read_hf_config,
)
from tandem.models.heads import (
    HEAD,
    PackedActorCritic,
    PackedScalarModel,
    is_token_classifier,
    prepare_classifier,
    refuse_classifier,
)
from tandem.models.load import read_config
from tandem.models.media.families import classifier_class, family_class, family_of, opener
from tandem.models.packed import PackedCausalLM, PackedModel
from tandem.models.stopping import set_stop_ids
from tandem.models.tensor_parallel import Pieces

PREFIX = "model."
"""The prefix that `PackedModel` puts before the names in files."""


@dataclass(frozen=True)
class Unfilled:
    """A model whose parameters have no memory yet (device ``meta``), and the files with their values."""

    model: PackedModel
    files: Mapping[str, Any]
    """Hugging Face name → the tensor in its file; parameters without an entry begin at 0."""

    device: torch.device

    def fill(self, module: nn.Module, pieces: Pieces | None) -> None:
        """Loads the parameters of ``module`` that are still empty, in their dtype; with ``pieces`` only this rank's piece of
        each."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        made: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for key, parameter in list(part.named_parameters(recurse=False)):
                if parameter.is_meta:
                    if id(parameter) not in made:
                        value = self._read(names[id(parameter)], parameter, pieces)
                        made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                    setattr(part, key, made[id(parameter)])  # tied ones stay tied

    def _read(self, name: str, empty: torch.Tensor, pieces: Pieces | None) -> torch.Tensor:
        did()
        source = self.files.get(name.removeprefix(PREFIX))
        if source is None:
            return torch.zeros(empty.shape, dtype=empty.dtype, device=self.device)
        if pieces is None or name not in pieces.dims:
            found = source[:]
        else:
            dim, total = pieces.dims[name]
            start, end = pieces.bounds(total)
            found = source[start:end] if dim == 0 else source[:, start:end]
        # a copy: what is read lies in the mapped file
        return found.to(self.device, empty.dtype, copy=True)


def open_unfilled(
    path: str | os.PathLike[str], device: torch.device, head: str, *, chunk_tokens: int = 1024
) -> Unfilled | None:
    """Makes the model at ``path`` without memory. Returns None if its files do not hold each tensor under its own name, so
    that transformers must load it as a whole. ``head``: ``lm``, ``scalar`` or ``both``.

    Raises:
        ConfigError: the model is one that `load_causal_lm` and `load_scalar_model` refuse.
    """
    folder = resolve(path)
    files = tensors_of(folder)
    if not files:
        return None
    config = read_config(folder)
    may_miss: set[str] = set()
    family = family_of(folder, config)
    kind, attention = opener(family)
    if head == "scalar" and is_token_classifier(config):
        return None  # its head is computed from the one in the file
    if head == "scalar":
        brings_head, padding = prepare_classifier(folder, config)
        if family is None:  # see `read_classifier`
            config.pad_token_id = padding
        may_miss = set() if brings_head else {HEAD}
        if not brings_head:
            files = {name: tensor for name, tensor in files.items() if name != HEAD}
        model = _empty(classifier_class(config), attention, config, folder)
        packed: PackedModel = PackedScalarModel(model, family=family)
        packed.decoder.embed_tokens.padding_idx = None  # see `read_classifier`
    else:
        refuse_classifier(folder, config)
        model = _empty(kind, attention, config, folder)
        model.generation_config = read_generation_config(folder) or model.generation_config
        set_stop_ids(model, folder)
        packed = (PackedActorCritic if head == "both" else PackedCausalLM)(model, chunk_tokens=chunk_tokens, family=family)
    if dict(model.named_parameters()).keys() - files.keys() - may_miss or not _make_buffers(packed, device):
        return None
    return Unfilled(packed, files, device)


def tensors_of(folder: Path) -> dict[str, Any]:
    """Tensor name in the transformers model → a slice of its safetensors file, read when it is indexed; empty if the folder
    has no such file. Files of media models may use older names.

    Raises:
        ConfigError: as `stored_entries`.
    """
    family = family_class(read_hf_config(folder)) if (folder / "config.json").is_file() else None
    stored = stored_entries(folder)
    opened = {entry.file: safe_open(entry.file, "pt") for entry in stored.values()}
    return {
        name if family is None else family.own_name(name): opened[entry.file].get_slice(name)
        for name, entry in stored.items()
    }


def _empty(kind: Any, attention: str | dict[str, str], config: Any, folder: Path) -> nn.Module:
    try:
        with no_progress_bars(), no_report(), torch.device("meta"):
            model = kind.from_config(config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False)
    except UNREADABLE as error:
        raise ConfigError(f"config.json of {folder} describes no model: {error_words(error)}") from error
    if getattr(config, "tie_word_embeddings", False) and hasattr(model, "lm_head"):
        model.lm_head.weight = model.get_input_embeddings().weight
    return model.eval()


def _make_buffers(packed: PackedModel, device: torch.device) -> bool:
    """Makes the buffers that follow from the model's configuration; returns False if the model has any other buffer."""
    model, scale = packed.model, packed.architecture.embedding_scale
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        if not any(buffer.is_meta for buffer in own.values()):
            continue
        if module is packed.decoder.rotary_emb or ("inv_freq" in own and hasattr(module, "config")):  # the latter: a tower's
            made = dict(type(module)(module.config).named_buffers(recurse=False))
        elif set(own) == {"embed_scale"}:
            made = {"embed_scale": torch.tensor(scale)}
        else:
            return False
        for name in own:
            module._buffers[name] = made[name].to(device)
    return True
