"""Images and sounds of a prompt. They are stored once, and passed around only as numbers.

The media store has each medium under its number. Everything else (chats, requests, samples, batches, the wire) has tokens
and *media numbers*: for every token, the number of the medium whose placeholder the token is, 0 for text. Code that computes
with a medium gets it from the store by its number. A prompt's identity is its `prompt_key`, its tokens with the placeholders
replaced by media numbers: prompts with equal tokens and different images have different keys.
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
    """Negative; computed from the SHA-256 of the normalised content, so equal contents have equal numbers on every machine.
    """

    size: tuple[int, int]
    """Image: width and height in pixels. Sound: number of samples, and samples per second."""


class ReadsMedia(Protocol):
    """A model's rules for media in a prompt. The tokenizer of a model with media has these as its attribute ``media``."""

    kinds: tuple[MediaKind, ...]
    """The kinds of media that the model takes."""

    def marker(self, kind: MediaKind) -> str:
        """The text that the chat template writes for one medium, such as ``<image>``; it is the text of `placeholder`."""

    def placeholder(self, kind: MediaKind) -> int:
        """The token whose embedding is replaced by a row of a medium's features."""

    def count(self, medium: Medium) -> int:
        """Number of a medium's placeholders, equal to its rows of features. Raises `DataFailure` if the model cannot take
        it."""

    def expansion(self, medium: Medium) -> str:
        """The text that replaces the marker: `count` placeholders, and the model's delimiters around them."""


def reader_of(tokenizer: Any) -> ReadsMedia | None:
    """Returns the model's rules for media; None if the model reads only text."""
    reader: ReadsMedia | None = getattr(tokenizer, "media", None)
    return reader


class MediaTokens(NamedTuple):
    """Tokens ``[S]``, and the media number of each, ``[S]``; the latter is empty for a model that reads only text."""

    ids: list[int]
    media: list[int]


def encode(tokenizer: Any, text: str, media: Sequence[Medium] = ()) -> MediaTokens:
    """Tokenises a rendered text that has one marker per entry of ``media``, in order. Adds no special tokens.

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
    kinds = [marked[piece] for piece in pieces if piece in marked]
    if kinds != [medium.kind for medium in media]:
        raise DataFailure(
            "media_mismatch",
            f"the rendered text has {len(kinds)} markers ({', '.join(marked)}) and the messages have {len(media)} media; "
            "a message that spells a marker as text cannot be sent to this model, and a template must write one for each",
        )
    remaining = iter(media)
    expanded = "".join(reader.expansion(next(remaining)) if piece in marked else piece for piece in pieces)
    ids = list(tokenizer(expanded, add_special_tokens=False)["input_ids"]) if expanded else []
    return MediaTokens(ids, _numbered(reader, ids, media))


class PieceEncoder:
    """Tokenises a rendered conversation piece by piece; each piece takes as many of the media as it has markers."""

    def __init__(self, tokenizer: Any, media: Sequence[Medium]):
        """``media``: those of the whole conversation, in order."""
        self._tokenizer, self._remaining = tokenizer, list(media)

    def encode(self, text: str) -> MediaTokens:
        """Tokenises the next piece; raises as the function `encode`."""
        reader = reader_of(self._tokenizer)
        count = sum(text.count(reader.marker(kind)) for kind in reader.kinds) if reader is not None else 0
        media, self._remaining = self._remaining[:count], self._remaining[count:]
        return encode(self._tokenizer, text, media)


def _numbered(reader: ReadsMedia, ids: Sequence[int], media: Sequence[Medium]) -> list[int]:
    """Returns the media number of each token. The placeholders of one kind of media belong, in order, to the media of this
    kind."""
    numbers = [0] * len(ids)
    for kind in reader.kinds:
        chosen = [medium for medium in media if medium.kind == kind]
        places = [i for i, token in enumerate(ids) if token == reader.placeholder(kind)]
        rows = [medium.number for medium in chosen for _ in range(reader.count(medium))]
        if len(places) != len(rows):
            raise DataFailure(
                "media_mismatch",
                f"{len(chosen)} media ({kind}) have {len(rows)} rows of features, and the prompt {len(places)} placeholders",
            )
        for place, number in zip(places, rows, strict=True):
            numbers[place] = number
    return numbers


def prompt_key(ids: Sequence[int], media: Sequence[int]) -> tuple[int, ...]:
    """Returns a prompt's identity ``[S]``: its tokens, with each placeholder replaced by its media number. ``media``:
    ``[S]``, or empty."""
    return tuple(number or token for token, number in zip(ids, media, strict=True)) if media else tuple(ids)


class Occurrence(NamedTuple):
    """A placeholder token and the row of a medium's features that replaces its embedding."""

    place: int
    """Index of the token in the argument ``media`` of `occurrences`."""

    number: int
    row: int
    """Row of the medium's features."""


def occurrences(media: Sequence[int], count: Mapping[int, int], before: Sequence[int] = ()) -> Iterator[Occurrence]:
    """Assigns rows of features to placeholder tokens. The placeholders of a medium take its rows in order, and start again
    at the first row when the medium is shown again.

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


def media_of(messages: Sequence[Mapping[str, Any]]) -> list[Medium]:
    """Returns the media in the parts of messages, in order, as `tandem.media.parts.read_media` has inserted them."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    media = (part.get("medium") for part in parts if isinstance(part, Mapping))
    return [medium for medium in media if isinstance(medium, Medium)]


def written(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Converts messages to JSON data: a medium becomes ``{"kind", "number", "size"}``. Its number is text, because not every
    reader of JSON supports integers of 64 bits."""

    def as_json(part: Any) -> Any:
        medium = part.get("medium") if isinstance(part, Mapping) else None
        if not isinstance(medium, Medium):
            return part
        return {**part, "medium": {"kind": medium.kind, "number": str(medium.number), "size": list(medium.size)}}

    def plain(message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        return {**message, "content": [*map(as_json, content)]} if isinstance(content, list | tuple) else dict(message)

    return [plain(message) for message in messages]


def kinds_of(content: Any) -> set[MediaKind]:
    """Returns the kinds of media in a message's content, also of parts that `read_media` has not read yet."""
    parts = content if isinstance(content, list | tuple) else ()
    return {PARTS[part["type"]] for part in parts if isinstance(part, Mapping) and part.get("type") in PARTS}


def unwritten(content: Any) -> Any:
    """Converts the content of a message from the JSON data of `written`. Raises `ValueError` if a medium is malformed."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "medium": _unwritten(part["medium"])} if isinstance(part, Mapping) and "medium" in part else part
        for part in content
    ]


def _unwritten(data: Any) -> Medium:
    try:
        width, height = data["size"]
        return Medium(data["kind"], int(data["number"]), (int(width), int(height)))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no medium: {data!r:.200}") from error
