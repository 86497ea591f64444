"""Qwen2-VL and Qwen2.5-VL: images of any size, with rotary positions in time, height and width.

Qwen3-VL: the same images and positions; features from several depths of the tower are added after several layers.
"""

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
from tandem.models.media.family import MediaFamily, read_processor

MAX_RATIO = 200
"""The largest ratio of an image's longer to its shorter edge that the processor accepts."""


class QwenVL(MediaFamily):
    """A tower whose merger joins each 2 × 2 patches; images keep their aspect ratio."""

    model_types = ("qwen2_vl", "qwen2_5_vl")
    kinds = ("image",)
    text_prefix = "model.language_model."
    towers: ClassVar = {
        "vision": ("model.visual.patch_embed.", "model.visual.blocks."),
        "connector": ("model.visual.merger.",),
    }
    stored = (
        ("visual.", "model.visual."),
        *((f"model.{part}.", f"model.language_model.{part}.") for part in ("embed_tokens", "layers", "norm")),
    )
    three_dimensional = True

    def __init__(self, folder: Path, config: Any):
        self.folder = folder
        self._image_token: int = config.image_token_id
        processor = self.processor = read_processor("Qwen2VLImageProcessorPil", folder)
        vision = config.vision_config
        self._patch, self._merge = vision.patch_size, vision.spatial_merge_size
        settings = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
        expected = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        if settings != expected or not processor.do_resize:
            raise ConfigError(
                f"the processor in {folder} has (patch_size, merge_size, temporal_patch_size)={settings} and do_resize="
                f"{processor.do_resize}, and the model has {expected}: set them to the model's, and do_resize=true"
            )
        self._pixels = range(processor.size["shortest_edge"], processor.size["longest_edge"] + 1)

    def marker(self, kind: MediaKind) -> str:
        return "<|image_pad|>"

    def placeholder(self, kind: MediaKind) -> int:
        return self._image_token

    def grid(self, medium: Medium) -> tuple[int, int]:
        """Returns the rows and columns of features of an image.

        Raises:
            DataFailure: one edge is more than 200 times as long as the other.
        """
        width, height = medium.size
        if max(width, height) > MAX_RATIO * min(width, height):
            raise DataFailure(
                "media_refused", f"a picture of {width} × {height} pixels has a ratio of edges above {MAX_RATIO} to 1"
            )
        factor = self._patch * self._merge
        rows, columns = round(height / factor), round(width / factor)
        pixels = rows * columns * factor**2
        if pixels >= self._pixels.stop:
            shrink = math.sqrt(height * width / (self._pixels.stop - 1))
            rows, columns = (max(1, math.floor(edge / shrink / factor)) for edge in (height, width))
        elif pixels < self._pixels.start:
            grow = math.sqrt(self._pixels.start / (height * width))
            rows, columns = (math.ceil(edge * grow / factor) for edge in (height, width))
        return rows, columns

    def count(self, medium: Medium) -> int:
        return math.prod(self.grid(medium))

    def expansion(self, medium: Medium) -> str:
        return self.marker(medium.kind) * self.count(medium)

    def inputs(self, medium: Medium) -> dict[str, torch.Tensor]:
        """Returns ``pixel_values [patches, numbers]`` float32, and ``grid [1, 3]``: patches in time, height and width."""
        processed = self.processor(images=[Image.fromarray(store.image(medium.number))], return_tensors="pt")
        rows = int(processed["image_grid_thw"].prod()) // self._merge**2
        if rows != self.count(medium):
            raise DataFailure(
                "media_mismatch",
                f"a picture of {medium.size} pixels has {self.count(medium)} placeholders and {rows} rows of features",
            )
        return {"pixel_values": processed["pixel_values"], "grid": processed["image_grid_thw"]}

    def encode(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        return list(self._seen(model, inputs).pooler_output)

    def _seen(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> Any:
        """Returns the outputs of transformers' tower, split by images."""
        parts: Any = model.model
        device = parts.visual.patch_embed.proj.weight.device
        pixels, grids = (torch.cat([image[name] for image in inputs]).to(device) for name in ("pixel_values", "grid"))
        return parts.get_image_features(pixels, grids)

    def positions(self, ids: torch.Tensor, media: torch.Tensor, found: Sequence[Medium]) -> torch.Tensor:
        """Returns ``[S, 3]`` as transformers' ``get_rope_index``: an image's rows and columns are counted from its position,
        and the text after it continues at that position plus the larger of the two counts."""
        grids = {medium.number: self.grid(medium) for medium in found}
        parts, start = [torch.zeros(0, 3, dtype=torch.int64)], 0
        numbers, lengths = media.unique_consecutive(return_counts=True)
        for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True):
            if number == 0:
                parts.append((start + torch.arange(length))[:, None].expand(-1, 3))
                start += length
                continue
            rows, columns = grids[number]
            block = torch.cartesian_prod(torch.zeros(1, dtype=torch.int64), torch.arange(rows), torch.arange(columns))
            for begin in range(0, length, rows * columns):  # the same image may follow directly again
                parts.append(start + block[: length - begin])
                start += max(rows, columns)
        return torch.cat(parts)


class Qwen3VL(QwenVL):
    """A tower with learned positions, and a merger for each depth whose features are used (DeepStack, arXiv:2406.04334)."""

    model_types = ("qwen3_vl",)
    towers: ClassVar = {
        "vision": tuple(f"model.visual.{part}." for part in ("patch_embed", "pos_embed", "blocks")),
        "connector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
    }
    stored = ()

    def __init__(self, folder: Path, config: Any):
        super().__init__(folder, config)
        self.layers_fed = len(config.vision_config.deepstack_visual_indexes)
        layers = config.text_config.num_hidden_layers
        if self.layers_fed >= layers:
            raise ConfigError(
                f"config.json of {folder} adds features after {self.layers_fed} layers (deepstack_visual_indexes), and the "
                f"language model has {layers} layers; features after the last layer are not supported"
            )

    def encode(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        output = self._seen(model, inputs)
        return [torch.cat(depths, dim=-1) for depths in zip(output.pooler_output, *output.deepstack_features, strict=True)]
