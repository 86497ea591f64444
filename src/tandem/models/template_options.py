"""Checks of a start that ask a chat template whether the options that are set for it have an effect."""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import Messages, render, template_of
from tandem.api.failures import DataFailure
from tandem.api.media import kinds_of, reader_of
from tandem.config.data import WHERE
from tandem.config.errors import ConfigError, nearest_names
from tandem.media.parts import read_for

log = logging.getLogger(__name__)

LOOKED_AT = 16
"""Conversations that are rendered with and without a system prompt."""


def check_template_options(
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Mapping[str, Any]],
    system_prompt: str | None,
    options: Mapping[str, Any],
) -> None:
    """Passes if the template reads the options of a run or an evaluation, and tells where it has no end. ``rows``: whose
    ``messages`` are looked at; none where prompts are made otherwise, and then only names are checked.

    Raises:
        ConfigError: an option without effect; says which names the template reads.
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
        said = "the chat template puts no special token behind a reply, so only the end of a text (%s) ends one"
        log.warning(said, tokenizer.eos_token)


def check_messages(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Mapping[str, Any]]) -> None:
    """Passes if the model and its template read all that the rows bring for them: keys of messages, tools, media.

    Raises:
        ConfigError: something that neither it nor Tandem reads; says in which row.
    """
    template = str(tokenizer.chat_template)
    known, reader = {"role", "content", "weight", "tool_call_id"}, reader_of(tokenizer)
    taken = set(reader.kinds) if reader else set()
    for row in rows:
        sides = (row.get(name) for name in ("messages", "chosen", "rejected", "completion"))
        messages = [message for side in sides if isinstance(side, list) for message in side if isinstance(message, dict)]
        for kind in {kind for message in messages for kind in kinds_of(message.get("content"))} - taken:
            reads = f"reads text and {' and '.join(sorted(taken))}" if taken else "reads text alone"
            raise ConfigError(
                f"{row.get(WHERE, 'a row')}: the row has media of the kind {kind!r}, and the model {reads}: take a model "
                "that reads them (docs/media.md), or leave them out: media=false of train_dataset, of valid_dataset"
            )
        keys = {f"the key {key!r} of a message": key for message in messages for key in message if key not in known}
        for what, name in (keys | ({"the column 'tools'": "tools"} if row.get("tools") else {})).items():
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise ConfigError(
                    f"{row.get(WHERE, 'a row')}: the chat template does not read {what}, so the model would not see it; "
                    "remove it from the rows, or take a model whose template reads it"
                )


def check_system_prompt(
    tokenizer: PreTrainedTokenizerBase, chats: list[Messages], system_prompt: str, key: str = "system_prompt", **options: Any
) -> None:
    """Passes if the template writes the system prompt in front of one of the first ``chats`` that have none, or refuses it.
    ``key``: the option, for errors.

    Raises:
        ConfigError: it would be read nowhere; says why.
    """
    bare = [chat for chat in chats if all(message["role"] != "system" for message in chat)][:LOOKED_AT]
    for chat in bare:
        try:
            chat = read_for(tokenizer, chat)
            led = render(tokenizer, [{"role": "system", "content": system_prompt}, *chat], **options)
            if system_prompt.strip() in led or led != render(tokenizer, chat, **options):
                return
        except DataFailure:
            return
    if chats:
        why = "the chat template leaves system messages out: put the text into the user's messages"
        why = why if bare else "each conversation has a system message of its own, which stays: leave one of them out"
        raise ConfigError(f"{key}={system_prompt!r:.60} has no effect, because {why}")
