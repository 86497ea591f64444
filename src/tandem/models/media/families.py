"""The media families there are, by ``model_type``."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tandem.config.errors import ConfigError
from tandem.models.attention import NAME
from tandem.models.foreign import UNREADABLE, error_words, no_progress_bars, no_report, read_hf_config
from tandem.models.media.family import MediaFamily
from tandem.models.media.idefics3 import Idefics3

FAMILIES: tuple[type[MediaFamily], ...] = (Idefics3,)


def media_types() -> tuple[str, ...]:
    """``model_type`` of the media models that work."""
    return tuple(kind for family in FAMILIES for kind in family.model_types)


def family_class(config: Any) -> type[MediaFamily] | None:
    """The family of a configuration of transformers; None for a model that reads text alone, or one that is not known."""
    return next((family for family in FAMILIES if config.model_type in family.model_types), None)


def family_of(folder: Path, config: Any = None) -> MediaFamily | None:
    """The family of the model in ``folder``; None for one that reads text alone. ``config``: the folder's, if it was read.

    Raises:
        ConfigError: its processor's settings are missing, or not exact here.
    """
    config = config or read_hf_config(folder)
    kind = family_class(config)
    return None if kind is None else kind(folder, config)


def opener(family: MediaFamily | None) -> tuple[Any, str | dict[str, str]]:
    """The class of transformers that opens a model, and the attention that it is opened with: packed in the language model
    alone."""
    if family is None:
        return transformers.AutoModelForCausalLM, NAME
    return getattr(transformers, family.opened_by), {"text_config": NAME}


def open_tower(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """A media model of transformers for `MediaFamily.features` alone: its language model has no layers and one embedding.

    Raises:
        ConfigError: the weights cannot be read.
    """
    config = read_hf_config(folder)
    family = family_class(config)
    assert family is not None, f"{folder} holds no media model"
    text = text_config(config)
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    kind = getattr(transformers, family.opened_by)
    try:
        with no_progress_bars(), no_report():
            model = kind.from_pretrained(
                folder, config=config, dtype=dtype, trust_remote_code=False, ignore_mismatched_sizes=True
            )
    except UNREADABLE as error:
        raise ConfigError(f"the weights in {folder} cannot be read: {error_words(error)}") from error
    return model.to(device).eval()


def text_config(config: Any) -> Any:
    """The configuration of the language model of a media model; any other as it is."""
    return config if family_class(config) is None else config.text_config
