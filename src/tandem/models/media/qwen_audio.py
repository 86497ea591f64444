"""Qwen2-Audio: sounds become spectrograms padded to a fixed length, with placeholders for the part that is not padding."""

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
from tandem.models.media.family import MediaFamily, read_processor


class QwenAudio(MediaFamily):
    """Whisper's encoder, a projector, and a language model with one-dimensional positions."""

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
        extractor = self.processor = read_processor("WhisperFeatureExtractor", folder)
        if getattr(config, "tie_word_embeddings", False):
            raise ConfigError(
                f"config.json of {folder} ties the head to the embedding, which {config.model_type} never does"
            )
        expected = 2 * config.audio_config.max_source_positions
        if extractor.sampling_rate != store.RATE or extractor.n_samples != expected * extractor.hop_length:
            raise ConfigError(
                f"the feature extractor in {folder} makes {extractor.n_samples / extractor.hop_length:g} frames at "
                f"{extractor.sampling_rate} samples per second, and the model expects {expected} at {store.RATE}: set "
                "chunk_length (in seconds) and sampling_rate to the values with which the model was trained"
            )

    def marker(self, kind: MediaKind) -> str:
        return "<|AUDIO|>"

    def placeholder(self, kind: MediaKind) -> int:
        return self._audio_token

    def count(self, medium: Medium) -> int:
        samples, extractor = medium.size[0], self.processor
        if samples > extractor.n_samples:
            raise DataFailure(
                "media_too_large",
                f"a sound of {samples / store.RATE:.2f} s is longer than the model's {extractor.n_samples / store.RATE:g} s",
            )
        rows = _rows(-(-samples // extractor.hop_length))
        if rows < 1:
            raise DataFailure("media_refused", f"a sound of {samples} samples is too short for the model")
        return rows

    def expansion(self, medium: Medium) -> str:
        return self.marker(medium.kind) * self.count(medium)

    def inputs(self, medium: Medium) -> dict[str, torch.Tensor]:
        """Returns ``input_features [1, bins, frames]`` float32, and ``frames [1]``, the number of frames without padding."""
        processed = self.processor(
            store.sound(medium.number),
            sampling_rate=store.RATE,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        frames = processed["attention_mask"].sum(-1)
        if _rows(int(frames)) != self.count(medium):
            raise DataFailure(
                "media_mismatch",
                f"a sound of {medium.size[0]} samples has {self.count(medium)} placeholders and {_rows(int(frames))} "
                "rows of features",
            )
        return {"input_features": processed["input_features"], "frames": frames}

    def encode(self, model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        parts: Any = model.model
        tower = parts.audio_tower
        like = tower.conv1.weight
        spectra = torch.cat([sound["input_features"] for sound in inputs]).to(like.device, like.dtype)
        frames = [int(sound["frames"]) for sound in inputs]
        places = torch.arange((spectra.shape[-1] - 2) // 2 + 1)
        sounds = torch.stack([places < (count - 1) // 2 + 1 for count in frames]).to(like.device)
        mask = create_bidirectional_mask(
            config=tower.config, inputs_embeds=like.new_zeros(*sounds.shape, 1), attention_mask=sounds.long()
        )
        states = tower(spectra, attention_mask=mask).last_hidden_state
        return [rows[: _rows(count)] for rows, count in zip(states, frames, strict=True)]

    def connect(self, model: nn.Module, encoded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts: Any = model.model
        return list(parts.multi_modal_projector(torch.cat(list(encoded))).split([len(states) for states in encoded]))


def _rows(frames: int) -> int:
    """Returns the rows of features for this many frames: a convolution and a pooling each halve the number."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1
