"""LLaVA 1.5 and similar models: each image becomes one square, and all have the same number of placeholders."""

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

_PROCESSORS = {"clip_vision_model": "CLIPImageProcessorPil", "siglip_vision_model": "SiglipImageProcessorPil"}


class Llava(MediaFamily):
    """A CLIP or SigLIP tower of which hidden states before the last layer are used, a projector, and a language model with
    one-dimensional positions."""

    model_types = ("llava",)
    kinds = ("image",)
    text_prefix = "model.language_model."
    stored = (
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("vision_tower.vision_model.", "model.vision_tower."),  # names in older files
        *((f"{part}.", f"model.{part}.") for part in ("vision_tower", "multi_modal_projector")),
    )
    connector = ("model.multi_modal_projector.",)
    towers: ClassVar = {"vision": ("model.vision_tower.",), "connector": connector}

    def __init__(self, folder: Path, config: Any):
        self.folder = folder
        self._image_token: int = config.image_token_id
        vision, layer = config.vision_config, config.vision_feature_layer
        if vision.model_type not in _PROCESSORS:
            raise ConfigError(f"the tower in {folder} is a {vision.model_type}; LLaVA works with {', '.join(_PROCESSORS)}")
        self.processor = read_processor(_PROCESSORS[vision.model_type], folder)
        depth = vision.num_hidden_layers
        self._layers = [number % (depth + 1) for number in ([layer] if isinstance(layer, int) else layer)]
        self._dropped = int(config.vision_feature_select_strategy == "default")  # CLIP's class token
        class_tokens = int(vision.model_type == "clip_vision_model")
        self._rows = (vision.image_size // vision.patch_size) ** 2 + class_tokens - self._dropped
        self.fixed = tuple(  # these weights are not used
            f"model.vision_tower.{part}."
            for part in ("post_layernorm", "head", *(f"encoder.layers.{n}" for n in range(max(self._layers), depth)))
        )
        settings, processor = settings_of(folder), self.processor
        square = getattr(processor, "crop_size", None) if getattr(processor, "do_center_crop", None) else processor.size
        sides = {square.get("height"), square.get("width")} if square else set()
        added = settings.get("num_additional_image_tokens", class_tokens)
        strategy = settings.get("vision_feature_select_strategy") or config.vision_feature_select_strategy
        patch = settings.get("patch_size") or vision.patch_size
        if sides != {vision.image_size} or (added, strategy, patch) != (
            class_tokens,
            config.vision_feature_select_strategy,
            vision.patch_size,
        ):
            raise ConfigError(
                f"the processor in {folder} makes squares of {square} with patches of {patch}, {added} additional tokens "
                f"and vision_feature_select_strategy={strategy}; the model has {vision.image_size} pixels with patches of "
                f"{vision.patch_size}, {class_tokens} additional tokens and {config.vision_feature_select_strategy}: set "
                "them to the values with which the model was trained"
            )

    def marker(self, kind: MediaKind) -> str:
        return "<image>"

    def placeholder(self, kind: MediaKind) -> int:
        return self._image_token

    def count(self, medium: Medium) -> int:
        return self._rows

    def expansion(self, medium: Medium) -> str:
        return self.marker(medium.kind) * self._rows

    def inputs(self, medium: Medium) -> dict[str, torch.Tensor]:
        """Returns ``pixel_values [1, 3, E, E]``, float32."""
        picture = Image.fromarray(store.image(medium.number))
        try:
            return {"pixel_values": self.processor(images=[picture], return_tensors="pt")["pixel_values"]}
        except ValueError as error:  # an edge would have no pixels
            raise DataFailure("media_refused", f"a picture of {medium.size} pixels cannot be resized: {error}") from error

    def encode(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        tower: Any = model.model.vision_tower  # type: ignore[union-attr]
        like = tower.embeddings.patch_embedding.weight
        pixels = torch.cat([image["pixel_values"] for image in inputs]).to(like.device, like.dtype)
        states = tower(pixel_values=pixels, output_hidden_states=True).hidden_states
        return list(torch.cat([states[layer][:, self._dropped :] for layer in self._layers], -1))

    def connect(self, model: nn.Module, encoded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts: Any = model.model
        return list(parts.multi_modal_projector(torch.stack(list(encoded))))
