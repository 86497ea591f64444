"""The eyes and ears of a model: its towers, and the features of the media that were shown lately.

Towers are computed by transformers' own modules. The features of a medium are computed once, alone, so that they do not
depend on what comes beside it, and kept until an update brings other weights of the towers.
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
from tandem.models.media.family import MediaFamily
from tandem.models.media.features import INPUT_BYTES, RecentTensors, is_tower

_KEPT_BYTES = 2**28
"""Features that are kept for prompts to come; those of a pass may be more."""


class Shown(NamedTuple):
    """Features that stand among the embeddings of a pass."""

    places: torch.Tensor
    """``[M]`` int64: which of its tokens."""

    features: tuple[torch.Tensor, ...]
    """``[M, hidden]`` each: in the place of the embeddings, then those that are added behind the first layers."""


class Tower:
    """The towers of a model, and the features that they have computed. It has weights once `load` brought them."""

    def __init__(self, family: MediaFamily, config: Any, compute: torch.dtype, device: torch.device):
        """``config``: of the whole model; of its text part only the embeddings are described, on the meta device."""
        self.family, self._compute, self._device = family, compute, device
        self._model = _without_text(config, compute, device)
        stated = self._model.state_dict().items()
        self.shapes = {name: tensor.shape for name, tensor in stated if is_tower(family, name)}
        """Name → shape of the weights."""

        self._weights: dict[str, torch.Tensor] = {}
        self._inputs, self._features = RecentTensors(INPUT_BYTES), RecentTensors(_KEPT_BYTES)
        self.computed = 0

    def statistics(self) -> dict[str, float]:
        """``media_computed``, and ``media_held_bytes`` of the weights and of the features that are kept."""
        weights = sum(tensor.nbytes for tensor in self._weights.values())
        return {"media_computed": float(self.computed), "media_held_bytes": float(weights + self._features.num_bytes)}

    def check(self, request: LLMRequest) -> None:
        """Passes if each medium of a prompt has the tokens that its features replace.

        Raises:
            DataFailure: ``media_mismatch``: it has not. ``media_missing``: the media store does not have the medium;
                ``media_unreadable``: its file there is damaged.
        """
        if not request.media:
            return
        if len(request.media) != len(request.input_ids):
            raise DataFailure("media_mismatch", f"{len(request.media)} media numbers for {len(request.input_ids)} tokens")
        tokens: dict[int, list[int]] = {}
        for number, token in zip(request.media, request.input_ids, strict=True):
            if number:
                tokens.setdefault(number, []).append(token)
        for number, there in tokens.items():
            medium = self._read(number)
            token, rows = self.family.placeholder(medium.kind), self.family.count(medium)
            if set(there) != {token} or len(there) % rows:
                raise DataFailure(
                    "media_mismatch",
                    f"medium {number} has {rows} rows of features, each for a token {token}; the prompt has {len(there)} "
                    f"tokens for it, among them {sorted(set(there))[:3]}",
                )

    def _read(self, number: int) -> Medium:
        """A medium that the model can be shown: what is wrong with it is told before its prompt is computed among others."""
        try:
            medium = store.medium(number)
            if medium.kind not in self.family.kinds:
                raise DataFailure(
                    "media_mismatch", f"medium {number} is an {medium.kind}; this model takes {self.family.kinds}"
                )
            if self._features.get(number) is None:
                self._input(number)
        except store.MediaMissing as error:
            raise DataFailure(error.reason, str(error)) from error
        return medium

    def _input(self, number: int) -> dict[str, torch.Tensor]:
        """The inputs of the tower for a medium; once made it does not ask the media store, which may lose it meanwhile."""
        return self._inputs.of(number, lambda: self.family.inputs(store.medium(number)))

    def positions(self, request: LLMRequest) -> torch.Tensor | None:
        """Rotary positions ``[S, 3]`` of a prompt; None where they are those of text.

        Raises:
            DataFailure: ``media_mismatch``: placeholders of a medium stand apart from each other, so that positions would
                grow beyond the prompt's tokens.
        """
        if not request.media or not self.family.three_dimensional:
            return None
        for number, run in groupby(request.media):
            if number and (there := len(list(run))) % (rows := self.family.count(store.medium(number))):
                raise DataFailure(
                    "media_mismatch",
                    f"medium {number} has {rows} rows of features; its placeholders must stand side by side, not {there}",
                )
        found = [store.medium(number) for number in dict.fromkeys(filter(None, request.media))]
        return self.family.positions(torch.tensor(request.input_ids), torch.tensor(request.media), found)

    def shown(self, pieces: Iterable[tuple[Sequence[int], int, int]]) -> Shown | None:
        """The features that pieces of prompts take, packed end to end; None where they are text alone.

        ``pieces``: media numbers of a prompt, perhaps of its first tokens alone; the piece's first token; its length.
        """
        places, rows, done = [], [], 0
        there: dict[int, torch.Tensor] = {}
        begins: dict[int, int] = {}
        for media, start, count in pieces:
            own = media[start : start + count]
            for number in dict.fromkeys(own):
                if number and number not in there:
                    begins[number] = sum(map(len, there.values()))
                    there[number] = self._features_of(number)
            for one in occurrences(own, {number: len(found) for number, found in there.items()}, media[:start]):
                places.append(done + one.place)
                rows.append(begins[one.number] + one.row)
            done += count
        if not rows:
            return None
        taken = torch.tensor([places, rows]).to(self._device)
        features = torch.cat(list(there.values()))[taken[1]]
        return Shown(taken[0], features.chunk(1 + self.family.layers_fed, dim=-1))

    def _features_of(self, number: int) -> torch.Tensor:
        """``[n, (1 + layers_fed) · hidden]``."""
        kept = self._features.get(number)
        if kept is None:
            inputs = {
                name: tensor.to(self._device, self._compute if tensor.is_floating_point() else None)
                for name, tensor in self._input(number).items()
            }
            kept = {"rows": self.family.features(self._model, [inputs])[0].to(self._compute)}
            self._features.put(number, kept)
            self.computed += 1
        return kept["rows"]

    # ------------------------------------------------------------------ weights

    def text_name(self, name: str) -> str:
        """The name in a model of text alone of a weight of the language model."""
        prefix = self.family.text_prefix
        return "model." + name.removeprefix(prefix) if name.startswith(prefix) else name

    def new(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """A copy of a weight that was delivered, rounded to ``dtype``; None for one that is there already, or that is only
        described (on the meta device).

        Raises:
            WeightUpdateFailed: it has another shape.
        """
        if self.shapes[name] != tensor.shape:
            raise WeightUpdateFailed(f"weights: {name} must be {list(self.shapes[name])}, got {list(tensor.shape)}")
        if tensor.is_meta:
            return None
        new = tensor.detach().to(self._device, dtype).to(self._compute)
        own = self._weights.get(name)
        if own is not None and torch.equal(new, own):
            return None
        return new.clone() if new.data_ptr() == tensor.data_ptr() else new

    def missing(self, delivered: Collection[str]) -> set[str]:
        """Names of weights that were not delivered, and are not there either."""
        return self.shapes.keys() - self._weights.keys() - set(delivered)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes new weights, if there are any, and drops the features that others have computed."""
        if weights:
            self._features.clear()
            self._weights |= weights
            self._model.load_state_dict(weights, strict=False, assign=True)

    def sleep(self) -> None:
        """Gives the memory of weights and features back; `load` brings them again."""
        self._features.clear()
        self._weights = {}
        asleep = {name: tensor.to("meta") for name, tensor in self._model.state_dict().items()}
        self._model.load_state_dict(asleep, assign=True)


def _without_text(config: Any, compute: torch.dtype, device: torch.device) -> nn.Module:
    """A model of transformers without decoder layers, all that weights will be on the meta device."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    with no_init_weights():
        model: nn.Module = AutoModelForMultimodalLM.from_config(config, dtype=compute, trust_remote_code=False)
    model.load_state_dict({name: tensor.to("meta") for name, tensor in model.state_dict().items()}, assign=True)
    for module in model.modules():  # those that are computed, and not loaded, such as frequencies of positions
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))
    return model.eval()
