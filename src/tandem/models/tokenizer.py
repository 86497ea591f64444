"""Tokenizers, and what to say when they are missing."""

import contextlib
import copy
import logging
import math
import shutil
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, utils

from tandem.api.chat_template import template_of
from tandem.api.weight_files import refuse_placeholder
from tandem.config.data import WHERE
from tandem.config.errors import ConfigError
from tandem.models.foreign import UNREADABLE, error_words, read_hf_config, refuse_absurd
from tandem.models.media.families import family_of
from tandem.models.media.family import MediaFamily
from tandem.models.media.settings import FILES

log = logging.getLogger(__name__)

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(folder: Path, *, chats: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Code that comes with it is not run, and nobody is asked whether it may. ``chats``: it
    is for conversations.

    Raises:
        ConfigError: the folder has none, it cannot be read, it wants code of its own, or has no chat template for chats.
    """
    files = [file for file in map(folder.joinpath, _FILES) if file.is_file()]
    if not files:
        raise ConfigError(
            f"model folder {folder} has no tokenizer ({' or '.join(_FILES[:2])}); "
            "copy the tokenizer files of the base model into it"
        )
    for file in files:
        refuse_placeholder(file)
    if files[0].name == "tokenizer.model":  # without tokenizer.json; transformers itself would name the wrong library
        needed = ("sentencepiece", "protobuf") if files[0].read_bytes()[:1] == b"\n" else ("tiktoken",)
        missing = [name for name in needed if not getattr(utils, f"is_{name}_available")()]
        if missing:
            raise ConfigError(
                f"the tokenizer in {folder} is a tokenizer.model without tokenizer.json, and reading it needs a library "
                f"that is not installed: pip install {' '.join(missing)}"
            )
    try:
        refuse_absurd(folder)
        with _PlainErrors():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except UNREADABLE as error:
        raise ConfigError(f"the tokenizer in {folder} cannot be read: {error_words(error)}") from error
    if (folder / "config.json").is_file():
        check_vocabulary(tokenizer, folder)
        _add_family(tokenizer, folder)
    if chats:
        check_chat_template(tokenizer)
    return tokenizer


def _add_family(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Gives the tokenizer of a media model its way with media, as ``media``; see `tandem.api.media.reader_of`."""
    family = family_of(folder)
    if family is None:
        return
    for kind in family.kinds:
        marker, token = family.marker(kind), tokenizer.convert_tokens_to_ids(family.marker(kind))
        if token != family.placeholder(kind):
            raise ConfigError(
                f"the tokenizer in {folder} has token {token} for {marker}, and config.json there "
                f"{family.placeholder(kind)}: they are of different models"
            )
    tokenizer.media = family


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, folder: Path, rows: Iterable[Mapping[str, Any]] = ()) -> None:
    """Passes if the model in ``folder`` has an embedding for each token that a run will use.

    Published models (Gemma 3 1B, CodeLlama 34B) come with a few added tokens more than embeddings, which do no harm until a
    text has one. ``rows``: those of the run; they are read only where there are such tokens.

    Raises:
        ConfigError: the tokenizer itself, its chat template or a row uses a token without an embedding.
    """
    config, numbers = read_hf_config(folder).get_text_config(), tokenizer.get_vocab()
    size = getattr(config, "vocab_size", math.inf)  # a kind of model without one is refused by its name elsewhere
    beyond = {token for token, number in numbers.items() if number >= size}
    if not beyond:
        return
    known = f"the tokenizer in {folder} has {max(numbers.values()) + 1} tokens, the model there {size} embeddings"
    texts = [
        ("its vocabulary", " ".join(beyond - tokenizer.get_added_vocab().keys())),
        ("the begin, end or unknown token", f"{tokenizer.bos_token} {tokenizer.eos_token} {tokenizer.unk_token}"),
        ("the chat template", str(tokenizer.chat_template)),
    ]
    for where, text in chain(texts, ((row.get(WHERE, "a row"), str(row)) for row in rows)):
        for used in sorted(token for token in beyond if token in text):
            raise ConfigError(
                f"{known}, and {where} uses {used!r} (token {numbers[used]}), which has none. Take the tokenizer that the "
                f"model came with, or give the model more: model.resize_token_embeddings({max(numbers.values()) + 1}), then "
                "save_pretrained"
            )
    if rows:
        log.warning("%s; no row uses one that has none, such as %r", known, min(beyond))


class _PlainErrors(contextlib.AbstractContextManager[None]):
    """The library in Rust below raises `Exception` itself, and no kind of its own; that becomes a ValueError."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is Exception:
            raise ValueError(str(error)) from error


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Passes if the tokenizer can turn messages into a prompt.

    Raises:
        ConfigError: it has no chat template, or one that cannot be read.
    """
    name = tokenizer.name_or_path or "this model"
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {name} has no chat template, so messages cannot become "
            "prompts; use an instruction-tuned model, or put a chat_template.jinja into the model folder"
        )
    try:
        template_of(tokenizer).variables  # noqa: B018 read once, here
    except TemplateError as error:
        raise ConfigError(f"the chat template of {name} cannot be read: {error}") from error


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the tokenizer beside a saved model; of a media model the settings of its processor too, as they were."""
    tokenizer.save_pretrained(folder)
    family: MediaFamily | None = getattr(tokenizer, "media", None)
    for file in () if family is None else map(family.folder.joinpath, FILES):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


def save_classifier_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the tokenizer beside a saved classifier, padding with the token that the classifier takes for padding.

    With another one, such as the usual end of a text, transformers would score the padding of a row.
    """
    own = tokenizer
    if getattr(tokenizer, "media", None) is None:  # of media models transformers has no classifier
        own = copy.deepcopy(tokenizer)
        own.pad_token = own.convert_ids_to_tokens(read_hf_config(folder).pad_token_id)
    save_tokenizer(own, folder)
