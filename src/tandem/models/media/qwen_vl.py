"""Qwen2-VL and Qwen2.5-VL: pictures of any size, and rotary positions in time, height and width."""

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
from tandem.models.media.family import MediaFamily
from tandem.models.media.settings import read_processor

MAX_RATIO = 200
"""The processor takes no picture whose longer edge is more times the shorter one."""


class QwenVL(MediaFamily):
    """A tower whose patches are joined by a merger, two by two; a picture keeps its shape."""

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
        own = self.processor = read_processor("Qwen2VLImageProcessorPil", folder)
        vision = config.vision_config
        self._patch, self._merge = vision.patch_size, vision.spatial_merge_size
        settings = (own.patch_size, own.merge_size, own.temporal_patch_size)
        wanted = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        if settings != wanted or not own.do_resize:
            raise ConfigError(
                f"the processor in {folder} makes patches of {settings} (pixels, merged, in time; do_resize="
                f"{own.do_resize}) and the model has {wanted}: set them to the model's, and do_resize=true"
            )
        self._pixels = range(own.size["shortest_edge"], own.size["longest_edge"] + 1)

    def marker(self, kind: MediaKind) -> str:
        return "<|image_pad|>"

    def placeholder(self, kind: MediaKind) -> int:
        return self._image_token

    def grid(self, medium: Medium) -> tuple[int, int]:
        """Rows and columns of features of a picture.

        Raises:
            DataFailure: it is more than 200 times as long as it is wide.
        """
        width, height = medium.size
        if max(width, height) > MAX_RATIO * min(width, height):
            raise DataFailure("media_refused", f"a picture of {width} × {height} pixels is longer than {MAX_RATIO} to 1")
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
        """``pixel_values [patches, numbers]`` float32, ``grid [1, 3]`` of patches in time, height and width."""
        made = self.processor(images=[Image.fromarray(store.image(medium.number))], return_tensors="pt")
        rows = int(made["image_grid_thw"].prod()) // self._merge**2
        if rows != self.count(medium):
            raise DataFailure(
                "media_mismatch",
                f"a picture of {medium.size} pixels has {self.count(medium)} placeholders and {rows} rows of features",
            )
        return {"pixel_values": made["pixel_values"], "grid": made["image_grid_thw"]}

    def encode(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        return list(self._seen(model, inputs).pooler_output)

    def _seen(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> Any:
        """The outputs of transformers' tower, split by pictures."""
        parts: Any = model.model
        device = parts.visual.patch_embed.proj.weight.device
        pixels, grids = (torch.cat([one[name] for one in inputs]).to(device) for name in ("pixel_values", "grid"))
        return parts.get_image_features(pixels, grids)

    def positions(self, ids: torch.Tensor, media: torch.Tensor, found: Sequence[Medium]) -> torch.Tensor:
        """``[S, 3]``, as transformers' ``get_rope_index`` has them: a picture's rows and columns count from where it
        stands, and the text behind it goes on from the larger of its edges."""
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
            for begin in range(0, length, rows * columns):  # the same picture may stand there again
                parts.append(start + block[: length - begin])
                start += max(rows, columns)
        return torch.cat(parts)
