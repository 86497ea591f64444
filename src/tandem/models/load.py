"""Opens a model for training: a language model, or one with a scalar head (a critic or a reward model).

On disk, a model with a scalar head is a Hugging Face sequence classifier with one label, whose head is called ``score``.

A model can be made without memory (`open_unfilled`) and then filled from its files piece by piece, while it is sharded over
ranks. A rank thus holds its own part, and for a moment one layer or the embedding, but never the whole model.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForTokenClassification, PretrainedConfig

from tandem.api.activity import did
from tandem.api.weights import stored_entries
from tandem.config.errors import ConfigError
from tandem.models.architecture import Architecture
from tandem.models.catalog import resolve
from tandem.models.foreign import (
    UNREADABLE,
    error_words,
    no_progress_bars,
    no_report,
    read_generation_config,
    read_hf_config,
    read_weights,
)
from tandem.models.media.families import classifier_class, family_class, family_of, opener
from tandem.models.packed import PackedActorCritic, PackedCausalLM, PackedModel, PackedScalarModel
from tandem.models.tensor_parallel import Pieces
from tandem.models.tokenizer import as_list, set_stop_ids, stop_ids

DROPOUT = ("attention_dropout", "dropout", "activation_dropout", "encoder_layerdrop")
"""Settings in transformers' configurations that make a forward pass random."""


HEAD = "score.weight"
"""Name of the head's only tensor, ``[1, H]``; the head has no bias."""


ClassLabel = str | int
"""The name or the number of a class."""


def is_classifier(config: PretrainedConfig) -> bool:
    """Tells whether a configuration is that of a sequence or token classifier."""
    return is_token_classifier(config) or any(
        name.endswith("ForSequenceClassification") for name in config.architectures or ()
    )


def is_token_classifier(config: PretrainedConfig) -> bool:
    """Tells whether a configuration is that of a token classifier, the form of many process reward models."""
    return any(name.endswith("ForTokenClassification") for name in config.architectures or ())


def refuse_classifier(folder: Path, config: PretrainedConfig) -> None:
    """Refuses a classifier where a language model is expected: transformers would open it with a new, random head.

    Raises:
        ConfigError: the model is a sequence or token classifier.
    """
    if is_classifier(config):
        unit = "token" if is_token_classifier(config) else "sequence"
        raise ConfigError(
            f"{folder} holds a {unit} classifier ({', '.join(config.architectures or ())}), such as a reward model or a "
            "critic: it scores texts and cannot write any; give the folder of a language model"
        )


def read_classifier(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    class_label: ClassLabel | None = None,
) -> PackedScalarModel:
    """Opens a transformers classifier with one number per token; without a head in the folder, the head begins at 0. For a
    token classifier with two labels, the number is the log-odds of the second one. ``device``: see `read_weights`;
    ``class_label``: see `prepare_classifier`.

    Raises:
        ConfigError: see `prepare_classifier`; or weights are missing or cannot be read.
    """
    labels, tokens = config.num_labels, is_token_classifier(config)
    chosen = None if class_label is None else class_number(folder, config, class_label)
    brings_head, padding = prepare_classifier(folder, config, class_label)
    config.num_labels = labels if tokens or chosen is not None else 1
    family = family_of(folder, config)
    kind, attention = AutoModelForTokenClassification if tokens else classifier_class(config), opener(family)[1]
    model = read_weights(kind, folder, config, dtype, device, attention, () if brings_head else (HEAD,))
    if tokens and chosen is None:
        model.score = _log_odds(model.score)
    if not brings_head:
        nn.init.zeros_(model.score.weight)
    if family is None:  # transformers has no classifier for media models, which would use it
        model.config.pad_token_id = padding
    packed = PackedScalarModel(model, chosen, family)
    # a packed batch has no padding; otherwise the embedding of the padding token would get no gradient after a reload
    packed.decoder.embed_tokens.padding_idx = None
    return packed


def _log_odds(head: nn.Linear) -> nn.Linear:
    """Returns a head with one output. For one label the output is that of ``head``; for two it is the logit of the second
    label minus the logit of the first."""
    single = nn.Linear(head.in_features, 1, device=head.weight.device, dtype=head.weight.dtype)
    sign = torch.tensor([[1.0]] if head.out_features == 1 else [[-1.0, 1.0]], device=head.weight.device)
    with torch.no_grad():
        single.weight.copy_(sign @ head.weight.float())
        single.bias.copy_((sign @ head.bias.float()) if head.bias is not None else torch.zeros(1))
    return single


def class_number(folder: Path, config: PretrainedConfig, class_label: ClassLabel) -> int:
    """Returns the number of a class of the classifier in ``folder``. ``class_label``: its name or its number.

    Raises:
        ConfigError: the model has at most one label, or not this class; the message lists its classes.
    """
    count = config.num_labels if is_classifier(config) else 1
    names = [str(config.id2label[number]) for number in range(count)]
    if count == 1:
        raise ConfigError(f"{folder} gives one number, so class_label={class_label} chooses nothing: leave it out")
    if class_label in names:
        return names.index(str(class_label))
    if isinstance(class_label, int) and not isinstance(class_label, bool) and 0 <= class_label < count:
        if str(class_label) in names and names.index(str(class_label)) != class_label:
            raise ConfigError(
                f"{folder} has a class {class_label} ({names[class_label]}), and another class is called {class_label}: "
                f"choose one by its name, class_label='{names[class_label]}' or class_label='{class_label}'"
            )
        return class_label
    raise ConfigError(
        f"{folder} has no class_label={class_label}; its classes are "
        + ", ".join(f"{number} ({name})" for number, name in enumerate(names))
    )


def prepare_classifier(folder: Path, config: PretrainedConfig, class_label: ClassLabel | None = None) -> tuple[bool, int]:
    """Changes ``config`` to a classifier with one label. Returns whether the folder has the head, and the padding token.

    ``class_label``: for a classifier with several classes, the class that is the score; its labels are then unchanged.

    Raises:
        ConfigError: the model has several labels and none is chosen, lacks the chosen class, or has no usable padding token.
    """
    brings_head = is_classifier(config)
    if class_label is not None:
        class_number(folder, config, class_label)
        return brings_head, padding_token(folder, config)
    if brings_head and config.num_labels != 1 and not (is_token_classifier(config) and config.num_labels == 2):
        raise ConfigError(
            f"{folder} is a classifier with {config.num_labels} labels ({', '.join(map(str, config.id2label.values()))}); "
            "a reward model or critic has one number, so give a classifier with num_labels=1, a token classifier of "
            "wrong and right steps, or a language model; a reward can be one of the labels: model(path=…, class_label=…), "
            "or --class-label of `tandem serve-reward`"
        )
    config.num_labels = 1
    return brings_head, padding_token(folder, config)


def padding_token(folder: Path, config: PretrainedConfig) -> int:
    """Chooses the padding token for transformers, where a classifier scores the last token that is *not* padding.

    It must be a token with which no text ends: the configuration's padding token, else the begin-of-text token, else another
    special token of the tokenizer.

    Raises:
        ConfigError: texts may end with each of these tokens, or there are none.
    """
    text = config.get_text_config()
    ends = {*as_list(text.eos_token_id), *stop_ids(folder, config)}
    for token in (text.pad_token_id, text.bos_token_id, *_special_tokens(folder)):
        if token is not None and token not in ends and token < text.vocab_size:
            return token
    raise ConfigError(
        f"config.json of {folder} has no padding token that transformers could tell from the end of a text "
        f"(pad_token_id={text.pad_token_id}, bos_token_id={text.bos_token_id}, ends {sorted(ends)}), and its "
        "tokenizer has no other special token; set pad_token_id there to a token that no text ends with"
    )


def _special_tokens(folder: Path) -> list[int]:
    """Returns the special tokens of a folder's tokenizer, padding tokens first (Qwen's begin and end tokens are the
    same)."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return []
    try:
        added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
        special = [token for token in added if token.get("special")]
        first = sorted(special, key=lambda token: ("pad" not in token["content"].lower(), token["id"]))
        return [int(token["id"]) for token in first]
    except UNREADABLE as error:
        raise ConfigError(f"{file} cannot be read: {error_words(error)}") from error


def load_causal_lm(
    path: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    *,
    selective_checkpointing: bool = False,
    chunk_tokens: int = 1024,
    value_head: bool = False,
) -> PackedCausalLM:
    """Opens the model at ``path`` (folder, hub name or built-in name) with packed attention and weights in ``dtype``.

    For the device ``meta`` only the headers of its files are read, to check that it can be opened.

    Dropout is turned off, because a policy's log-probabilities must not be random. ``gradient_checkpointing`` keeps only the
    input of each layer (with ``selective_checkpointing`` also the results of matrix products and attention), and computes
    the rest again in the backward pass. ``value_head``: returns a `PackedActorCritic`, whose second head begins at 0.

    Raises:
        ConfigError: there is no such model, its folder is damaged, weights are missing, it is a classifier, or its
            architecture is not supported.
    """
    folder = resolve(path)
    config = read_config(folder)
    refuse_classifier(folder, config)
    family = family_of(folder, config)
    kind, attention = opener(family)
    model = read_weights(kind, folder, config, dtype, device, attention)
    set_stop_ids(model, folder)
    model.to(device)
    wrapper = PackedActorCritic if value_head else PackedCausalLM
    packed = wrapper(model, chunk_tokens=chunk_tokens, family=family)
    if gradient_checkpointing:
        packed.enable_gradient_checkpointing(selective_checkpointing)
    return packed


def load_scalar_model(
    path: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    *,
    selective_checkpointing: bool = False,
    class_label: ClassLabel | None = None,
) -> PackedScalarModel:
    """Opens the model at ``path`` with a head that computes one number per token: a critic or a reward model.

    A classifier has such a head; for a causal language model the head begins at 0. ``class_label``: for a classifier with
    several classes, the class whose log-odds are the number.

    Raises:
        ConfigError: see `load_causal_lm` (except that classifiers are accepted); or the classifier has several labels and
            none is chosen, or lacks the chosen class.
    """
    folder = resolve(path)
    config = read_config(folder)
    packed = read_classifier(folder, config, dtype, device, class_label)
    packed.model.to(device)
    if gradient_checkpointing:
        packed.enable_gradient_checkpointing(selective_checkpointing)
    return packed


def read_config(folder: Path) -> PretrainedConfig:
    """Returns the configuration of a supported model, with dropout turned off. Raises `ConfigError` for any other model."""
    config = read_hf_config(folder)
    Architecture.from_config(config)  # refuses it before gigabytes are read
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name in DROPOUT:
            if hasattr(part, name):
                setattr(part, name, 0.0)
    return config


PREFIX = "model."
"""The prefix that `PackedModel` adds to the names in files."""


@dataclass(frozen=True)
class Unfilled:
    """A model whose parameters have no memory yet (device ``meta``), and the files with their values."""

    model: PackedModel
    files: Mapping[str, Any]
    """Hugging Face name → the tensor in its file; parameters without an entry begin at 0."""

    device: torch.device

    def fill(self, module: nn.Module, pieces: Pieces | None) -> None:
        """Loads the empty parameters of ``module`` from the files, in their dtype; with ``pieces`` only this rank's piece of
        each."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        filled: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for key, parameter in list(part.named_parameters(recurse=False)):
                if parameter.is_meta:
                    if id(parameter) not in filled:
                        value = self._read(names[id(parameter)], parameter, pieces)
                        filled[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                    setattr(part, key, filled[id(parameter)])  # tied parameters stay tied

    def _read(self, name: str, empty: torch.Tensor, pieces: Pieces | None) -> torch.Tensor:
        did()
        source = self.files.get(name.removeprefix(PREFIX))
        if source is None:
            return torch.zeros(empty.shape, dtype=empty.dtype, device=self.device)
        if pieces is None or name not in pieces.dims:
            tensor = source[:]
        else:
            dim, total = pieces.dims[name]
            start, end = pieces.bounds(total)
            tensor = source[start:end] if dim == 0 else source[:, start:end]
        # copied, because the tensor is a view of the mapped file
        return tensor.to(self.device, empty.dtype, copy=True)


def open_unfilled(
    path: str | os.PathLike[str], device: torch.device, head: str, *, chunk_tokens: int = 1024
) -> Unfilled | None:
    """Makes the model at ``path`` without memory. Returns None if transformers must load it as a whole, because its files do
    not hold each tensor under the name in the model. ``head``: ``lm``, ``scalar`` or ``both``.

    Raises:
        ConfigError: see `load_causal_lm` and `load_scalar_model`.
    """
    folder = resolve(path)
    files = tensors_of(folder)
    if not files:
        return None
    config = read_config(folder)
    may_miss: set[str] = set()
    family = family_of(folder, config)
    kind, attention = opener(family)
    if head == "scalar" and is_token_classifier(config):
        return None  # its head is computed from the one in the file
    if head == "scalar":
        brings_head, padding = prepare_classifier(folder, config)
        if family is None:  # see `read_classifier`
            config.pad_token_id = padding
        may_miss = set() if brings_head else {HEAD}
        if not brings_head:
            files = {name: tensor for name, tensor in files.items() if name != HEAD}
        model = _empty(classifier_class(config), attention, config, folder)
        packed: PackedModel = PackedScalarModel(model, family=family)
        packed.decoder.embed_tokens.padding_idx = None  # see `read_classifier`
    else:
        refuse_classifier(folder, config)
        model = _empty(kind, attention, config, folder)
        model.generation_config = read_generation_config(folder) or model.generation_config
        set_stop_ids(model, folder)
        packed = (PackedActorCritic if head == "both" else PackedCausalLM)(model, chunk_tokens=chunk_tokens, family=family)
    if dict(model.named_parameters()).keys() - files.keys() - may_miss or not _make_buffers(packed, device):
        return None
    return Unfilled(packed, files, device)


def tensors_of(folder: Path) -> dict[str, Any]:
    """Maps each tensor name in the transformers model to a slice of a safetensors file, which is read when it is indexed;
    empty if the folder has no such file. Older names in files of media models are translated.

    Raises:
        ConfigError: see `stored_entries`.
    """
    family = family_class(read_hf_config(folder)) if (folder / "config.json").is_file() else None
    stored = stored_entries(folder)
    opened = {entry.file: safe_open(entry.file, "pt") for entry in stored.values()}
    return {
        name if family is None else family.own_name(name): opened[entry.file].get_slice(name)
        for name, entry in stored.items()
    }


def _empty(kind: Any, attention: str | dict[str, str], config: Any, folder: Path) -> nn.Module:
    try:
        with no_progress_bars(), no_report(), torch.device("meta"):
            model = kind.from_config(config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False)
    except UNREADABLE as error:
        raise ConfigError(f"config.json of {folder} does not describe a model: {error_words(error)}") from error
    if getattr(config, "tie_word_embeddings", False) and hasattr(model, "lm_head"):
        model.lm_head.weight = model.get_input_embeddings().weight
    return model.eval()


def _make_buffers(packed: PackedModel, device: torch.device) -> bool:
    """Computes the buffers that follow from the model's configuration; returns False if the model has any other buffer."""
    model, scale = packed.model, packed.architecture.embedding_scale
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not any(buffer.is_meta for buffer in buffers.values()):
            continue
        if module is packed.decoder.rotary_emb or ("inv_freq" in buffers and hasattr(module, "config")):  # or a tower's
            values = dict(type(module)(module.config).named_buffers(recurse=False))
        elif set(buffers) == {"embed_scale"}:
            values = {"embed_scale": torch.tensor(scale)}
        else:
            return False
        for name in buffers:
            module._buffers[name] = values[name].to(device)
    return True
