"""The features of the media of a forward pass, computed once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from tandem.media import store
from tandem.models.media.family import MediaFamily

FEATURE_BYTES = 2**30
"""Most host memory that the features of frozen towers take."""

INPUT_BYTES = 2**28
"""Most host memory that processed pictures and sounds take."""


class RecentTensors:
    """The entries that were used last, up to so many bytes of tensors."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[Hashable, dict[str, torch.Tensor]] = OrderedDict()

    def get(self, number: Hashable) -> dict[str, torch.Tensor] | None:
        found = self._kept.get(number)
        if found is not None:
            self._kept.move_to_end(number)
        return found

    def put(self, number: Hashable, made: dict[str, torch.Tensor]) -> None:
        self._kept[number] = made
        self.num_bytes += _bytes(made)
        while self.num_bytes > self._max_bytes and len(self._kept) > 1:
            self.num_bytes -= _bytes(self._kept.popitem(last=False)[1])

    def of(self, number: Hashable, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The entry, made if it is not kept."""
        found = self.get(number)
        if found is None:
            found = make()
            self.put(number, found)
        return found

    def clear(self) -> None:
        self._kept.clear()
        self.num_bytes = 0


def _bytes(made: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in made.values())


class Features:
    """The features of media by number, of one model. Those of a frozen tower are kept in host memory, before the connector
    if that is trained; those of one that is trained are computed in each pass, with a graph."""

    def __init__(self, family: MediaFamily, model: nn.Module):
        """``model``: of transformers; what is not its language model is the tower."""
        self.family, self._model = family, model
        self.find_weights()
        for name, parameter in model.named_parameters():
            if name.startswith(family.fixed):
                parameter.requires_grad_(False)
        self._inputs, self._kept = RecentTensors(INPUT_BYTES), RecentTensors(FEATURE_BYTES)
        self.computed = 0
        """Media whose features were computed."""

    def find_weights(self) -> None:
        """Looks for the tower's weights: at the beginning, and after modules were put in the place of others."""
        self._places = [
            (f"{name}.{key}".startswith(self.family.connector), module, key)
            for name, module in self._model.named_modules()
            for key in module._parameters
            if is_tower(self.family, f"{name}.{key}")
        ]

    def of(self, numbers: Sequence[int], device: torch.device) -> torch.Tensor:
        """The features of these media, one after another, ``[rows, H]``."""
        if self._trained(connector=False):
            self.computed += len(numbers)
            return torch.cat(self.family.features(self._model, [self._input(number) for number in numbers]))
        compute = self.family.encode if self._trained() else self.family.features
        with torch.no_grad():
            kept = [self._frozen(number, compute).to(device) for number in numbers]
        return torch.cat(kept if compute == self.family.features else self.family.connect(self._model, kept))

    def _frozen(self, number: int, compute: Callable[..., list[torch.Tensor]]) -> torch.Tensor:
        """Computed alone: to the bit the same, whatever else is in the batch."""
        _, module, name = self._places[0]
        key = number, getattr(module, name).dtype  # a moment in float32 gives others
        kept = self._kept.get(key)
        if kept is None:
            self.computed += 1
            (states,) = compute(self._model, [self._input(number)])
            kept = {"states": states.cpu()}
            self._kept.put(key, kept)
        return kept["states"]

    def _input(self, number: int) -> dict[str, torch.Tensor]:
        return self._inputs.of(number, lambda: self.family.inputs(store.medium(number)))

    def nothing(self) -> torch.Tensor | int:
        """0, through which a trained tower gets gradients of 0 in a pass without media: ranks sum the same gradients, and
        the optimizer sees the same parameters, whatever is in a micro-batch."""
        return sum(parameter.sum() * 0.0 for parameter in self._trained()) if torch.is_grad_enabled() else 0

    def _trained(self, *, connector: bool = True) -> list[torch.Tensor]:
        """The tower's parameters that are trained, perhaps without the connector's. The model is asked anew: sharding puts
        others in their place."""
        tower = (getattr(module, key) for connects, module, key in self._places if connector or not connects)
        return [parameter for parameter in tower if parameter is not None and parameter.requires_grad]

    def forget(self) -> None:
        """After weights of a frozen tower have changed: nothing that is kept is used again."""
        self._kept.clear()


def tower_matrices(
    family: type[MediaFamily] | MediaFamily, model: nn.Module, towers: Sequence[str]
) -> list[tuple[str, nn.Linear]]:
    """The matrices of these towers of a model of transformers, with their paths."""
    prefixes = tuple(prefix for name in towers for prefix in family.towers[name])
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.startswith(prefixes)
    ]


def freeze_towers(packed: Any, names: Sequence[str]) -> list[nn.Parameter]:
    """Freezes these towers of a `PackedModel`; returns all parameters of its towers that are not trained."""
    media: Features | None = packed.media
    if media is None:
        return []
    prefixes = tuple(prefix for name in names for prefix in media.family.towers[name])
    frozen = []
    for name, parameter in packed.model.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(False)
        if is_tower(media.family, name) and not parameter.requires_grad:
            frozen.append(parameter)
    return frozen


def is_tower(family: MediaFamily, name: str) -> bool:
    """True for the name of a weight that belongs to what sees or hears; ``name``: of transformers."""
    return not name.startswith((family.text_prefix, "lm_head.", "score."))
