"""What a start asks of a chat template: whether the options that are set for it have an effect."""

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import Messages, render, template_of
from tandem.api.failures import DataFailure
from tandem.config.errors import ConfigError
from tandem.config.nearest import nearest_names

log = logging.getLogger(__name__)

LOOKED_AT = 16
"""Conversations that are rendered with and without an option."""


def check_options(tokenizer: PreTrainedTokenizerBase, chats: Iterable[Messages], options: Mapping[str, Any]) -> None:
    """Passes if the template reads all ``options`` (`chat_template_kwargs`). One that changes none of the first ``chats`` is
    logged: it may be set to what the template does anyway.

    Raises:
        ConfigError: the template does not read one; says which names it reads.
    """
    known = template_of(tokenizer).variables
    first = list(islice(chats, LOOKED_AT)) if options else []
    for name, value in options.items():
        if name not in known:
            raise ConfigError(
                f"chat_template_kwargs.{name}={value!r} has no effect, because the chat template does not read it; "
                + (nearest_names(name, known) if known else "it has no options")
            )
        others = {key: value for key, value in options.items() if key != name}
        if all(_texts(tokenizer, chat, options) == _texts(tokenizer, chat, others) for chat in first):
            said = "chat_template_kwargs.%s=%r changes none of the first %d prompts; the template may do so anyway"
            log.info(said, name, value, len(first))


def check_system_prompt(
    tokenizer: PreTrainedTokenizerBase,
    chats: Iterable[Messages],
    system_prompt: str | None,
    options: Mapping[str, Any],
    key: str = "system_prompt",
) -> None:
    """Passes if the template writes the system prompt in front of one of the first ``chats`` that have none; it is not asked
    where it refuses all of them. ``key``: the option, for errors.

    Raises:
        ConfigError: it would be read nowhere; says why.
    """
    if system_prompt is None:
        return
    first = list(islice((chat for chat in chats if all(message["role"] != "system" for message in chat)), LOOKED_AT))
    system = {"role": "system", "content": system_prompt}
    texts = [(_texts(tokenizer, chat, options), _texts(tokenizer, [system, *chat], options)) for chat in first]
    read = [prompt[0] != alone[0] or system_prompt.strip() in prompt[0] for alone, prompt in texts if alone and prompt]
    if first and (any(read) or not read):
        return
    why = "the chat template leaves system messages out: put the text into the user's messages" if first else ""
    why = why or "each conversation has a system message of its own, which stays: leave one of them out"
    raise ConfigError(f"{key}={system_prompt!r:.60} has no effect, because {why}")


def warn_of_no_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Warns of a template after whose replies a model cannot tell that they have ended."""
    if template_of(tokenizer).end is None:
        log.warning(
            "the chat template puts no special token behind a reply: completions end only with the model's own end of a "
            "text (eos_token %r), or at gconfig.max_new_tokens",
            tokenizer.eos_token,
        )


def _texts(tokenizer: PreTrainedTokenizerBase, chat: Messages, options: Mapping[str, Any]) -> list[str]:
    """The prompt of the last reply, and the whole conversation where it ends with one; nothing where it is refused."""
    replied = bool(chat) and chat[-1]["role"] == "assistant"
    try:
        prompt = render(tokenizer, chat[:-1] if replied else chat, add_generation_prompt=True, **options)
        return [prompt, *([render(tokenizer, chat, **options)] if replied else ())]
    except DataFailure:
        return []
