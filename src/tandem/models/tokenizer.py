"""Opens and saves tokenizers; finds the tokens that end a completion (those of the model, and the one with which its chat
template ends a reply); checks that a chat template reads the options and messages of a run.
"""

import contextlib
import copy
import logging
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, utils

from tandem.api.chat_template import Messages, render, template_of
from tandem.api.failures import DataFailure
from tandem.api.media import kinds_of, reader_of
from tandem.api.weights import refuse_placeholder
from tandem.config.data import WHERE
from tandem.config.errors import ConfigError, nearest_names
from tandem.media.parts import read_for
from tandem.models.foreign import UNREADABLE, error_words, read_generation_config, read_hf_config, refuse_absurd
from tandem.models.media.families import family_of
from tandem.models.media.family import FILES, MediaFamily

log = logging.getLogger(__name__)

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(folder: Path, *, chats: bool = False) -> PreTrainedTokenizerBase:
    """Opens the tokenizer of a model folder. Code that comes with it is never run, and the user is not asked about it.
    ``chats``: True if a chat template is needed.

    Raises:
        ConfigError: the folder has no tokenizer, it cannot be read or needs its own code, or it lacks a chat template.
    """
    files = [file for file in map(folder.joinpath, _FILES) if file.is_file()]
    if not files:
        raise ConfigError(
            f"model folder {folder} has no tokenizer ({' or '.join(_FILES[:2])}); "
            "copy the tokenizer files of the base model into it"
        )
    for file in files:
        refuse_placeholder(file)
    if files[0].name == "tokenizer.model":  # no tokenizer.json; transformers' own error would name the wrong library
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
    """Sets ``tokenizer.media`` to the model's rules for media, which `reader_of` returns; does nothing for a text model."""
    family = family_of(folder)
    if family is None:
        return
    for kind in family.kinds:
        marker, token = family.marker(kind), tokenizer.convert_tokens_to_ids(family.marker(kind))
        if token != family.placeholder(kind):
            raise ConfigError(
                f"the tokenizer in {folder} has token {token} for {marker}, and config.json there has "
                f"{family.placeholder(kind)}: they belong to different models"
            )
    tokenizer.media = family


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, folder: Path, rows: Iterable[Mapping[str, Any]] = ()) -> None:
    """Checks that the model in ``folder`` has an embedding for each token that a run will use.

    Some published models (Gemma 3 1B, CodeLlama 34B) have a few more tokens than embeddings, which matters only if a text
    contains such a token. ``rows``: the rows of the run, which are searched only if the tokenizer has such tokens.

    Raises:
        ConfigError: the tokenizer itself, its chat template or a row uses a token without an embedding.
    """
    config, numbers = read_hf_config(folder).get_text_config(), tokenizer.get_vocab()
    size = getattr(config, "vocab_size", math.inf)  # models without this key are refused by `Architecture.from_config`
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
                f"{known}, and {where} uses {used!r} (token {numbers[used]}), which has no embedding. Use the tokenizer "
                "that the model came with, or enlarge the model: "
                f"model.resize_token_embeddings({max(numbers.values()) + 1}), then save_pretrained"
            )
    if rows:
        log.warning("%s; no row uses a token without an embedding, such as %r", known, min(beyond))


class _PlainErrors(contextlib.AbstractContextManager[None]):
    """Turns a plain `Exception`, which the Rust library `tokenizers` raises, into a ValueError."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is Exception:
            raise ValueError(str(error)) from error


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that the tokenizer can turn messages into a prompt.

    Raises:
        ConfigError: it has no chat template, or an invalid one.
    """
    name = tokenizer.name_or_path or "this model"
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {name} has no chat template, so messages cannot become "
            "prompts; use an instruction-tuned model, or put a chat_template.jinja into the model folder"
        )
    try:
        template_of(tokenizer).variables  # noqa: B018 parses the template
    except TemplateError as error:
        raise ConfigError(f"the chat template of {name} cannot be read: {error}") from error


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the tokenizer beside a saved model; for a media model also its unchanged processor settings."""
    tokenizer.save_pretrained(folder)
    family: MediaFamily | None = getattr(tokenizer, "media", None)
    for file in () if family is None else map(family.folder.joinpath, FILES):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


def save_classifier_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the tokenizer beside a saved classifier, with the classifier's padding token.

    With another padding token, such as the end-of-text token, transformers would score the padding of a row.
    """
    saved = tokenizer
    if getattr(tokenizer, "media", None) is None:  # transformers has no classifiers of media models
        saved = copy.deepcopy(tokenizer)
        saved.pad_token = saved.convert_ids_to_tokens(read_hf_config(folder).pad_token_id)
    save_tokenizer(saved, folder)


def stop_ids(folder: Path, hf_config: Any) -> list[int]:
    """Returns the tokens that end a completion of the model in ``folder``: those of its generation config, or else of its
    configuration, and then the one of its chat template.

    Raises:
        ConfigError: the generation config cannot be read.
    """
    generation = read_generation_config(folder)
    ends = as_list(None if generation is None else generation.eos_token_id)
    for part in (hf_config, hf_config.get_text_config()):  # a media model has the key in one of the two
        ends = ends or as_list(getattr(part, "eos_token_id", None))
    return list(dict.fromkeys([*ends, *template_ends(folder)]))


def set_stop_ids(model: Any, folder: Path) -> None:
    """Writes `stop_ids` into the generation config of a transformers ``model``, which is saved with the model, if the config
    lacks the token with which the chat template ends a reply."""
    if not set(template_ends(folder)) <= {*as_list(model.generation_config.eos_token_id)}:
        model.generation_config.eos_token_id = stop_ids(folder, model.config)


def template_ends(folder: Path) -> Sequence[int]:
    """Returns the special token with which the chat template in ``folder`` ends a reply, or ``eos_token`` if it writes none;
    empty without a template."""
    return _template_ends(folder, max((file.stat().st_mtime_ns for file in folder.glob("*.j*")), default=0))


@lru_cache(maxsize=64)
def _template_ends(folder: Path, newest: int) -> Sequence[int]:
    """Computes `template_ends`. ``newest``: modification time of the newest file, so that changes are noticed."""
    try:
        tokenizer = load_tokenizer(folder)
    except ConfigError:  # tokens can be generated without a tokenizer; code that needs text reports the error
        return ()
    end = template_of(tokenizer).end
    end = tokenizer.eos_token_id if end is None and tokenizer.chat_template else end
    return () if end is None else (end,)


def as_list(ids: int | Sequence[int] | None) -> list[int]:
    """Converts token ids of a transformers configuration (None, one id or several) to a list."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


LOOKED_AT = 16
"""Number of conversations that `check_system_prompt` renders with and without the system prompt."""


def check_template_options(
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Mapping[str, Any]],
    system_prompt: str | None,
    options: Mapping[str, Any],
) -> None:
    """Checks that the chat template reads the options of a run or an evaluation, and warns if the template does not mark the
    end of a reply. ``rows``: rows whose ``messages`` are checked; empty if prompts do not come from rows.

    Raises:
        ConfigError: an option has no effect; the message gives the names that the template reads.
    """
    template = template_of(tokenizer)
    check_messages(tokenizer, rows)
    for name in options:
        if name not in template.variables:
            known = nearest_names(name, template.variables) if template.variables else "this template has no options"
            raise ConfigError(
                f"chat_template_kwargs.{name}={options[name]!r} has no effect, because the chat template does not read it; "
                + known
            )
    if system_prompt is not None:
        check_system_prompt(tokenizer, [row["messages"] for row in rows], system_prompt, **options)
    if template.end is None:
        warning = "the chat template writes no special token after a reply, so only the end-of-text token (%s) ends a reply"
        log.warning(warning, tokenizer.eos_token)


def check_messages(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Mapping[str, Any]]) -> None:
    """Checks that the model and its chat template read everything in the rows: keys of messages, tools and media.

    Raises:
        ConfigError: the template would ignore a key, or the model cannot read a medium; the message names the row.
    """
    template = str(tokenizer.chat_template)
    known, reader = {"role", "content", "weight", "tool_call_id"}, reader_of(tokenizer)
    readable = set(reader.kinds) if reader else set()
    for row in rows:
        sides = (row.get(name) for name in ("messages", "chosen", "rejected", "completion"))
        messages = [message for side in sides if isinstance(side, list) for message in side if isinstance(message, dict)]
        for kind in {kind for message in messages for kind in kinds_of(message.get("content"))} - readable:
            reads = f"reads text and {' and '.join(sorted(readable))}" if readable else "reads only text"
            raise ConfigError(
                f"{row.get(WHERE, 'a row')}: the row has media of the kind {kind!r}, and the model {reads}: use a model "
                "that reads them (docs/media.md), or leave them out: media=false of train_dataset, of valid_dataset"
            )
        keys = {f"the key {key!r} of a message": key for message in messages for key in message if key not in known}
        for place, name in (keys | ({"the column 'tools'": "tools"} if row.get("tools") else {})).items():
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise ConfigError(
                    f"{row.get(WHERE, 'a row')}: the chat template does not read {place}, so the model would not see it; "
                    "remove it from the rows, or use a model whose template reads it"
                )


def check_system_prompt(
    tokenizer: PreTrainedTokenizerBase, chats: list[Messages], system_prompt: str, key: str = "system_prompt", **options: Any
) -> None:
    """Checks that the system prompt has an effect on at least one of the first `LOOKED_AT` chats without a system message. A
    template that refuses system messages passes.

    ``key``: the configuration key, for messages.

    Raises:
        ConfigError: the system prompt would have no effect; the message says why.
    """
    bare = [chat for chat in chats if all(message["role"] != "system" for message in chat)][:LOOKED_AT]
    for chat in bare:
        try:
            chat = read_for(tokenizer, chat)
            rendered = render(tokenizer, [{"role": "system", "content": system_prompt}, *chat], **options)
            if system_prompt.strip() in rendered or rendered != render(tokenizer, chat, **options):
                return
        except DataFailure:
            return
    if chats:
        why = "the chat template leaves system messages out: put the text into the user's messages"
        why = (
            why if bare else "each conversation has its own system message, which is used instead: leave one of the two out"
        )
        raise ConfigError(f"{key}={system_prompt!r:.60} has no effect, because {why}")
