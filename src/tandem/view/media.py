"""Images and sounds for a page: small copies as data URLs, made of the media store."""

import base64
import io
from typing import Any

from PIL import Image

from tandem.config.errors import ConfigError
from tandem.media import store

MOST_MEDIA = 24
"""Media of a sample that are shown."""

SIDE = 384
"""Pixels of the longer side of a shown image."""

MOST_SAMPLES = 30 * store.RATE
"""Samples of a sound that can be played; the rest is cut."""


def media_numbers(messages: Any) -> list[int]:
    """The numbers of the media in recorded messages, in order."""
    contents = [turn.get("content") for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    media = [part["medium"] for part in parts if isinstance(part.get("medium"), dict)]
    told = [str(one.get("number")) for one in media]
    return [int(number) for number in told if number.removeprefix("-").isdecimal() and len(number) < 21][:MOST_MEDIA]


class ShownMedia:
    """The media of one answer to a page: each is in it once, the samples of a group share theirs."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def of(self, number: int) -> dict[str, str]:
        """``{"number", "kind", "url"}``; without the URL where it was told before; ``{"number", "missing"}`` where the store
        does not have it any more."""
        if number in self._told:
            return {"number": str(number)}
        self._told.add(number)
        try:
            kind = store.medium(number).kind
            data = _png(number) if kind == "image" else _wav(number)
        except ConfigError as error:
            return {"number": str(number), "missing": str(error)}
        form = "image/png" if kind == "image" else "audio/wav"
        return {"number": str(number), "kind": kind, "url": f"data:{form};base64,{base64.b64encode(data).decode()}"}


def _png(number: int) -> bytes:
    image = Image.fromarray(store.image(number))
    image.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _wav(number: int) -> bytes:
    out = io.BytesIO()
    store.write_sound(out, (store.sound(number)[:MOST_SAMPLES] * 2**15).astype("<i2"))
    return out.getvalue()
