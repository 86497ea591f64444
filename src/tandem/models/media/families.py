"""Finds the family of a media model by its ``model_type``, and the transformers classes that open it."""

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from tandem.models.attention import NAME
from tandem.models.foreign import no_report, read_hf_config
from tandem.models.media.family import MediaFamily, tower_matrices
from tandem.models.media.idefics3 import Idefics3
from tandem.models.media.llava import Llava
from tandem.models.media.qwen_audio import QwenAudio
from tandem.models.media.qwen_vl import Qwen3VL, QwenVL
from tandem.models.shape import TowerSize

FAMILIES: tuple[type[MediaFamily], ...] = (Idefics3, Llava, QwenVL, Qwen3VL, QwenAudio)


def media_types() -> tuple[str, ...]:
    """Returns the ``model_type`` of all supported media models."""
    return tuple(kind for family in FAMILIES for kind in family.model_types)


def family_class(config: Any) -> type[MediaFamily] | None:
    """Returns the family of a transformers configuration; None for a text-only or unknown model."""
    return next((family for family in FAMILIES if config.model_type in family.model_types), None)


def family_of(folder: Path, config: Any = None) -> MediaFamily | None:
    """Returns the family of the model in ``folder``; None for a text-only model. ``config``: the folder's, if already read.

    Raises:
        ConfigError: the settings of the model's processor are missing or not supported.
    """
    config = config or read_hf_config(folder)
    kind = family_class(config)
    return None if kind is None else kind(folder, config)


def tower_sizes(config: Any) -> tuple[TowerSize, ...]:
    """Returns the sizes of the towers of a transformers configuration; empty for a text-only model."""
    family = family_class(config)
    if family is None:
        return ()
    with no_report(), torch.device("meta"):
        model = transformers.AutoModelForMultimodalLM.from_config(config, trust_remote_code=False)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return tuple(
        TowerSize(
            tower,
            sum(size for name, size in sizes.items() if name.startswith(prefixes)),
            tuple((path, layer.in_features, layer.out_features) for path, layer in tower_matrices(family, model, [tower])),
        )
        for tower, prefixes in family.towers.items()
    )


def opener(family: MediaFamily | None) -> tuple[Any, str | dict[str, str]]:
    """Returns the transformers class that opens a model, and its ``attn_implementation``: packed attention only in the
    language model."""
    if family is None:
        return transformers.AutoModelForCausalLM, NAME
    return transformers.AutoModelForMultimodalLM, {"text_config": NAME}


def text_config(config: Any) -> Any:
    """Returns the language model's configuration of a media model; any other configuration unchanged."""
    return config if family_class(config) is None else config.text_config


def classifier_class(config: Any) -> Any:
    """Returns the transformers class of sequence classifiers. transformers has none for media models: for them a class is
    made whose head ``score`` replaces ``lm_head``."""
    if family_class(config) is None:
        return transformers.AutoModelForSequenceClassification
    return _media_classifier(transformers.models.auto.modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)])


@functools.cache
def _media_classifier(generates: type[Any]) -> type[Any]:
    def init(self: Any, config: Any) -> None:
        generates.__init__(self, config)
        del self.lm_head
        self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)

    def from_config(cls: Any, config: Any, *, trust_remote_code: bool = False, **settings: Any) -> Any:
        return cls._from_config(config, **settings)

    attributes = {
        "__init__": init,
        "from_config": classmethod(from_config),
        "get_output_embeddings": lambda self: None,
        "_tied_weights_keys": {},  # there is no lm_head to be tied to the embedding
        "__module__": generates.__module__,  # transformers looks up related classes in this module
    }
    name = generates.__name__.replace("ForConditionalGeneration", "ForSequenceClassification")
    renamed = get_checkpoint_conversion_mapping(generates.__name__)  # old tensor names → new ones, registered by class name
    if renamed is not None:
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return type(name, (generates,), attributes)
