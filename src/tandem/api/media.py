"""Images and sounds of a prompt: named by what they hold, and never carried along.

A medium is kept once, in the media store, under its number. Everything else (chats, requests, samples, batches, the wire)
has tokens, and beside them the *media numbers*: for every token the number of the medium whose placeholder it is, 0 for
text. A prompt's identity is its `prompt_key`, in which the numbers stand at the placeholders: so prompts with equal tokens
and other pictures are told apart wherever prompts are compared. Whoever computes with a medium asks the store for it by its
number.
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


class PieceEncoder:
    """Turns the pieces of one rendered conversation into tokens, one after another; each takes the media of its markers."""

    def __init__(self, tokenizer: Any, media: Sequence[Medium]):
        """``media``: of the whole conversation, in order."""
        self._tokenizer, self._left = tokenizer, list(media)

    def encode(self, text: str) -> MediaTokens:
        """The tokens of the next piece; raises as `encode`."""
        reader = reader_of(self._tokenizer)
        count = sum(text.count(reader.marker(kind)) for kind in reader.kinds) if reader is not None else 0
        own, self._left = self._left[:count], self._left[count:]
        return encode(self._tokenizer, text, own)


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
                f"{len(own)} media ({kind}) have {len(wanted)} rows of features, and the prompt {len(places)} placeholders",
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


def media_of(messages: Sequence[Mapping[str, Any]]) -> list[Medium]:
    """The media of messages, in order: those of their parts, which `tandem.media.parts.read_media` has put there."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    found = (part.get("medium") for part in parts if isinstance(part, Mapping))
    return [medium for medium in found if isinstance(medium, Medium)]


def written(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as JSON has them: a medium is ``{"kind", "number", "size"}``, its number as text, for readers that know
    no whole numbers of 64 bits."""

    def part(one: Any) -> Any:
        medium = one.get("medium") if isinstance(one, Mapping) else None
        if not isinstance(medium, Medium):
            return one
        return {**one, "medium": {"kind": medium.kind, "number": str(medium.number), "size": list(medium.size)}}

    contents = (message.get("content") for message in messages)
    plain = ([part(one) for one in content] if isinstance(content, list | tuple) else content for content in contents)
    return [
        {**message, "content": content} if "content" in message else dict(message)
        for message, content in zip(messages, plain, strict=True)
    ]


def kinds_of(content: Any) -> set[MediaKind]:
    """The kinds of media that a message's content has parts of, read or not."""
    parts = content if isinstance(content, list | tuple) else ()
    return {PARTS[part["type"]] for part in parts if isinstance(part, Mapping) and part.get("type") in PARTS}


def unwritten(content: Any) -> Any:
    """The content of a message that `written` has made, with its media again. Raises `ValueError` for anything else."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "medium": _unwritten(part["medium"])} if isinstance(part, Mapping) and "medium" in part else part
        for part in content
    ]


def _unwritten(told: Any) -> Medium:
    try:
        width, height = told["size"]
        return Medium(told["kind"], int(told["number"]), (int(width), int(height)))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no medium: {told!r:.200}") from error
