"""Tokenizers, and what to say when they are missing."""

import contextlib
import copy
from pathlib import Path
from types import TracebackType

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tandem.config.errors import ConfigError
from tandem.models.foreign import UNREADABLE, error_words, read_hf_config, refuse_absurd

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Code that comes with it is not run, and nobody is asked whether it may.

    Raises:
        ConfigError: the folder has none, it cannot be read, or it wants code of its own.
    """
    if not any((folder / name).is_file() for name in _FILES):
        raise ConfigError(
            f"model folder {folder} has no tokenizer ({' or '.join(_FILES[:2])}); "
            "copy the tokenizer files of the base model into it"
        )
    try:
        refuse_absurd(folder)
        with _PlainErrors():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except UNREADABLE as error:
        raise ConfigError(f"the tokenizer in {folder} cannot be read: {error_words(error)}") from error


class _PlainErrors(contextlib.AbstractContextManager[None]):
    """The library in Rust below raises `Exception` itself, and no kind of its own; that becomes a ValueError."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is Exception:
            raise ValueError(str(error)) from error


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Passes if the tokenizer can turn messages into a prompt.

    Raises:
        ConfigError: it has no chat template.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template, so messages cannot become "
            "prompts; use an instruction-tuned model, or put a chat_template.jinja into the model folder"
        )


def save_classifier_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the tokenizer beside a saved classifier, padding with the token that the classifier takes for padding.

    With another one, such as the usual end of a text, transformers would score the padding of a row.
    """
    own = copy.deepcopy(tokenizer)
    own.pad_token = own.convert_ids_to_tokens(read_hf_config(folder).pad_token_id)
    own.save_pretrained(folder)
