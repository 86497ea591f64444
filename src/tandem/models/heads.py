"""The scalar head: one number a token, which a critic reads as a value and a reward model as a score.

On disk it is a Hugging Face sequence classifier with one label, whose head is called ``score``.
"""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForTokenClassification, PretrainedConfig

from tandem.api.engines import Outputs
from tandem.config.errors import ConfigError
from tandem.models.foreign import UNREADABLE, error_words, read_weights
from tandem.models.layout import TokenLayout
from tandem.models.media.families import classifier_class, family_of, opener
from tandem.models.media.family import MediaFamily
from tandem.models.packed import PackedCausalLM, PackedModel
from tandem.models.stopping import as_list, stop_ids

HEAD = "score.weight"
"""Name of the head's only tensor, ``[1, H]``: it has no bias."""


ClassLabel = str | int
"""The name of a class, or its number."""


class PackedScalarModel(PackedModel):
    """A transformers sequence classifier, read at every token. ``chosen``: of one with several classes, the number of the
    class whose log-odds against all others are the score; None where it has one label."""

    def __init__(self, model: nn.Module, chosen: int | None = None, family: MediaFamily | None = None):
        """``model``, ``family``: as `PackedCausalLM` takes them, with a head called ``score``."""
        super().__init__(model, family)
        self.chosen = chosen

    def forward(self, layout: TokenLayout) -> Outputs:
        """``scores [T]`` float32: position t holds what the head reads from the state *after* token t, for every token.

        ``logprobs`` is empty: no logits are computed.
        """
        states, head = self.hidden(layout), self.model.score
        if self.chosen is not None:
            return Outputs(states.new_zeros(0), scores=self.place(log_odds(states, head, self.chosen), layout))
        scores = self.read_scalar(states, head.weight, layout)
        return Outputs(states.new_zeros(0), scores=scores if head.bias is None else scores + head.bias.float())


def log_odds(states: torch.Tensor, head: nn.Linear, chosen: int) -> torch.Tensor:
    """The log-odds of a class against all others, log p - log(1 - p), ``[C]`` float32, from ``states [C, H]``."""
    logits = states.float() @ head.weight.float().T  # [C, K]
    if head.bias is not None:
        logits = logits + head.bias.float()
    others = [number for number in range(logits.shape[1]) if number != chosen]
    return logits[:, chosen] - logits[:, others].logsumexp(-1)


class PackedActorCritic(PackedCausalLM):
    """A causal language model with a second head: the value after each token, from the same states."""

    def __init__(self, model: nn.Module, *, chunk_tokens: int = 1024, family: MediaFamily | None = None):
        """``model``, ``family``: as `PackedCausalLM` takes them; the value head begins at 0."""
        super().__init__(model, chunk_tokens=chunk_tokens, family=family)
        weight = model.get_input_embeddings().weight
        self.value = nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.value.weight)

    def forward(self, layout: TokenLayout, entropy: bool = False) -> Outputs:
        """`PackedCausalLM.forward`, with ``scores [T]`` as `PackedScalarModel.forward` gives them."""
        states = self.hidden(layout)
        outputs = self.predict(states, layout, entropy)
        return outputs._replace(scores=self.read_scalar(states, self.value.weight, layout))


def is_classifier(config: PretrainedConfig) -> bool:
    """True if a folder holds a classifier of sequences or tokens; else its head is another, or there is none."""
    return is_token_classifier(config) or any(
        name.endswith("ForSequenceClassification") for name in config.architectures or ()
    )


def is_token_classifier(config: PretrainedConfig) -> bool:
    """True if a folder holds a classifier of tokens, the form of many process reward models."""
    return any(name.endswith("ForTokenClassification") for name in config.architectures or ())


def refuse_classifier(folder: Path, config: PretrainedConfig) -> None:
    """Passes if a folder may hold a language model. transformers would open a classifier as one, with a head made up anew.

    Raises:
        ConfigError: it is a sequence classifier.
    """
    if is_classifier(config):
        what = "token" if is_token_classifier(config) else "sequence"
        raise ConfigError(
            f"{folder} holds a {what} classifier ({', '.join(config.architectures or ())}), such as a reward model or a "
            "critic: it scores texts and cannot write any; give the folder of a language model"
        )


def read_classifier(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    class_label: ClassLabel | None = None,
) -> PackedScalarModel:
    """A transformers classifier that gives one number a token; its head is 0 where the folder has none. Of a token
    classifier of two labels, the head is the log-odds of its last label. ``device``: see `read_weights`; ``class_label``:
    see `prepare_classifier`.

    Raises:
        ConfigError: what `prepare_classifier` refuses, or weights that are missing or cannot be read.
    """
    labels, tokens = config.num_labels, is_token_classifier(config)
    chosen = None if class_label is None else class_number(folder, config, class_label)
    brings_head, padding = prepare_classifier(folder, config, class_label)
    config.num_labels = labels if tokens or chosen is not None else 1
    family = family_of(folder, config)
    kind, attention = AutoModelForTokenClassification if tokens else classifier_class(config), opener(family)[1]
    model = read_weights(kind, folder, config, dtype, device, () if brings_head else (HEAD,), attention)
    if tokens and chosen is None:
        model.score = _log_odds(model.score)
    if not brings_head:
        nn.init.zeros_(model.score.weight)
    if family is None:  # transformers has no classifier of media models that would read it
        model.config.pad_token_id = padding
    packed = PackedScalarModel(model, chosen, family)
    # a packed batch has no padding; left as it is, the embedding of that token would get no gradient after a reload
    packed.decoder.embed_tokens.padding_idx = None
    return packed


def _log_odds(head: nn.Linear) -> nn.Linear:
    """One number from a head of one label, which it is, or of two: by how much the second one is likelier."""
    found = nn.Linear(head.in_features, 1, device=head.weight.device, dtype=head.weight.dtype)
    sign = torch.tensor([[1.0]] if head.out_features == 1 else [[-1.0, 1.0]], device=head.weight.device)
    with torch.no_grad():
        found.weight.copy_(sign @ head.weight.float())
        found.bias.copy_((sign @ head.bias.float()) if head.bias is not None else torch.zeros(1))
    return found


def class_number(folder: Path, config: PretrainedConfig, class_label: ClassLabel) -> int:
    """The number of a class of the classifier in ``folder``, which is given by its name or its number.

    Raises:
        ConfigError: it has one label or none, or no such class; lists those that it has.
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
                f"{folder} has a class {class_label} ({names[class_label]}), and another one that is called {class_label}: "
                f"say which by its name, class_label='{names[class_label]}' or class_label='{class_label}'"
            )
        return class_label
    raise ConfigError(
        f"{folder} has no class_label={class_label}; its classes are "
        + ", ".join(f"{number} ({name})" for number, name in enumerate(names))
    )


def prepare_classifier(folder: Path, config: PretrainedConfig, class_label: ClassLabel | None = None) -> tuple[bool, int]:
    """Makes ``config`` that of a classifier with one label. Returns whether the folder has its head, and its padding token.

    ``class_label``: the class that is the score, of a classifier with several; then its labels stay.

    Raises:
        ConfigError: it has more labels and none is chosen, no such class, or no usable padding token.
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
    """The token that pads rows in transformers, where a classifier scores the last token that is *not* padding.

    So it must be one that no text ends with: the configuration's own if that is so, else the beginning of a text, else
    another special token of the tokenizer.

    Raises:
        ConfigError: all of them end texts, or there are none.
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
    """Those of a folder's tokenizer, the ones made for padding first (Qwen begins and ends texts with the same token)."""
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
