"""The base class of media families: how tokens, features and positions of a model are made from images and sounds.

To support another family, add a file with a subclass beside this one. `Features` computes features for forward passes, and
caches those of frozen towers.
"""

import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import nn

from tandem.api.media import MediaKind, Medium
from tandem.config.errors import ConfigError
from tandem.media import store
from tandem.models.foreign import UNREADABLE, error_words


class MediaFamily(ABC):
    """A family of models that read images or sounds. It also implements `ReadsMedia` for the tokenizer.

    An object is made from a model folder. It has the configuration and the processor's settings, but no weights.
    """

    model_types: ClassVar[tuple[str, ...]]
    kinds: tuple[MediaKind, ...]
    text_prefix: ClassVar[str]
    """Prefix of the names of the language model's weights, such as ``model.text_model.``; a text-only model has ``model.``
    instead."""

    towers: ClassVar[dict[str, tuple[str, ...]]]
    """Name in ``actor.freeze`` → prefixes of weights, such as ``{"vision": ("model.vision_model.",), …}``."""

    connector: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the weights that `connect` uses."""

    stored: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(prefix in files, prefix in transformers' model) for weights whose names differ."""

    fixed: tuple[str, ...] = ()
    """Prefixes of weights that are never trained, such as sinusoidal positions."""

    three_dimensional: ClassVar[bool] = False
    """True if rotary positions are ``[S, 3]`` (time, height, width)."""

    layers_fed: int = 0
    """Number of first layers after which further features are added to the hidden states. A row of `features` is then
    ``1 + layers_fed`` times as wide as the embedding, whose features come first."""

    folder: Path
    """The model folder from which the object was made."""

    @abstractmethod
    def __init__(self, folder: Path, config: Any):
        """Reads the processor's settings from a folder. Raises `ConfigError` for unsupported settings."""

    @classmethod
    def own_name(cls, name: str) -> str:
        """Returns the name in transformers' model of the weight that is called ``name`` in a file."""
        return next((new + name.removeprefix(old) for old, new in cls.stored if name.startswith(old)), name)

    @abstractmethod
    def marker(self, kind: MediaKind) -> str: ...

    @abstractmethod
    def placeholder(self, kind: MediaKind) -> int: ...

    @abstractmethod
    def count(self, medium: Medium) -> int: ...

    @abstractmethod
    def expansion(self, medium: Medium) -> str: ...

    @abstractmethod
    def inputs(self, medium: Medium) -> dict[str, torch.Tensor]:
        """Returns the tower's inputs for one medium from the media store: pixels, grids, spectrograms and their lengths."""

    def features(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Computes the rows of features ``[n, (1 + layers_fed) · H]`` of each medium: those that replace embeddings, then
        those that are added after layers. ``model``: a transformers model."""
        return self.connect(model, self.encode(model, inputs))

    @abstractmethod
    def encode(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Computes the first part of `features`, with all weights of the towers except those of `connector`."""

    def connect(self, model: nn.Module, encoded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Computes the second part of `features`, with only the weights of `connector`."""
        return list(encoded)

    def text_model(self, model: nn.Module) -> nn.Module:
        """Returns the language model, without its head, of a transformers ``model``."""
        return model.get_submodule(self.text_prefix.removesuffix("."))

    def positions(self, ids: torch.Tensor, media: torch.Tensor, found: Sequence[Medium]) -> torch.Tensor:
        """Returns the positions of a sequence, ``[S]`` or ``[S, 3]``; the position of a following token is the largest + 1.

        ``ids [S]``; ``media [S]``: media numbers; ``found``: the media in the sequence, each once.
        """
        return torch.arange(len(ids))


PROCESSOR, PREPROCESSOR = FILES = ("processor_config.json", "preprocessor_config.json")


def read_processor(name: str, folder: Path) -> Any:
    """Opens the transformers image processor or feature extractor ``name`` with the settings in ``folder``.

    Raises:
        ConfigError: the folder has no such settings, or they cannot be read.
    """
    if not any((folder / file).is_file() for file in FILES):
        raise ConfigError(
            f"model folder {folder} has no {' or '.join(FILES)}, so it is not known how its model reads images or sounds: "
            "copy the processor's files of the base model into it"
        )
    try:
        return getattr(transformers, name).from_pretrained(folder)
    except UNREADABLE as error:
        raise ConfigError(f"the processor in {folder} cannot be read: {error_words(error)}") from error


def settings_of(folder: Path) -> dict[str, Any]:
    """Reads `processor_config.json`; returns {} if the folder has none.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = folder / PROCESSOR
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        return dict(settings)
    except UNREADABLE as error:
        raise ConfigError(f"{file} cannot be read: {error_words(error)}") from error


FEATURE_BYTES = 2**30
"""Largest size of the cache of frozen towers' features, in bytes of host memory."""

INPUT_BYTES = 2**28
"""Largest size of the cache of processed images and sounds, in bytes of host memory."""


class RecentTensors:
    """A least-recently-used cache of tensors with a limit in bytes; it always keeps the newest entry."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[Hashable, dict[str, torch.Tensor]] = OrderedDict()

    def get(self, number: Hashable) -> dict[str, torch.Tensor] | None:
        entry = self._kept.get(number)
        if entry is not None:
            self._kept.move_to_end(number)
        return entry

    def put(self, number: Hashable, tensors: dict[str, torch.Tensor]) -> None:
        self._kept[number] = tensors
        self.num_bytes += _bytes(tensors)
        while self.num_bytes > self._max_bytes and len(self._kept) > 1:
            self.num_bytes -= _bytes(self._kept.popitem(last=False)[1])

    def of(self, number: Hashable, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Returns the entry ``number``. If the entry is missing, stores and returns the result of ``make``."""
        entry = self.get(number)
        if entry is None:
            entry = make()
            self.put(number, entry)
        return entry

    def clear(self) -> None:
        self._kept.clear()
        self.num_bytes = 0


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class Features:
    """The features of media, by their numbers, for one model. Features of a frozen tower are cached in host memory; if only
    the connector is trained, the connector's inputs are cached. Features of a trained tower are computed in each pass, with
    gradients."""

    def __init__(self, family: MediaFamily, model: nn.Module):
        """``model``: a transformers model; all weights outside its language model belong to towers."""
        self.family, self._model = family, model
        self.find_weights()
        for name, parameter in model.named_parameters():
            if name.startswith(family.fixed):
                parameter.requires_grad_(False)
        self._inputs, self._kept = RecentTensors(INPUT_BYTES), RecentTensors(FEATURE_BYTES)
        self.computed = 0
        """Number of media whose features have been computed."""

    def find_weights(self) -> None:
        """Finds the towers' weights; must be called again after modules were replaced."""
        self._places = [
            (f"{name}.{key}".startswith(self.family.connector), module, key)
            for name, module in self._model.named_modules()
            for key in module._parameters
            if is_tower(self.family, f"{name}.{key}")
        ]

    def of(self, numbers: Sequence[int], device: torch.device) -> torch.Tensor:
        """Returns the features of the media ``numbers``, concatenated: ``[rows, (1 + layers_fed) · H]``."""
        if self._trained(connector=False):
            self.computed += len(numbers)
            return torch.cat(self.family.features(self._model, [self._input(number) for number in numbers]))
        compute = self.family.encode if self._trained() else self.family.features
        with torch.no_grad():
            states = [self._frozen(number, compute).to(device) for number in numbers]
        return torch.cat(states if compute == self.family.features else self.family.connect(self._model, states))

    def _frozen(self, number: int, compute: Callable[..., list[torch.Tensor]]) -> torch.Tensor:
        """Returns cached features of one medium. Each medium is computed alone, so the result does not depend on the
        batch."""
        _, module, name = self._places[0]
        key = number, getattr(module, name).dtype  # weights may temporarily be in float32, which changes the result
        entry = self._kept.get(key)
        if entry is None:
            self.computed += 1
            (states,) = compute(self._model, [self._input(number)])
            entry = {"states": states.cpu()}
            self._kept.put(key, entry)
        return entry["states"]

    def _input(self, number: int) -> dict[str, torch.Tensor]:
        return self._inputs.of(number, lambda: self.family.inputs(store.medium(number)))

    def nothing(self) -> torch.Tensor | int:
        """Returns a 0 that depends on all trained tower parameters, for a pass without media. The parameters then get
        gradients of 0, so all ranks sum the same gradients, and the optimizer updates the same parameters for every
        micro-batch."""
        return sum(parameter.sum() * 0.0 for parameter in self._trained()) if torch.is_grad_enabled() else 0

    def _trained(self, *, connector: bool = True) -> list[torch.Tensor]:
        """Returns the trained parameters of the towers; those of the connector only if ``connector``. Looks them up at
        each call, because sharding replaces parameters."""
        tower = (getattr(module, key) for connects, module, key in self._places if connector or not connects)
        return [parameter for parameter in tower if parameter is not None and parameter.requires_grad]

    def forget(self) -> None:
        """Clears the cached features; call it after weights of a frozen tower have changed."""
        self._kept.clear()


def tower_matrices(
    family: type[MediaFamily] | MediaFamily, model: nn.Module, towers: Sequence[str]
) -> list[tuple[str, nn.Linear]]:
    """Returns path and module of each matrix in these towers of a transformers model."""
    prefixes = tuple(prefix for name in towers for prefix in family.towers[name])
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.startswith(prefixes)
    ]


def freeze_towers(packed: Any, names: Sequence[str]) -> list[nn.Parameter]:
    """Freezes the towers ``names`` of a `PackedModel`; returns the parameters of all towers that are not trained."""
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
    """Tells whether a weight, by its transformers name, belongs to a tower or connector."""
    return not name.startswith((family.text_prefix, "lm_head.", "score."))
