"""One kind of media model: how its tokens, features and positions are made. A further kind is one file beside this one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tandem.api.media import MediaKind, Medium


class MediaFamily(ABC):
    """The facts of one ``model_type``; it is the tokenizer's `ReadsMedia` too.

    An object is made of a model folder: it knows the configuration and the processor's settings, and holds no weights.
    """

    model_types: ClassVar[tuple[str, ...]]
    kinds: tuple[MediaKind, ...]
    text_prefix: ClassVar[str]
    """Prefix of the names of the language model's weights, such as ``model.text_model.``: with ``model.`` in its place they
    are those of a text-only model."""

    towers: ClassVar[dict[str, tuple[str, ...]]]
    """Name that ``actor.freeze`` knows → prefixes of weights, such as ``{"vision": ("model.vision_model.",), …}``."""

    connector: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the weights that `connect` computes with."""

    stored: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Beginnings of names of weights in files → those in transformers' model, where they differ."""

    fixed: tuple[str, ...] = ()
    """Prefixes of weights that are never trained, such as sinusoidal positions."""

    three_dimensional: ClassVar[bool] = False
    """True if rotary positions are ``[S, 3]`` (time, height, width)."""

    layers_fed: int = 0
    """The states behind so many of the first layers get features too: a row of `features` is as many times wider, the
    embedding first."""

    folder: Path
    """The model folder that it was made of."""

    @abstractmethod
    def __init__(self, folder: Path, config: Any):
        """Reads the processor's settings of a folder. Raises `ConfigError` for those that are not exact here."""

    @classmethod
    def own_name(cls, name: str) -> str:
        """The name in transformers' model of a weight that a file calls ``name``."""
        return next((own + name.removeprefix(there) for there, own in cls.stored if name.startswith(there)), name)

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
        """The tower's inputs for one medium, read from the media store: pixels, grids, spectrograms and their masks."""

    def features(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """The rows of features ``[n, (1 + layers_fed) · H]`` of each medium, as they stand among the embeddings and are
        added behind layers. ``model``: of transformers."""
        return self.connect(model, self.encode(model, inputs))

    @abstractmethod
    def encode(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """The first part of `features`, with all weights of the towers but for those of `connector`."""

    def connect(self, model: nn.Module, encoded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The second part of `features`, with the weights of `connector` alone."""
        return list(encoded)

    def text_model(self, model: nn.Module) -> nn.Module:
        """The language model without its head, in a ``model`` of transformers."""
        return model.get_submodule(self.text_prefix.removesuffix("."))

    def positions(self, ids: torch.Tensor, media: torch.Tensor, found: Sequence[Medium]) -> torch.Tensor:
        """Positions of a sequence from its beginning: ``[S]``, or ``[S, 3]``; the next token's is the largest one + 1.

        ``ids [S]``, ``media [S]`` media numbers; ``found``: the media in them, each once.
        """
        return torch.arange(len(ids))
