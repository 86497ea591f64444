"""Qwen2-Audio: sounds as spectrograms of a fixed length, of which the part that sounds becomes placeholders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.masking_utils import create_bidirectional_mask

from tandem.api.failures import DataFailure
from tandem.api.media import MediaKind, Medium
from tandem.config.errors import ConfigError
from tandem.media import store
from tandem.models.media.family import MediaFamily
from tandem.models.media.settings import read_processor


class QwenAudio(MediaFamily):
    """Whisper's encoder, a projector, and a language model with plain positions."""

    model_types = ("qwen2_audio",)
    kinds = ("audio",)
    text_prefix = "model.language_model."
    stored = (
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        *((f"{part}.", f"model.{part}.") for part in ("audio_tower", "multi_modal_projector")),
    )
    fixed = ("model.audio_tower.embed_positions.",)
    connector = ("model.multi_modal_projector.",)
    towers: ClassVar = {"audio": ("model.audio_tower.",), "connector": connector}

    def __init__(self, folder: Path, config: Any):
        self.folder = folder
        self._audio_token: int = config.audio_token_index
        own = self.processor = read_processor("WhisperFeatureExtractor", folder)
        if getattr(config, "tie_word_embeddings", False):
            raise ConfigError(
                f"config.json of {folder} ties the head to the embedding, which {config.model_type} never does"
            )
        wanted = 2 * config.audio_config.max_source_positions
        if own.sampling_rate != store.RATE or own.n_samples != wanted * own.hop_length:
            raise ConfigError(
                f"the feature extractor in {folder} makes {own.n_samples / own.hop_length:g} frames at {own.sampling_rate} "
                f"samples a second, and the model hears {wanted} at {store.RATE}: set chunk_length (in seconds) and "
                "sampling_rate to what the model was trained with"
            )

    def marker(self, kind: MediaKind) -> str:
        return "<|AUDIO|>"

    def placeholder(self, kind: MediaKind) -> int:
        return self._audio_token

    def count(self, medium: Medium) -> int:
        samples, own = medium.size[0], self.processor
        if samples > own.n_samples:
            raise DataFailure(
                "media_too_large",
                f"a sound of {samples / store.RATE:.2f} s is longer than the {own.n_samples / store.RATE:g} s that it hears",
            )
        rows = _rows(-(-samples // own.hop_length))
        if rows < 1:
            raise DataFailure("media_refused", f"a sound of {samples} samples is too short to be heard")
        return rows

    def expansion(self, medium: Medium) -> str:
        return self.marker(medium.kind) * self.count(medium)

    def inputs(self, medium: Medium) -> dict[str, torch.Tensor]:
        """``input_features [1, bins, frames]`` float32, and the ``frames [1]`` that sound."""
        made = self.processor(
            store.sound(medium.number),
            sampling_rate=store.RATE,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        frames = made["attention_mask"].sum(-1)
        if _rows(int(frames)) != self.count(medium):
            raise DataFailure(
                "media_mismatch",
                f"a sound of {medium.size[0]} samples has {self.count(medium)} placeholders and {_rows(int(frames))} "
                "rows of features",
            )
        return {"input_features": made["input_features"], "frames": frames}

    def encode(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        parts: Any = model.model
        tower = parts.audio_tower
        like = tower.conv1.weight
        spectra = torch.cat([one["input_features"] for one in inputs]).to(like.device, like.dtype)
        frames = [int(one["frames"]) for one in inputs]
        places = torch.arange((spectra.shape[-1] - 2) // 2 + 1)
        sounds = torch.stack([places < (count - 1) // 2 + 1 for count in frames]).to(like.device)
        mask = create_bidirectional_mask(
            config=tower.config, inputs_embeds=like.new_zeros(*sounds.shape, 1), attention_mask=sounds.long()
        )
        states = tower(spectra, attention_mask=mask).last_hidden_state
        return [own[: _rows(count)] for own, count in zip(states, frames, strict=True)]

    def connect(self, model: nn.Module, encoded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts: Any = model.model
        return list(parts.multi_modal_projector(torch.cat(list(encoded))).split([len(states) for states in encoded]))


def _rows(frames: int) -> int:
    """Rows of features of so many frames that sound: a convolution and a pooling halve them."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1
