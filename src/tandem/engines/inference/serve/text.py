"""Text from tokens as they come: whole characters only, and nothing that may turn out to be a stop string."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import template_of
from tandem.api.failures import DataFailure, NotWritten
from tandem.api.media import PARTS, MediaKind, MediaTokens, encode, media_of, reader_of
from tandem.config.errors import ConfigError, kind_and_text
from tandem.engines.inference.serve.prompt_length import fewest_tokens
from tandem.engines.inference.stopping import UNFINISHED
from tandem.media.parts import NOWHERE, Allowed, read_media
from tandem.models.tokenizer import load_tokenizer
from tandem.protocol.refusal import Refusal
from tandem.protocol.tool_calls import CallReader
from tandem.protocol.turns import Turn

T = TypeVar("T")

LOG = logging.getLogger("tandem.serve")

_PATIENCE = 3
"""Tokens that may wait for the rest of their character, which has at most four bytes; what waits longer is no text."""


_LONG_CHARACTERS = 1 << 15
"""A text above this is tokenised beside the others, which need not wait for it; 0.1 s at most for one below it."""


class Tokenizers:
    """A model's tokenizer: one for short texts and one for long ones, each in a thread of its own, and one that decodes.

    A tokenizer is not shared by threads.
    """

    def __init__(self, folder: Path, *, max_long: int = 16, allowed: Allowed = NOWHERE):
        """``max_long``: texts that are long or have media, and that wait or are being tokenised; the next one is refused.
        ``allowed``: the places that media may be read from."""
        self.decoder = load_tokenizer(folder)
        self._short = _Encoder(load_tokenizer(folder), "tokenizer")
        self._long = _Encoder(load_tokenizer(folder), "long-tokenizer")
        self._fewest = fewest_tokens(self.decoder)
        self._max_long, self._allowed = max_long, allowed
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
        """Tokens of a text, those that the tokenizer puts around every text included.

        Raises:
            Refusal: 400, it has ``room`` tokens or more, which is known without tokenising it; 503, too many long ones wait.
        """
        long = len(text) > _LONG_CHARACTERS
        check_room(await asyncio.to_thread(self._fewest, text) if long else self._fewest(text), room, "prompt")
        return await self._run(long, lambda encoder: encoder.encode(text))

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included; in the thread that `decoder` is of."""
        return str(self.decoder.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def reader(self) -> CallReader:
        """Reads replies, for the thread that `decoder` is of."""
        return CallReader(self.decoder)

    async def encode_chat(self, turn: Turn, room: int, options: Mapping[str, Any] | None = None) -> tuple[MediaTokens, str]:
        """Tokens and text of a conversation with the model's turn opened. Its images and sounds go into the media store.
        ``options``: `chat_template_kwargs`.

        Raises:
            Refusal: 400, the template does not take these messages, with what it said, or does not read an option; a medium
                cannot be read; 503, the media store cannot be written; and as `encode`.
        """

        def tokens(encoder: _Encoder) -> tuple[MediaTokens, str]:
            with _reading("messages"):
                own = replace(turn, messages=tuple(read_media(turn.messages, self._allowed))) if self.media else turn
                text = encoder.render(own, options or {})
                check_room(self._fewest(text), room, "messages")
                return encoder.encode_media(text, own), text

        return await self._run(_characters((turn.messages, turn.tools)) > _LONG_CHARACTERS or _has_media(turn), tokens)

    async def keep(self, kind: MediaKind, data: str) -> int:
        """Puts a medium, base64 of a file, into the media store; its number. Raises `Refusal` as `encode_chat`."""

        def read(encoder: _Encoder) -> int:
            with _reading("data"):
                (medium,) = media_of(read_media([{"content": [{"type": kind, "data": data}]}]))
            return medium.number

        return await self._run(True, read)

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
        """Ends the threads once they have done what they are doing."""
        self._short.close()
        self._long.close()


@contextlib.contextmanager
def _reading(param: str) -> Iterator[None]:
    """Refuses media that are wrong as the fault of the client; that they cannot be kept here is the fault of the server."""
    try:
        yield
    except DataFailure as failure:
        raise Refusal(400, str(failure), code=failure.reason, param=param) from failure
    except (ConfigError, NotWritten) as error:
        LOG.error("%s", error)
        raise Refusal(503, "the server cannot keep images and sounds now; its log says why", code="media_store") from error


def check_room(num_tokens: int, room: int, param: str) -> None:
    """Raises `Refusal`, as the engine would, where no completion fits behind so many tokens; they may be a lower bound."""
    if num_tokens >= room:
        message = f"prompt_too_long: at least {num_tokens} tokens leave no room in the context of {room}"
        raise Refusal(400, message, code="prompt_too_long", param=param)


def _has_media(turn: Turn) -> bool:
    contents = (message.get("content") for message in turn.messages)
    return any(part.get("type") in PARTS for content in contents if isinstance(content, list) for part in content)


def _characters(value: Any) -> int:
    """Characters of all strings in a JSON value."""
    if isinstance(value, str):
        return len(value)
    inner = value.items() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_characters, inner))


class _Encoder:
    """A tokenizer with the one thread that may use it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str):
        self._tokenizer, self._thread = tokenizer, ThreadPoolExecutor(1, name)

    @cached_property
    def _reader(self) -> CallReader:
        return CallReader(self._tokenizer)

    async def run(self, encode: Callable[["_Encoder"], T]) -> T:
        """Calls ``encode`` with this encoder in its thread; one that still waits when it is cancelled never runs."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode, self)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def encode_media(self, text: str, turn: Turn) -> MediaTokens:
        """Tokens of a rendered conversation; the template has put special ones there."""
        return encode(self._tokenizer, text, media_of(turn.messages))

    def render(self, turn: Turn, options: Mapping[str, Any]) -> str:
        """The text of a conversation with the model's turn opened. Raises `Refusal` where the template does not take it."""
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
        """Ends the thread once it has done what it is doing; what waits is dropped."""
        self._thread.shutdown(cancel_futures=True)


class TextStream:
    """The text of one completion, cut before its stop string, in pieces or at once. ``special``: with special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), *, special: bool = False):
        self._tokenizer, self._stop, self._special = tokenizer, tuple(stop), special
        self._ids: list[int] = []
        self._context = self._read = 0
        """Tokens that are decoded again as context of new ones, and tokens whose text was taken."""

        self._held = ""

    def add(self, ids: Sequence[int]) -> str:
        """Takes tokens of a completion that goes on; returns text that is certain."""
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
        """Takes the last tokens and returns the rest; ``stopped``: the last of them may have brought a stop string, which is
        left out. One that came earlier, where `min_tokens` forbade the end, is text like any other."""
        sure = self.add(ids[:-1]) if len(ids) > 1 else ""
        self._ids += ids[-1:]
        text = self._held + self._new(len(self._ids))
        if stopped:
            text = text[: min((place for stop in self._stop if (place := text.find(stop)) >= 0), default=len(text))]
        return sure + text

    def _new(self, end: int) -> str:
        """Text of the tokens that were not taken yet, up to number ``end``."""
        return self._decode(self._context, end)[len(self._decode(self._context, self._read)) :]

    def _decode(self, start: int, end: int) -> str:
        ids = self._ids[start:end]
        return str(self._tokenizer.decode(ids, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False))

    def _beginning(self) -> int:
        """Characters at the end of what is held that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stop):
                return count
        return 0
