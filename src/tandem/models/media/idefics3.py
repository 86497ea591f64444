"""Idefics3 and SmolVLM: images are split into square tiles, which all have the same number of placeholders."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import nn

from tandem.api.failures import DataFailure
from tandem.api.media import MediaKind, Medium
from tandem.config.errors import ConfigError
from tandem.media import store
from tandem.models.media.family import MediaFamily, read_processor, settings_of

MAX_EDGE = 4096
"""Longest edge in pixels to which the processor resizes an image."""


class Idefics3(MediaFamily):
    """A SigLIP tower, a connector that merges neighbouring patches, and a language model with one-dimensional positions."""

    model_types = ("idefics3", "smolvlm")
    kinds = ("image",)
    text_prefix = "model.text_model."
    connector = ("model.connector.",)
    towers: ClassVar = {"vision": ("model.vision_model.",), "connector": connector}

    def __init__(self, folder: Path, config: Any):
        self.folder = folder
        self._image_token: int = config.image_token_id
        name = "Idefics3ImageProcessorPil" if config.model_type == "idefics3" else "SmolVLMImageProcessorPil"
        self.processor = read_processor(name, folder)
        self._longest = self._edge("size")
        self._tile = self._edge("max_image_size")
        patch, scale = config.vision_config.patch_size, config.scale_factor
        side = self._tile // patch
        self._rows = (side // scale) ** 2
        placeholders = settings_of(folder).get("image_seq_len", self._rows)
        if side % scale or self._tile % patch or placeholders != self._rows:
            raise ConfigError(
                f"the processor in {folder} splits images into tiles of {self._tile} pixels and writes {placeholders} "
                f"placeholders for each, and the model computes {side / scale:g}² features (patches of {patch}, "
                f"scale_factor {scale}): set image_seq_len and max_image_size to the values with which the model was trained"
            )

    def _edge(self, setting: str) -> int:
        size = getattr(self.processor, setting)
        edge = size.get("longest_edge") if isinstance(size, dict) else getattr(size, "longest_edge", None)
        if edge is None:
            raise ConfigError(f"the processor in {self.folder} has {setting}={size}; only a longest_edge is supported")
        return int(edge)

    def marker(self, kind: MediaKind) -> str:
        return "<image>"

    def placeholder(self, kind: MediaKind) -> int:
        return self._image_token

    def tiles(self, width: int, height: int) -> tuple[int, int]:
        """Returns the rows and columns of tiles of an image, in addition to the whole image; 0, 0 if it is not split."""
        if not self.processor.do_image_splitting:
            return 0, 0
        if self.processor.do_resize:
            width, height = _resized(width, height, self._longest)
        ratio = width / height
        if width >= height:
            width = self._up(width)
            height = self._up(int(width / ratio))
        else:
            height = self._up(height)
            width = self._up(int(height * ratio))
        whole = width <= self._tile and height <= self._tile
        return (0, 0) if whole else (height // self._tile, width // self._tile)

    def _up(self, edge: int) -> int:
        return math.ceil(edge / self._tile) * self._tile

    def count(self, medium: Medium) -> int:
        rows, columns = self.tiles(*medium.size)
        return self._rows * (rows * columns + 1)

    def expansion(self, medium: Medium) -> str:
        rows, columns = self.tiles(*medium.size)
        around, features = "<fake_token_around_image>", "<image>" * self._rows
        lines = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{features}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join([*lines, "\n"] if rows else []) + f"{around}<global-img>{features}{around}"

    def inputs(self, medium: Medium) -> dict[str, torch.Tensor]:
        """Returns ``pixel_values [tiles, 3, E, E]``, float32."""
        picture = Image.fromarray(store.image(medium.number))
        pixels = self.processor(images=[[picture]], return_tensors="pt")["pixel_values"][0]
        if len(pixels) * self._rows != self.count(medium):
            raise DataFailure(
                "media_mismatch",
                f"a picture of {medium.size} pixels has {self.count(medium)} placeholders and {len(pixels) * self._rows} "
                "rows of features",
            )
        return {"pixel_values": pixels}

    def encode(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        parts: Any = model.model
        like = parts.vision_model.embeddings.patch_embedding.weight
        pixels = torch.cat([image["pixel_values"] for image in inputs]).to(like.device, like.dtype)
        # transformers' get_image_features is not used, because it drops tiles of zeros as padding
        states = parts.vision_model(pixel_values=pixels).last_hidden_state  # [tiles, patches, D]
        return list(states.split([len(image["pixel_values"]) for image in inputs]))

    def connect(self, model: nn.Module, encoded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts: Any = model.model
        rows = parts.connector(torch.cat(list(encoded)))  # [tiles, rows, H]
        return [part.flatten(0, 1) for part in rows.split([len(states) for states in encoded])]


def _resized(width: int, height: int, longest: int) -> tuple[int, int]:
    """Returns an image's size after its longer edge is resized to ``longest``, and to at most `MAX_EDGE`."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        width, height = MAX_EDGE, int(MAX_EDGE / ratio)
    elif height > width and height > MAX_EDGE:
        width, height = int(MAX_EDGE * ratio), MAX_EDGE
    return max(width, 1), max(height, 1)
