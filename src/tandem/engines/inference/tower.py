"""The media towers of a model (for images and sounds), and the features of recently used media.

Towers are transformers' own modules. The features of a medium are computed once and alone, so that they do not depend on the
rest of a batch. They are kept until an update changes the weights of the towers.
"""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForMultimodalLM
from transformers.initialization import no_init_weights

from tandem.api.failures import DataFailure, WeightUpdateFailed
from tandem.api.media import Medium, occurrences
from tandem.api.requests import LLMRequest
from tandem.media import store
from tandem.models.media.family import INPUT_BYTES, MediaFamily, RecentTensors, is_tower

_KEPT_BYTES = 2**28
"""Bytes of features that are kept for later prompts; the features of one pass may be larger."""


class Shown(NamedTuple):
    """Media features for some tokens of a pass."""

    places: torch.Tensor
    """``[M]`` int64: indices of these tokens."""

    features: tuple[torch.Tensor, ...]
    """``[M, hidden]`` each: the first replaces the embeddings, the others are added after the first layers."""


class Tower:
    """The towers of a model, and the features that they have computed. The weights come with `load`."""

    def __init__(self, family: MediaFamily, config: Any, compute: torch.dtype, device: torch.device):
        """``config``: configuration of the whole model, whose text part is built without decoder layers, on the meta
        device."""
        self.family, self._compute, self._device = family, compute, device
        self._model = _without_text(config, compute, device)
        stated = self._model.state_dict().items()
        self.shapes = {name: tensor.shape for name, tensor in stated if is_tower(family, name)}
        """Name → shape of the weights."""

        self._weights: dict[str, torch.Tensor] = {}
        self._inputs, self._features = RecentTensors(INPUT_BYTES), RecentTensors(_KEPT_BYTES)
        self.computed = 0

    def statistics(self) -> dict[str, float]:
        """Returns ``media_computed`` (media so far) and ``media_held_bytes`` (weights and kept features)."""
        weights = sum(tensor.nbytes for tensor in self._weights.values())
        return {"media_computed": float(self.computed), "media_held_bytes": float(weights + self._features.num_bytes)}

    def check(self, request: LLMRequest) -> None:
        """Passes if the prompt has, for each medium, the placeholder tokens that its features replace.

        Raises:
            DataFailure: ``media_mismatch``: the prompt has other tokens there. ``media_missing``: the media store does not
                have the medium. ``media_unreadable``: the medium's file is damaged.
        """
        if not request.media:
            return
        if len(request.media) != len(request.input_ids):
            raise DataFailure("media_mismatch", f"{len(request.media)} media numbers for {len(request.input_ids)} tokens")
        tokens: dict[int, list[int]] = {}
        for number, token in zip(request.media, request.input_ids, strict=True):
            if number:
                tokens.setdefault(number, []).append(token)
        for number, placeholders in tokens.items():
            medium = self._read(number)
            token, rows = self.family.placeholder(medium.kind), self.family.count(medium)
            if set(placeholders) != {token} or len(placeholders) % rows:
                raise DataFailure(
                    "media_mismatch",
                    f"medium {number} has {rows} rows of features, each for a token {token}; the prompt has "
                    f"{len(placeholders)} tokens for it, among them {sorted(set(placeholders))[:3]}",
                )

    def _read(self, number: int) -> Medium:
        """Returns a medium that the model can take. Raises an error for any other medium now, before the prompt is batched
        with other prompts."""
        try:
            medium = store.medium(number)
            if medium.kind not in self.family.kinds:
                takes = " and ".join(self.family.kinds)
                raise DataFailure("media_mismatch", f"medium {number} is an {medium.kind}; this model takes {takes}")
            if self._features.get(number) is None:
                self._input(number)
        except store.MediaMissing as error:
            raise DataFailure(error.reason, str(error)) from error
        return medium

    def _input(self, number: int) -> dict[str, torch.Tensor]:
        """Returns the tower's inputs for a medium, and stores them, because the media store may lose the medium
        meanwhile."""
        return self._inputs.of(number, lambda: self.family.inputs(store.medium(number)))

    def positions(self, request: LLMRequest) -> torch.Tensor | None:
        """Returns rotary positions ``[S, 3]`` of a prompt; None if the positions are those of a text.

        Raises:
            DataFailure: ``media_mismatch``: placeholders of a medium are not adjacent, so that positions would exceed the
                prompt's number of tokens.
        """
        if not request.media or not self.family.three_dimensional:
            return None
        for number, run in groupby(request.media):
            if number and (length := len(list(run))) % (rows := self.family.count(store.medium(number))):
                raise DataFailure(
                    "media_mismatch",
                    f"medium {number} has {rows} rows of features; its placeholders must be adjacent, got a run of {length}",
                )
        media = [store.medium(number) for number in dict.fromkeys(filter(None, request.media))]
        return self.family.positions(torch.tensor(request.input_ids), torch.tensor(request.media), media)

    def shown(self, pieces: Iterable[tuple[Sequence[int], int, int]]) -> Shown | None:
        """Returns the features for pieces of prompts that are packed end to end; None if the pieces are text alone.

        ``pieces``: (media numbers of the prompt's first tokens, the piece's first token, its number of tokens).
        """
        places, rows, done = [], [], 0
        by_number: dict[int, torch.Tensor] = {}
        begins: dict[int, int] = {}
        for media, start, count in pieces:
            numbers = media[start : start + count]
            for number in dict.fromkeys(numbers):
                if number and number not in by_number:
                    begins[number] = sum(map(len, by_number.values()))
                    by_number[number] = self._features_of(number)
            lengths = {number: len(features) for number, features in by_number.items()}
            for occurrence in occurrences(numbers, lengths, media[:start]):
                places.append(done + occurrence.place)
                rows.append(begins[occurrence.number] + occurrence.row)
            done += count
        if not rows:
            return None
        indices = torch.tensor([places, rows]).to(self._device)
        features = torch.cat(list(by_number.values()))[indices[1]]
        return Shown(indices[0], features.chunk(1 + self.family.layers_fed, dim=-1))

    def _features_of(self, number: int) -> torch.Tensor:
        """Returns the features of a medium, ``[n, (1 + layers_fed) · hidden]``; computes them unless they are kept."""
        entry = self._features.get(number)
        if entry is None:
            inputs = {
                name: tensor.to(self._device, self._compute if tensor.is_floating_point() else None)
                for name, tensor in self._input(number).items()
            }
            entry = {"rows": self.family.features(self._model, [inputs])[0].to(self._compute)}
            self._features.put(number, entry)
            self.computed += 1
        return entry["rows"]

    # ------------------------------------------------------------------ weights

    def text_name(self, name: str) -> str:
        """Returns the name that a weight of the language model has in a text-only model."""
        prefix = self.family.text_prefix
        return "model." + name.removeprefix(prefix) if name.startswith(prefix) else name

    def new(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns a copy of a delivered weight, rounded to ``dtype``; None if the tower has the same weight already, or for
        a tensor on the meta device.

        Raises:
            WeightUpdateFailed: the shape differs.
        """
        if self.shapes[name] != tensor.shape:
            raise WeightUpdateFailed(f"weights: {name} must be {list(self.shapes[name])}, got {list(tensor.shape)}")
        if tensor.is_meta:
            return None
        new = tensor.detach().to(self._device, dtype).to(self._compute)
        present = self._weights.get(name)
        if present is not None and torch.equal(new, present):
            return None
        return new.clone() if new.data_ptr() == tensor.data_ptr() else new

    def missing(self, delivered: Collection[str]) -> set[str]:
        """Returns the names of weights that were neither delivered nor loaded before."""
        return self.shapes.keys() - self._weights.keys() - set(delivered)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Loads new weights, if there are any, and drops the features that the old weights computed."""
        if weights:
            self._features.clear()
            self._weights |= weights
            self._model.load_state_dict(weights, strict=False, assign=True)

    def sleep(self) -> None:
        """Frees the memory of weights and features; `load` brings weights again."""
        self._features.clear()
        self._weights = {}
        asleep = {name: tensor.to("meta") for name, tensor in self._model.state_dict().items()}
        self._model.load_state_dict(asleep, assign=True)


def _without_text(config: Any, compute: torch.dtype, device: torch.device) -> nn.Module:
    """Returns a transformers model without decoder layers, with all weights on the meta device."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    with no_init_weights():
        model: nn.Module = AutoModelForMultimodalLM.from_config(config, dtype=compute, trust_remote_code=False)
    model.load_state_dict({name: tensor.to("meta") for name, tensor in model.state_dict().items()}, assign=True)
    for module in model.modules():  # buffers that are computed, not loaded, such as rotary frequencies
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))
    return model.eval()
