"""Prompts with images and sounds as servers of other makers take them: files, and one placeholder for each.

The server's own processor puts the features' places there again, so what it says that the prompt became is compared with the
tokens that are trained.
"""

import asyncio
import base64
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tandem.api.failures import DataFailure
from tandem.api.media import MediaKind, Medium, reader_of
from tandem.media import store
from tandem.models.tokenizer import load_tokenizer


class MediaFile(NamedTuple):
    """A medium as it travels."""

    kind: MediaKind
    url: str
    """A data URL: PNG or WAV."""


class ServerPrompts:
    """Turns prompts of one model into what a server takes."""

    def __init__(self, folder: Path):
        self._tokenizer = load_tokenizer(folder)
        self.takes_media = reader_of(self._tokenizer) is not None
        self._written = lru_cache(1024)(self._write)

    async def pack(self, ids: Sequence[int], media: Sequence[int]) -> tuple[list[int], list[MediaFile]]:
        """The tokens with one placeholder for each medium, and the media in order.

        Args:
            ids: ``[S]``, expanded.
            media: the media numbers of the first of them; the rest is text.

        Raises:
            DataFailure: ``media_mismatch``: they are not expanded as this model's processor does. ``media_missing``: the
                media store does not have one. ``media_unreadable``: its file there is damaged.
        """
        try:
            made, shown = self._collapsed(list(ids), media)
            return made, [await asyncio.to_thread(_file, medium) for medium in shown]
        except store.MediaMissing as error:
            raise DataFailure(error.reason, str(error)) from error

    def _collapsed(self, ids: list[int], media: Sequence[int]) -> tuple[list[int], list[Medium]]:
        reader = reader_of(self._tokenizer)
        assert reader is not None
        made: list[int] = []
        shown: list[Medium] = []
        taken = 0
        for place, number in enumerate(media):
            if number and place >= taken:
                medium = store.medium(number)
                token, written = reader.placeholder(medium.kind), self._written(medium)
                start = place - written.index(token)  # markers of tiles may stand before the first placeholder
                end = start + len(written)
                if start < taken or ids[start:end] != written:
                    raise DataFailure(
                        "media_mismatch",
                        f"the {len(written)} tokens of medium {number} are not those at token {place} as its processor "
                        "writes them, so it cannot be sent to a server of another maker",
                    )
                made += [*ids[taken:start], token]
                shown.append(medium)
                taken = end
        return [*made, *ids[taken:]], shown

    def _write(self, medium: Medium) -> list[int]:
        reader = reader_of(self._tokenizer)
        assert reader is not None
        return list(self._tokenizer(reader.expansion(medium), add_special_tokens=False)["input_ids"])


def compare_prompts(ours: Sequence[int], theirs: Sequence[int], name: str) -> None:
    """Raises `DataFailure` where a server computed other tokens than those that are trained; with both numbers."""
    if list(ours) == list(theirs):
        return
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    raise DataFailure(
        "media_mismatch",
        f"{name} made {len(theirs)} tokens of a prompt with images or sounds that has {len(ours)} here; they differ from "
        f"token {place} on: its processor has other settings than the model's folder, see docs/servers.md",
    )


def _file(medium: Medium) -> MediaFile:
    kind = "image/png" if medium.kind == "image" else "audio/wav"
    return MediaFile(medium.kind, f"data:{kind};base64,{base64.b64encode(store.packed(medium.number)).decode()}")
