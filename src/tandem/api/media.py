"""Images and sounds of a prompt: named by what they hold, and never carried along.

A medium is kept once, in the media store, under its number. Everything else (chats, requests, samples, batches, the wire)
has tokens, and beside them the *media numbers*: for every token the number of the medium whose placeholder it is, 0 for text.
A prompt's identity is its `prompt_key`: where the two differ, prompts with equal tokens and other pictures are told apart by
everything that compares tokens. Whoever computes with a medium asks the store for it by its number.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from tandem.api.failures import DataFailure

MediaKind = Literal["image", "audio"]

PARTS: dict[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "input_audio": "audio",
    "audio_url": "audio",
}
"""Type of a content part → the kind of medium it holds."""


@dataclass(frozen=True)
class Medium:
    """One image or sound in the media store; `tandem.media.store.keep` makes it."""

    kind: MediaKind
    number: int
    """Below 0; made of the SHA-256 of the normalised content, so equal contents have equal numbers on every machine."""

    size: tuple[int, int]
    """Width and height of an image in pixels; samples and samples a second of a sound."""


class ReadsMedia(Protocol):
    """A model's way with media in a prompt; the tokenizer of a media model carries one as its attribute ``media``."""

    kinds: tuple[MediaKind, ...]
    """The kinds of media that the model takes."""

    def marker(self, kind: MediaKind) -> str:
        """The text that the chat template writes for one medium, such as ``<image>``; it is the text of `placeholder`."""

    def placeholder(self, kind: MediaKind) -> int:
        """The token that stands where the features of a medium go."""

    def count(self, medium: Medium) -> int:
        """Number of placeholders, and of rows of features, of a medium. Raises `DataFailure` for one that does not fit."""

    def expansion(self, medium: Medium) -> str:
        """The text that takes the place of the marker: `count` placeholders, and what the model wants around them."""


def reader_of(tokenizer: Any) -> ReadsMedia | None:
    """The model's way with media; None for one that reads text alone."""
    reader: ReadsMedia | None = getattr(tokenizer, "media", None)
    return reader


class MediaTokens(NamedTuple):
    """Tokens ``[S]``, and the media number of each, ``[S]``; the latter is empty for a model that reads text alone."""

    ids: list[int]
    media: list[int]


def encode(tokenizer: Any, text: str, media: Sequence[Medium] = ()) -> MediaTokens:
    """The tokens of a rendered text, in which each of ``media`` is a marker, in order. Special tokens are not added.

    Example: ``"<image>What is it?"`` with one image of 4 placeholders → ids ``[i, i, i, i, What, …]`` and media
    ``[n, n, n, n, 0, …]``

    Raises:
        DataFailure: ``media_mismatch``: the text has another number of markers than there are media.
    """
    reader = reader_of(tokenizer)
    if reader is None:
        return MediaTokens(list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else [], [])
    marked = {reader.marker(kind): kind for kind in reader.kinds}
    pieces = re.split("(" + "|".join(map(re.escape, marked)) + ")", text)
    found = [marked[piece] for piece in pieces if piece in marked]
    if found != [medium.kind for medium in media]:
        raise DataFailure(
            "media_mismatch",
            f"the rendered text has {len(found)} markers ({', '.join(marked)}) and the messages have {len(media)} media; "
            "a message that spells a marker as text cannot be sent to this model, and a template must write one for each",
        )
    left = iter(media)
    expanded = "".join(reader.expansion(next(left)) if piece in marked else piece for piece in pieces)
    ids = list(tokenizer(expanded, add_special_tokens=False)["input_ids"]) if expanded else []
    return MediaTokens(ids, _numbered(reader, ids, media))


def _numbered(reader: ReadsMedia, ids: Sequence[int], media: Sequence[Medium]) -> list[int]:
    """The media number of each token: placeholders of a kind, in order, belong to the media of that kind, in order."""
    numbers = [0] * len(ids)
    for kind in reader.kinds:
        own = [medium for medium in media if medium.kind == kind]
        places = [i for i, token in enumerate(ids) if token == reader.placeholder(kind)]
        wanted = [medium.number for medium in own for _ in range(reader.count(medium))]
        if len(places) != len(wanted):
            raise DataFailure(
                "media_mismatch",
                f"{len(own)} media ({kind}) have {len(wanted)} rows of features, and the prompt has {len(places)} placeholders",
            )
        for place, number in zip(places, wanted, strict=True):
            numbers[place] = number
    return numbers


def prompt_key(ids: Sequence[int], media: Sequence[int]) -> tuple[int, ...]:
    """A prompt's identity: its tokens, and at placeholders the number of the medium. ``media``: as long, or empty."""
    return tuple(number or token for token, number in zip(ids, media, strict=True)) if media else tuple(ids)


class Occurrence(NamedTuple):
    """One token that takes a row of a medium's features."""

    place: int
    """The token's place among those given."""

    number: int
    row: int
    """Row of the medium's features."""


def occurrences(media: Sequence[int], count: Mapping[int, int], before: Sequence[int] = ()) -> Iterator[Occurrence]:
    """The rows of features that tokens take. The placeholders of a medium take its rows in order, and begin anew where it is
    shown again.

    Args:
        media: ``[S]`` media numbers of the tokens, 0 for text.
        count: number → rows of its features.
        before: media numbers of the tokens that come before these in the same sequence.
    """
    seen: dict[int, int] = {}
    for number in before:
        if number:
            seen[number] = seen.get(number, 0) + 1
    for place, number in enumerate(media):
        if number:
            row = seen.get(number, 0)
            seen[number] = row + 1
            yield Occurrence(place, number, row % count[number])


def media_in(content: Any) -> list[Medium]:
    """The media of a message's content, in order: those of its parts, which `tandem.media.parts.read_media` has put there."""
    if not isinstance(content, list | tuple):
        return []
    return [part["medium"] for part in content if isinstance(part, Mapping) and isinstance(part.get("medium"), Medium)]


def kinds_of(content: Any) -> set[MediaKind]:
    """The kinds of media that a message's content has parts of, read or not."""
    parts = content if isinstance(content, list | tuple) else ()
    return {PARTS[part["type"]] for part in parts if isinstance(part, Mapping) and part.get("type") in PARTS}
