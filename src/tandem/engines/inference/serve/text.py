"""Text to tokens and tokens to text, for a server.

`TextStream` decodes tokens as they arrive: whole characters only, and nothing that may turn out to be a stop string.

`fewest_tokens` bounds a text's number of tokens from below without tokenising it, so that a text that cannot fit is refused
at once. The bound: no token stands for more of a text than the longest token of the vocabulary. It holds only if characters
become parts of tokens one by one, which the tokenizer's own description tells; for other tokenizers the bound is 0.
"""

import asyncio
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tandem.api.chat_template import template_of
from tandem.api.media import MediaKind, MediaTokens, encode, media_of, reader_of
from tandem.config.errors import kind_and_text
from tandem.engines.inference.engine_calls import UNFINISHED
from tandem.models.tokenizer import load_tokenizer
from tandem.protocol.access import ServiceLimits
from tandem.protocol.bodies import Refusal
from tandem.protocol.media_intake import MediaIntake, reading
from tandem.protocol.tool_calls import CallReader
from tandem.protocol.turns import Turn

_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation"}
"""Pre-tokenizers that drop no character, unless their behaviour is ``Removed``."""


def fewest_tokens(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """Returns a function from a text to a lower bound of its number of tokens; always 0 if no bound is known.

    With a vocabulary of bytes, lengths are in bytes of UTF-8. Bytes that the vocabulary lacks are dropped, so they do not
    count; nor does white space if a special token may swallow it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: 0
    description = json.loads(backend.to_str())
    normalizers = list(_parts(description["normalizer"], "normalizers"))
    splitters = list(_parts(description["pre_tokenizer"], "pretokenizers"))
    vocabulary = backend.get_vocab(with_added_tokens=False)
    in_bytes = any(step["type"] == "ByteLevel" for step in splitters)
    if not (_loses_nothing(normalizers, splitters, in_bytes) and _spells(description["model"], vocabulary, in_bytes)):
        return lambda text: 0
    absent = bytes(byte for byte, letter in bytes_to_unicode().items() if letter not in vocabulary)

    def size(text: str) -> int:
        return len(text.encode().translate(None, absent)) if in_bytes else len(text)

    added = description["added_tokens"]
    longest = max([*map(len, vocabulary), *(len(token["content"].encode()) for token in added)])
    composed = any(step["type"] == "NFC" for step in normalizers)
    swallows = any(token["lstrip"] or token["rstrip"] for token in added)

    def least(text: str) -> int:
        if composed and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        if swallows:
            text = "".join(text.split())
        return -(-size(text) // longest)

    return least


def _parts(part: Mapping[str, Any] | None, several: str) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a normalizer or a pre-tokenizer, which may be one step, a sequence of steps, or None. ``several``:
    the key under which a sequence has its steps."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[several]:
            yield from _parts(step, several)
    else:
        yield part


def _loses_nothing(normalizers: list[Mapping[str, Any]], splitters: list[Mapping[str, Any]], in_bytes: bool) -> bool:
    """True if no step makes a text shorter before it is split into tokens, except for composition (NFC), which
    `fewest_tokens` takes into account itself.

    ``in_bytes``: lengths are in bytes of UTF-8, otherwise in characters.
    """

    def size(text: str) -> int:
        return len(text.encode()) if in_bytes else len(text)

    def keeps(step: Mapping[str, Any]) -> bool:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            return pattern is not None and size(step["content"]) >= size(pattern)
        return step["type"] in ("NFC", "Prepend")

    removes = any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in splitters)
    return all(map(keeps, normalizers)) and not removes


def _spells(model: Mapping[str, Any], vocabulary: Mapping[str, int], in_bytes: bool) -> bool:
    """True if several unknown characters never become one token: every character is known, or unknown ones are dropped."""
    if model["type"] != "BPE":
        return False
    if in_bytes:
        return model["unk_token"] is None
    return bool(model["byte_fallback"]) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


T = TypeVar("T")

_PATIENCE = 3
"""Most tokens that are held back until their character is complete. A character has at most 4 bytes, so after that they are
not text, and are decoded as they are."""


_LONG_CHARACTERS = 1 << 15
"""Characters above which a text is tokenised in a second thread, so that shorter ones (at most 0.1 s) do not wait."""


class Tokenizers:
    """Three copies of a model's tokenizer, each for one thread: for short texts, for long ones, and for decoding.

    Threads must not share a tokenizer.
    """

    def __init__(self, folder: Path, *, max_long: int = 16, intake: MediaIntake | None = None):
        """``max_long``: at most so many long texts are tokenised or queued at a time; further ones are refused. ``intake``:
        reads images and sounds, for a model that takes them."""
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
        """Returns the tokens of a text, including those that the tokenizer puts around every text.

        Raises:
            Refusal: 400 if the text's length alone shows that it has ``room`` tokens or more; 503 if too many long texts
                wait.
        """
        long = len(text) > _LONG_CHARACTERS
        check_room(await asyncio.to_thread(self._fewest, text) if long else self._fewest(text), room, "prompt")
        return await self._run(long, lambda encoder: encoder.encode(text))

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included. Call it in the decoder's thread."""
        return str(self.decoder.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def reader(self) -> CallReader:
        """The parser of replies, for the decoder's thread."""
        return CallReader(self.decoder)

    async def encode_chat(self, turn: Turn, room: int, options: Mapping[str, Any] | None = None) -> tuple[MediaTokens, str]:
        """Returns tokens and text of a conversation, up to and with the opening of the model's turn. Its images and sounds
        go into the media store. ``options``: `chat_template_kwargs`.

        Raises:
            Refusal: 400 if the template refuses these messages (the refusal says why) or does not read an option; also like
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
    """Raises `Refusal`, as the engine would, if no token fits after ``num_tokens`` (which may be a lower bound)."""
    if num_tokens >= room:
        message = f"prompt_too_long: at least {num_tokens} tokens leave no room in the context of {room}"
        raise Refusal(400, message, code="prompt_too_long", param=param)


def _characters(value: Any) -> int:
    """Returns the number of characters of all strings in a JSON value."""
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
        """Returns the tokens of a rendered conversation, whose special tokens come from the template."""
        return encode(self._tokenizer, text, media_of(turn.messages))

    def render(self, turn: Turn, options: Mapping[str, Any]) -> str:
        """Returns the text of a conversation, up to and with the opening of the model's turn. Raises `Refusal` if the
        template refuses it."""
        known = template_of(self._tokenizer).variables
        for name in options:  # only the template's variables: others could replace the template, which is a program
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
    """Decodes one completion, in pieces or at once, up to its stop string. ``special``: special tokens are included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), *, special: bool = False):
        self._tokenizer, self._stop, self._special = tokenizer, tuple(stop), special
        self._ids: list[int] = []
        self._context = self._read = 0
        """``_read``: number of tokens whose text was returned. ``_context``: index of the first token that is decoded
        together with new tokens, because the text of a token depends on those before it."""

        self._held = ""

    def add(self, ids: Sequence[int]) -> str:
        """Adds tokens of a completion that is not finished. Returns the further text that is now certain."""
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
        """Adds the last tokens and returns the rest of the text. ``stopped``: a stop string that the last token completes is
        left out. An earlier stop string, where `min_tokens` forbade the end, is ordinary text."""
        sure = self.add(ids[:-1]) if len(ids) > 1 else ""
        self._ids += ids[-1:]
        text = self._held + self._new(len(self._ids))
        if stopped:
            text = text[: min((place for stop in self._stop if (place := text.find(stop)) >= 0), default=len(text))]
        return sure + text

    def _new(self, end: int) -> str:
        """Returns the text up to token ``end`` that was not returned yet."""
        return self._decode(self._context, end)[len(self._decode(self._context, self._read)) :]

    def _decode(self, start: int, end: int) -> str:
        ids = self._ids[start:end]
        return str(self._tokenizer.decode(ids, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False))

    def _beginning(self) -> int:
        """Returns how many characters at the end of the pending text may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stop):
                return count
        return 0
