"""Text from tokens as they arrive: whole characters only, and nothing that may turn out to be a stop string."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import template_of
from tandem.api.media import MediaKind, MediaTokens, encode, media_of, reader_of
from tandem.config.errors import kind_and_text
from tandem.engines.inference.serve.limits import ServiceLimits
from tandem.engines.inference.serve.prompt_length import fewest_tokens
from tandem.engines.inference.stopping import UNFINISHED
from tandem.models.tokenizer import load_tokenizer
from tandem.protocol.media_intake import MediaIntake, reading
from tandem.protocol.refusal import Refusal
from tandem.protocol.tool_calls import CallReader
from tandem.protocol.turns import Turn

T = TypeVar("T")

_PATIENCE = 3
"""Most tokens that wait for the rest of their character, which has at most four bytes; after that they are no text."""


_LONG_CHARACTERS = 1 << 15
"""Characters above which a text is tokenised in a second thread, so that shorter ones (at most 0.1 s) need not wait."""


class Tokenizers:
    """Three copies of a model's tokenizer, each for one thread: for short texts, for long ones, and for decoding.

    Threads must not share a tokenizer.
    """

    def __init__(self, folder: Path, *, max_long: int = 16, intake: MediaIntake | None = None):
        """``max_long``: most long texts that are tokenised or wait; further ones are refused. ``intake``: reads images and
        sounds, for a model that takes them."""
        self.decoder = load_tokenizer(folder)
        self._short = _Encoder(load_tokenizer(folder), "tokenizer")
        self._long = _Encoder(load_tokenizer(folder), "long-tokenizer")
        self._fewest = fewest_tokens(self.decoder)
        self._max_long, self.intake = max_long, intake or MediaIntake(ServiceLimits(max_tokens=1))
        self.num_long = 0

    @property
    def has_chat_template(self) -> bool:
        return bool(self.decoder.chat_template)

    @property
    def media(self) -> tuple[MediaKind, ...]:
        """The kinds of media that the model takes."""
        reader = reader_of(self.decoder)
        return () if reader is None else reader.kinds

    async def encode(self, text: str, room: int) -> tuple[int, ...]:
        """Tokens of a text, including those that the tokenizer puts around every text.

        Raises:
            Refusal: 400, the text has ``room`` tokens or more, which its length shows before it is tokenised; 503, too many
                long texts wait.
        """
        long = len(text) > _LONG_CHARACTERS
        check_room(await asyncio.to_thread(self._fewest, text) if long else self._fewest(text), room, "prompt")
        return await self._run(long, lambda encoder: encoder.encode(text))

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included. Call it in the decoder's thread."""
        return str(self.decoder.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def reader(self) -> CallReader:
        """The reader of replies, for the decoder's thread."""
        return CallReader(self.decoder)

    async def encode_chat(self, turn: Turn, room: int, options: Mapping[str, Any] | None = None) -> tuple[MediaTokens, str]:
        """Tokens and text of a conversation, with the model's turn opened. Its images and sounds go into the media store.
        ``options``: `chat_template_kwargs`.

        Raises:
            Refusal: 400, the template refuses these messages (the message says why) or does not read an option; also as
                `MediaIntake.read` and `encode`.
        """
        if self.media:
            turn = replace(turn, messages=tuple(await self.intake.read(turn.messages, self.media, room, "messages")))

        def tokens(encoder: _Encoder) -> tuple[MediaTokens, str]:
            with reading("messages"):
                text = encoder.render(turn, options or {})
                check_room(self._fewest(text), room, "messages")
                return encoder.encode_media(text, turn), text

        return await self._run(_characters((turn.messages, turn.tools)) > _LONG_CHARACTERS, tokens)

    async def keep(self, kind: MediaKind, data: str) -> int:
        """Puts a medium (base64 of a file) into the media store, and returns its number. Raises `Refusal` as
        `MediaIntake.read`."""
        (medium,) = media_of(await self.intake.read([{"content": [{"type": kind, "data": data}]}], (kind,), 2, "data"))
        return medium.number

    async def _run(self, long: bool, encode: Callable[["_Encoder"], T]) -> T:
        if not long:
            return await self._short.run(encode)
        if self.num_long >= self._max_long:
            message = f"{self.num_long} long prompts are being tokenised or wait for it, of at most {self._max_long}"
            raise Refusal(503, f"{message}; try again later", code="full", headers={"Retry-After": "1"})
        self.num_long += 1
        try:
            return await self._long.run(encode)
        finally:
            self.num_long -= 1

    def close(self) -> None:
        """Ends the threads after their present work."""
        self.intake.close()
        self._short.close()
        self._long.close()


def check_room(num_tokens: int, room: int, param: str) -> None:
    """Raises `Refusal`, as the engine would, if no completion fits behind ``num_tokens``, which may be a lower bound."""
    if num_tokens >= room:
        message = f"prompt_too_long: at least {num_tokens} tokens leave no room in the context of {room}"
        raise Refusal(400, message, code="prompt_too_long", param=param)


def _characters(value: Any) -> int:
    """Number of characters of all strings in a JSON value."""
    if isinstance(value, str):
        return len(value)
    inner = value.items() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_characters, inner))


class _Encoder:
    """A tokenizer, and the only thread that may use it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str):
        self._tokenizer, self._thread = tokenizer, ThreadPoolExecutor(1, name)

    @cached_property
    def _reader(self) -> CallReader:
        return CallReader(self._tokenizer)

    async def run(self, encode: Callable[["_Encoder"], T]) -> T:
        """Calls ``encode`` with this encoder in its thread; a call that is cancelled while it waits never runs."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode, self)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def encode_media(self, text: str, turn: Turn) -> MediaTokens:
        """Tokens of a rendered conversation, which has its special tokens from the template."""
        return encode(self._tokenizer, text, media_of(turn.messages))

    def render(self, turn: Turn, options: Mapping[str, Any]) -> str:
        """The text of a conversation, with the model's turn opened. Raises `Refusal` if the template refuses it."""
        known = template_of(self._tokenizer).variables
        for name in options:  # the template's own alone: another could name a template, and that is a program
            if name not in known:
                where, reads = f"chat_template_kwargs.{name}", ", ".join(sorted(known)) or "no options"
                raise Refusal(400, f"{where} has no effect: the model's chat template reads {reads}", param=where)
        try:
            return self._reader.render(turn.messages, turn.tools, **options)
        except Exception as error:  # the request boundary: a template may fail in any way on what a client sends
            message = f"the model's chat template does not take these messages: {kind_and_text(error.__cause__ or error)}"
            raise Refusal(400, message, param="messages") from error

    def close(self) -> None:
        """Ends the thread after its present work; waiting calls are dropped."""
        self._thread.shutdown(cancel_futures=True)


class TextStream:
    """The text of one completion, cut before its stop string, in pieces or at once. ``special``: with special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), *, special: bool = False):
        self._tokenizer, self._stop, self._special = tokenizer, tuple(stop), special
        self._ids: list[int] = []
        self._context = self._read = 0
        """Index of the first token that is decoded again as context of new ones, and number of tokens whose text was
        returned."""

        self._held = ""

    def add(self, ids: Sequence[int]) -> str:
        """Adds tokens of a completion that goes on; returns the text that is certain."""
        self._ids += ids
        end = len(self._ids)
        while end > self._read and len(self._ids) - end < _PATIENCE and self._new(end).endswith(UNFINISHED):
            end -= 1
        if self._new(end).endswith(UNFINISHED):
            end = len(self._ids)
        if end == self._read:
            return ""
        self._held += self._new(end)
        self._context, self._read = self._read, end
        keep = self._beginning()
        sure, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sure

    def finish(self, ids: Sequence[int], *, stopped: bool) -> str:
        """Adds the last tokens and returns the rest of the text. ``stopped``: a stop string in the last of them is left out.
        An earlier one, at which `min_tokens` forbade the end, is ordinary text."""
        sure = self.add(ids[:-1]) if len(ids) > 1 else ""
        self._ids += ids[-1:]
        text = self._held + self._new(len(self._ids))
        if stopped:
            text = text[: min((place for stop in self._stop if (place := text.find(stop)) >= 0), default=len(text))]
        return sure + text

    def _new(self, end: int) -> str:
        """The text of tokens that was not returned yet, up to token ``end``."""
        return self._decode(self._context, end)[len(self._decode(self._context, self._read)) :]

    def _decode(self, start: int, end: int) -> str:
        ids = self._ids[start:end]
        return str(self._tokenizer.decode(ids, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False))

    def _beginning(self) -> int:
        """Number of characters at the end of the pending text that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stop):
                return count
        return 0
