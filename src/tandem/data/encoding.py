"""Encodes messages as tokens, exactly as generation does, and marks the tokens that are learnt.

A conversation is rendered turn by turn with the model's chat template. Each piece (the text before a reply, the reply) is
tokenised separately, so the tokens equal those that a chat sees and appends during generation. A template with ``{%
generation %}`` marks defines which characters are the assistant's.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import Messages, apply_template, render, special_ids, template_of, text_of, with_tools
from tandem.api.failures import DataFailure
from tandem.api.media import MediaTokens, PieceEncoder, encode, media_of, reader_of
from tandem.config.errors import ConfigError
from tandem.media.parts import read_for

_MARKS = re.compile(r"\{%-?\s*generation\b")


class Encoded(NamedTuple):
    """A sequence: tokens ``[S]``, the mask of learnt tokens ``[S]``, and their media numbers ``[S]`` (empty for a text
    model)."""

    ids: list[int]
    mask: list[bool]
    media: list[int]

    def add(self, tokens: MediaTokens, learnt: bool) -> None:
        """Appends tokens. ``learnt``: the value of their mask."""
        self.ids.extend(tokens.ids)
        self.mask.extend([learnt] * len(tokens.ids))
        self.media.extend(tokens.media)


class ChatEncoder:
    """Encodes messages as tokens of one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adds_end: bool = False,
    ):
        """Creates an encoder for one tokenizer.

        Args:
            tokenizer: the model's tokenizer, with a chat template.
            max_length: maximum number of tokens of a sequence; a longer sequence is refused.
            system_prompt: system message for conversations that have none.
            chat_template_kwargs: options of the chat template.
            adds_end: if the template puts no special token after a reply, append the tokenizer's ``eos_token`` and learn it.

        Raises:
            ConfigError: ``eos_token`` is needed, and the tokenizer has none.
        """
        self.tokenizer, self.max_length, self.system_prompt = tokenizer, max_length, system_prompt
        self._kwargs = dict(chat_template_kwargs or {})
        self._added: list[int] = []
        """Tokens that are appended to each reply."""

        if adds_end and template_of(tokenizer).end is None:
            if tokenizer.eos_token_id is None:
                raise ConfigError(
                    "the chat template puts no special token behind a reply, and the tokenizer has no eos_token, so the "
                    "model could not learn to stop; set eos_token in tokenizer_config.json, or fix the chat template"
                )
            self._added = [int(tokenizer.eos_token_id)]
        self._marked = bool(_MARKS.search(str(tokenizer.chat_template))) and not self._added

    def conversation(self, messages: Messages, train_from: int = 0, tools: Any = None) -> list[Encoded]:
        """Encodes a conversation in which every assistant reply from message ``train_from`` on is learnt, including its
        end-of-turn token. A reply with ``weight: 0`` is context. ``tools``: JSON schemas that the template shows to the
        model.

        Usually returns one sequence. A template may rewrite history, for example drop the thinking of earlier turns; then
        the text before an earlier reply differs from that in the final conversation. Such a reply ends a separate sequence,
        whose context is the text that the model sees when it generates the reply.

        Raises:
            DataFailure: there is no reply (`no_answer`), a reply is empty (`empty_completion`), there are too many tokens
                (`too_long`, `prompt_too_long`), an image or sound cannot be read (`media_…`), the template does not put a
                reply after its prompt (`template_rewrites`) or refuses these messages (`template_refuses`).
        """
        messages = read_for(self.tokenizer, messages)
        learnt = [i >= train_from and _is_learnt(message) for i, message in enumerate(messages)]
        if not any(learnt):
            raise DataFailure("no_answer", "there is no reply of the assistant to learn")
        if any(_is_empty(message) for message in itertools.compress(messages, learnt)):
            raise DataFailure("empty_completion", "a reply of the assistant has no text")
        system = [{"role": "system", "content": self.system_prompt}]
        if self.system_prompt is not None and not any(message["role"] == "system" for message in messages):
            messages, learnt = [*system, *messages], [False, *learnt]
        options = with_tools(self._kwargs, {"tools": tools})
        sequences = self._by_turns(messages, learnt, options)
        marked = self._marked and learnt == [message["role"] == "assistant" for message in messages]
        if (
            marked and len(sequences) == 1 and not media_of(messages)
        ):  # with several sequences, the marked text is not the text that the model sees
            sequences = [self._by_marks(messages, options)]
        for encoded in sequences:
            self._check_length(encoded)
        return sequences

    def completion(self, prompt: Messages, completion: Messages, tools: Any = None) -> Encoded:
        """Encodes a prompt, which is context, and a completion, which is learnt, as one sequence.

        Raises:
            DataFailure: as for `conversation`, and if the template rewrites history within the completion.
        """
        sequences = self.conversation([*prompt, *completion], len(prompt), tools)
        if len(sequences) > 1:
            raise DataFailure("template_rewrites", "the chat template rewrites earlier turns, so this is not one sequence")
        return sequences[0]

    def steps(self, prompt: Messages, steps: Sequence[str], separator: str, marker: str = "") -> tuple[Encoded, list[int]]:
        """Encodes a reply made of steps. Returns the sequence, and the positions of the steps' last tokens. Each step is
        tokenised separately, together with ``marker``, which is appended to it.

        Raises:
            DataFailure: as for `conversation`, and if the template changes the text of a step.
        """
        prompt = read_for(self.tokenizer, prompt)
        texts = [step.strip() for step in steps]
        if not texts or not all(texts):
            raise DataFailure("empty_completion", "there is a step without text")
        texts = [text + marker for text in texts]
        if self.system_prompt is not None and not any(message["role"] == "system" for message in prompt):
            prompt = [{"role": "system", "content": self.system_prompt}, *prompt]
        before, after = self._turn(
            [*prompt, {"role": "assistant", "content": separator.join(texts)}], len(prompt), self._kwargs
        )
        encoded, reply, ends = Encoded([], [], []), after[len(before) :], []
        encoded.add(encode(self.tokenizer, before, media_of(prompt)), learnt=False)
        for text in texts:
            at = reply.find(text)
            if at < 0:
                raise DataFailure("template_rewrites", "the chat template changes the text of a step")
            encoded.add(encode(self.tokenizer, reply[: at + len(text)]), learnt=True)
            ends.append(len(encoded.ids) - 1)
            reply = reply[at + len(text) :]
        encoded.add(encode(self.tokenizer, reply), learnt=True)
        self._check_length(encoded)
        return encoded, ends

    def encode(self, text: str) -> list[int]:
        """Encodes a text that the chat template rendered. Adds no special tokens, because the template has written them."""
        return encode(self.tokenizer, text).ids

    def _by_turns(self, messages: Messages, learnt: Sequence[bool], options: Mapping[str, Any]) -> list[Encoded]:
        sequences: list[Encoded] = []
        encoder = PieceEncoder(self.tokenizer, [])
        text = rest = ""  # text: rendered so far; rest: its end, which is not encoded yet
        for index in itertools.compress(range(len(messages)), learnt):
            before, after = self._turn(messages, index, options)
            if not sequences or not before.startswith(text):
                if sequences:
                    sequences[-1].add(encoder.encode(rest), learnt=False)
                sequences.append(Encoded([], [], []))
                encoder, text, rest = PieceEncoder(self.tokenizer, media_of(messages[:index])), "", ""
            sequences[-1].add(encoder.encode(rest + before[len(text) :]), learnt=False)
            reply, rest = self._reply(after[len(before) :])
            sequences[-1].add(reply, learnt=True)
            text = after
        sequences[-1].add(encoder.encode(rest), learnt=False)
        return sequences

    def _turn(self, messages: Messages, index: int, options: Mapping[str, Any]) -> tuple[str, str]:
        """Renders the conversation up to the start of the reply at ``index``, and again including this reply."""
        before = render(self.tokenizer, messages[:index], add_generation_prompt=True, **options) if index else ""
        after = render(self.tokenizer, messages[: index + 1], **options)
        if not after.startswith(before):
            raise DataFailure("template_rewrites", "the chat template does not put the reply behind its prompt")
        return before, after

    def _reply(self, text: str) -> tuple[MediaTokens, str]:
        """Splits a rendered reply into the tokens that the model generates, and the white space that the template adds."""
        rest = ""
        if self._added:
            stripped = text.rstrip()
            reply, rest = [*self.encode(stripped), *self._added], text[len(stripped) :]
        else:
            reply, special = self.encode(text), special_ids(self.tokenizer)
            size = next((i + 1 for i in range(len(reply) - 1, -1, -1) if reply[i] in special), len(reply))
            tail = str(self.tokenizer.decode(reply[size:], skip_special_tokens=False)) if size < len(reply) else ""
            if not tail.strip() and text.endswith(tail):
                reply, rest = reply[:size], tail
        return MediaTokens(reply, [0] * len(reply) if reader_of(self.tokenizer) is not None else []), rest

    def _by_marks(self, messages: Messages, options: Mapping[str, Any]) -> Encoded:
        outputs = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        rendered = apply_template(self.tokenizer, messages, **outputs, **options)
        mask = [bool(value) for value in rendered["assistant_masks"]]
        if not any(mask):
            raise DataFailure("no_answer", "the chat template marks nothing of this conversation as the assistant's")
        ids = list(rendered["input_ids"])
        return Encoded(ids, mask, [0] * len(ids) if reader_of(self.tokenizer) is not None else [])

    def _check_length(self, encoded: Encoded) -> None:
        if len(encoded.ids) <= self.max_length:
            return
        prompt = encoded.mask.index(True)
        if prompt >= self.max_length:
            raise DataFailure("prompt_too_long", f"the prompt has {prompt} tokens, max_length={self.max_length}")
        raise DataFailure("too_long", f"{len(encoded.ids)} tokens, max_length={self.max_length}")


def _is_learnt(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _is_empty(message: Mapping[str, Any]) -> bool:
    return not message.get("tool_calls") and not text_of(message.get("content")).strip()


def sequence(encoded: Encoded, **fields: Any) -> dict[str, Any]:
    """Builds a trajectory for `tandem.api.batch.pack`: ``input_ids [S]``, ``loss_mask [S]``, temperature 1, ``fields``."""
    media = {"media": torch.tensor(encoded.media, dtype=torch.int64)} if encoded.media else {}
    return {
        "input_ids": torch.tensor(encoded.ids, dtype=torch.int64),
        "loss_mask": torch.tensor(encoded.mask, dtype=torch.bool),
        "temperature": 1.0,
        **media,
        **fields,
    }
