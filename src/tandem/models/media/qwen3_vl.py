"""Qwen3-VL: Qwen-VL's pictures and positions, and features of several depths of the tower, which enter several layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tandem.config.errors import ConfigError
from tandem.models.media.qwen_vl import QwenVL


class Qwen3VL(QwenVL):
    """A tower with learnt positions, and a merger for each depth that is read (DeepStack, arXiv:2406.04334)."""

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
                f"config.json of {folder} feeds a picture behind {self.layers_fed} layers (deepstack_visual_indexes), and "
                f"there are {layers}; behind the last one it is not exact here"
            )

    def encode(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        seen = self._seen(model, inputs)
        return [torch.cat(depths, dim=-1) for depths in zip(seen.pooler_output, *seen.deepstack_features, strict=True)]
