"""Fewest tokens that a text can have, known without tokenising it: what cannot fit is refused at once.

No token stands for more of a text than the longest one of the vocabulary. That holds only where characters become parts of
tokens one by one, which is read from the tokenizer's own description; of any other tokenizer nothing is known.
"""

import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation"}
"""Pre-tokenizers that drop no character, unless their behaviour is to remove what they find."""


def fewest_tokens(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """A function from a text to a number of tokens that it has at least; always 0 for a tokenizer of which nothing is known.

    A vocabulary of bytes is counted in bytes of UTF-8, and those that it lacks count as nothing, for they are dropped. So
    does white space where a special token may swallow it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: 0
    description = json.loads(backend.to_str())
    normalizers = list(_parts(description["normalizer"], "normalizers"))
    splitters = list(_parts(description["pre_tokenizer"], "pretokenizers"))
    vocabulary = backend.get_vocab(with_added_tokens=False)
    in_bytes = any(one["type"] == "ByteLevel" for one in splitters)
    if not (_loses_nothing(normalizers, splitters, in_bytes) and _spells(description["model"], vocabulary, in_bytes)):
        return lambda text: 0
    absent = bytes(byte for byte, letter in bytes_to_unicode().items() if letter not in vocabulary)

    def size(text: str) -> int:
        return len(text.encode().translate(None, absent)) if in_bytes else len(text)

    added = description["added_tokens"]
    longest = max([*map(len, vocabulary), *(len(token["content"].encode()) for token in added)])
    composed = any(one["type"] == "NFC" for one in normalizers)
    swallows = any(token["lstrip"] or token["rstrip"] for token in added)

    def least(text: str) -> int:
        if composed and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        if swallows:
            text = "".join(text.split())
        return -(-size(text) // longest)

    return least


def _parts(part: Mapping[str, Any] | None, several: str) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a description, which may be one step, a sequence of steps, or none."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for one in part[several]:
            yield from _parts(one, several)
    else:
        yield part


def _loses_nothing(normalizers: list[Mapping[str, Any]], splitters: list[Mapping[str, Any]], in_bytes: bool) -> bool:
    """True if a text keeps its length, or grows, on its way to the vocabulary; composing (NFC) is counted apart.

    ``in_bytes``: its length is counted in bytes of UTF-8, otherwise in characters.
    """

    def size(text: str) -> int:
        return len(text.encode()) if in_bytes else len(text)

    def keeps(one: Mapping[str, Any]) -> bool:
        if one["type"] == "Replace":
            pattern = one["pattern"].get("String")
            return pattern is not None and size(one["content"]) >= size(pattern)
        return one["type"] in ("NFC", "Prepend")

    removes = any(one["type"] not in _KEEPING or one.get("behavior") == "Removed" for one in splitters)
    return all(map(keeps, normalizers)) and not removes


def _spells(model: Mapping[str, Any], vocabulary: Mapping[str, int], in_bytes: bool) -> bool:
    """True if no two unknown characters become one token: there are none, or each is dropped by itself."""
    if model["type"] != "BPE":
        return False
    if in_bytes:
        return model["unk_token"] is None
    return bool(model["byte_fallback"]) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
