"""The media families there are, by ``model_type``."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from tandem.models.attention import NAME
from tandem.models.foreign import no_report, read_hf_config
from tandem.models.media.family import MediaFamily
from tandem.models.media.features import tower_matrices
from tandem.models.media.idefics3 import Idefics3
from tandem.models.media.llava import Llava
from tandem.models.media.qwen3_vl import Qwen3VL
from tandem.models.media.qwen_audio import QwenAudio
from tandem.models.media.qwen_vl import QwenVL

FAMILIES: tuple[type[MediaFamily], ...] = (Idefics3, Llava, QwenVL, Qwen3VL, QwenAudio)


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


class TowerSize(NamedTuple):
    """A part of a media model that sees or hears."""

    name: str
    """The name that ``actor.freeze`` knows."""

    parameters: int
    matrices: tuple[tuple[str, int, int], ...]
    """Path, inputs and outputs of each of its matrices that can have an adapter."""


def tower_sizes(config: Any) -> tuple[TowerSize, ...]:
    """The towers of a configuration of transformers; none of a model that reads text alone."""
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
            tuple((path, one.in_features, one.out_features) for path, one in tower_matrices(family, model, [tower])),
        )
        for tower, prefixes in family.towers.items()
    )


def opener(family: MediaFamily | None) -> tuple[Any, str | dict[str, str]]:
    """The class of transformers that opens a model, and the attention that it is opened with: packed in the language model
    alone."""
    if family is None:
        return transformers.AutoModelForCausalLM, NAME
    return transformers.AutoModelForMultimodalLM, {"text_config": NAME}


def text_config(config: Any) -> Any:
    """The configuration of the language model of a media model; any other as it is."""
    return config if family_class(config) is None else config.text_config


def classifier_class(config: Any) -> Any:
    """The class of transformers of sequence classifiers; for a media model, of which transformers has none, one that puts a
    head called ``score`` in the place of ``lm_head``, called after its class."""
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

    own = {
        "__init__": init,
        "from_config": classmethod(from_config),
        "get_output_embeddings": lambda self: None,
        "_tied_weights_keys": {},  # there is no lm_head to be the embedding
        "__module__": generates.__module__,  # where transformers looks for what a model needs
    }
    name = generates.__name__.replace("ForConditionalGeneration", "ForSequenceClassification")
    renamed = get_checkpoint_conversion_mapping(generates.__name__)  # of older files, by the name of the class
    if renamed is not None:
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return type(name, (generates,), own)
