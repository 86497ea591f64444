"""Text from tokens as they come: whole characters only, and nothing that may turn out to be a stop string."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from tandem.engines.inference.serve.refusal import Refusal
from tandem.models.tokenizer import load_tokenizer

T = TypeVar("T")

_UNFINISHED = "�"
"""What a tokenizer decodes the first bytes of a character to."""

_PATIENCE = 3
"""Tokens that may wait for the rest of their character, which has at most four bytes; what waits longer is no text."""


class Tokenizers:
    """A model's tokenizer twice: one encodes, in a thread of its own, one decodes; a tokenizer is not shared by threads."""

    def __init__(self, folder: Path):
        self._encoder, self.decoder = load_tokenizer(folder), load_tokenizer(folder)
        self._thread = ThreadPoolExecutor(1, "tokenizer")

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can become a prompt."""
        return bool(self._encoder.chat_template)

    async def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, those that the tokenizer puts around every text included."""
        return await self._run(lambda: tuple(self._encoder(text)["input_ids"]))

    async def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[int, ...]:
        """Tokens of a conversation with the model's turn opened.

        Raises:
            Refusal: 400, the template does not take these messages; with what it said.
        """
        return await self._run(lambda: self._render(messages, tools))

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[int, ...]:
        try:
            ids = self._encoder.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # the request boundary: a template may fail in any way on what a client sends
            message = f"the model's chat template does not take these messages: {type(error).__name__}: {error}"
            raise Refusal(400, message, param="messages") from error
        return tuple(ids)

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


class TextStream:
    """The text of one completion, special tokens left out and cut before its stop string, in pieces or at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._context = self._read = 0
        """Tokens that are decoded again as context of new ones, and tokens whose text was taken."""

        self._held = ""

    def add(self, ids: Sequence[int]) -> str:
        """Takes tokens of a completion that goes on; returns text that is certain."""
        self._ids += ids
        end = len(self._ids)
        while end > self._read and len(self._ids) - end < _PATIENCE and self._new(end).endswith(_UNFINISHED):
            end -= 1
        if self._new(end).endswith(_UNFINISHED):
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
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _beginning(self) -> int:
        """Characters at the end of what is held that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stop):
                return count
        return 0
