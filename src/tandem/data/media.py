"""Puts the images and sounds of a row's columns into its messages, where a mark or a part shows their place."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.api.failures import DataFailure
from tandem.api.media import PARTS, MediaKind, Medium
from tandem.config.data import WHERE
from tandem.config.errors import ConfigError
from tandem.data.files import RawRow
from tandem.data.rows import Message, Row
from tandem.data.table import Table
from tandem.media.parts import Allowed, Source, source_of

log = logging.getLogger(__name__)

COLUMNS: dict[str, MediaKind] = {"image": "image", "images": "image", "audio": "audio", "audios": "audio"}
VIDEOS = ("video", "videos")
SIDES = ("messages", "completion", "chosen", "rejected")
"""Columns of a row that hold messages. Those other than `messages` continue its conversation."""


class RowMedia:
    """The images and sounds of a table's rows."""

    def __init__(self, table: Table, folders: Iterable[str | Path]):
        """Replaces the values in the table's columns of media by `Source` objects. ``folders``: the folders in which
        relative paths of files are looked up."""
        self._table = table
        self._allowed = Allowed(tuple(Path(os.path.expanduser(folder)) for folder in folders))
        self._sources: dict[str, dict[MediaKind, list[Source]]] = {}
        self._videos: set[str] = set()
        self.left_out: Counter[str] = Counter()
        """Number of rows that are left out, by reason."""

        columns = [name for name in (*COLUMNS, *VIDEOS) if table.has(name)]
        if columns:
            table.replace([self._sourced(row, columns) for row in table.rows])
        for name in columns:
            if any(table.samples(name)):
                table.column(name, "shown to the model")

    def placed(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the rows with their images and sounds in the messages, as parts ``{"type": kind, kind: Source}``. A row
        with missing, refused or damaged media is left out and counted; only the beginning of each file is checked.

        Raises:
            ConfigError: no row is left.
        """
        usable: list[Row] = []
        first: dict[str, str] = {}
        for row in rows:
            try:
                usable.append(self._placed(row))
            except DataFailure as failure:
                self.left_out[failure.reason] += 1
                first.setdefault(failure.reason, f"{row[WHERE]}: {failure.words}")
        if rows and not usable:
            raise ConfigError(
                f"no row has images and sounds that can be used. {next(iter(first.values()))}. To read only the text: "
                f"{self._table.section}media=false"
            )
        for reason, words in first.items():
            log.warning("%d of %d rows left out, %s; the first: %s", self.left_out[reason], len(rows), reason, words)
        return usable

    def _placed(self, row: Row) -> Row:
        if row[WHERE] in self._videos:
            raise DataFailure("media_refused", "the row has a video, which no model supports yet")
        placing = _Placing(self._sources.get(row[WHERE], {}), self._allowed)
        placed = placing.row(row)
        for source in placing.sources:
            source.check()
        return placed

    def _sourced(self, row: RawRow, names: Sequence[str]) -> RawRow:
        """Returns the row with `Source` objects in its columns of media."""
        columns = dict(row.columns)
        for name in names:
            value = columns.get(name)
            values = [item for item in (value if isinstance(value, list | tuple) else [value]) if not _is_nothing(item)]
            if values and name in VIDEOS:
                self._videos.add(row.where)
            elif values:
                kind = COLUMNS[name]
                columns[name] = [Source(kind, item, self._allowed) for item in values]
                self._sources.setdefault(row.where, {}).setdefault(kind, []).extend(columns[name])
        return RawRow(columns, row.where)


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | bytes) and not value)


class _Placing:
    """Puts the media of one row into its messages."""

    def __init__(self, column_media: Mapping[MediaKind, Sequence[Source]], allowed: Allowed):
        self._column_media, self._allowed = column_media, allowed
        self._next: Counter[MediaKind] = Counter()
        self.sources: list[Source] = []
        """All media of the row's messages, in order."""

        self._mark = re.compile("(" + "|".join(f"<{kind}>" for kind in column_media) + ")") if column_media else None

    def row(self, row: Row) -> Row:
        """Returns the row with media in its messages. Raises `DataFailure` if the places do not match the media."""
        sides: dict[str, list[Message]] = {}
        after_prompt: Counter[MediaKind] = Counter()
        for name in SIDES:
            if isinstance(row.get(name), list):
                if name == "rejected":
                    self._next, after_prompt = after_prompt, self._next
                sides[name] = [self._message(message) for message in row[name]]
                if name == "messages":
                    after_prompt = self._next.copy()
        in_front: list[Message] = []
        for kind, sources in self._column_media.items():
            used = max(self._next[kind], after_prompt[kind])
            if not used and not any(source.kind == kind for source in self.sources):
                in_front += map(self._shown, sources)
            elif used and used != len(sources):
                raise DataFailure("media_mismatch", f"the row has {len(sources)} {kind} media and {used} places for them")
        if in_front:
            _put_first(sides["messages"], in_front)
        return {**row, **sides}

    def _message(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, str):
            if self._mark is None or not self._mark.search(content):
                return message
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            return message
        return {**message, "content": [part for item in content for part in self._parts(item)]}

    def _parts(self, part: Any) -> list[Any]:
        if not isinstance(part, Mapping) or isinstance(part.get("medium"), Medium):
            return [part]
        text = part.get("text")
        if self._mark is not None and part.get("type") == "text" and isinstance(text, str):
            pieces = [piece for piece in self._mark.split(text) if piece]
            return [
                self._next_part(PARTS[piece[1:-1]]) if self._mark.fullmatch(piece) else {"type": "text", "text": piece}
                for piece in pieces
            ]
        kind = PARTS.get(str(part.get("type")))
        if (
            kind is not None
            and kind in self._column_media
            and all(value is None for key, value in part.items() if key not in ("type", "index"))
        ):
            return [self._next_part(kind)]
        source = source_of(part, self._allowed)
        return [part if source is None else self._shown(source)]

    def _next_part(self, kind: MediaKind) -> Message:
        """Returns the part for the next medium of this kind in the row's columns."""
        sources = self._column_media[kind]
        if self._next[kind] == len(sources):
            raise DataFailure("media_mismatch", f"the row has {len(sources)} {kind} media and more places for them")
        self._next[kind] += 1
        return self._shown(sources[self._next[kind] - 1])

    def _shown(self, source: Source) -> Message:
        self.sources.append(source)
        return {"type": source.kind, source.kind: source}


def _put_first(messages: list[Message], parts: list[Message]) -> None:
    """Puts media without a place in the messages at the start of the first message of the user."""
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        raise DataFailure("media_mismatch", "the row has media, but no message of the user to put them into")
    content = messages[at]["content"]
    content_parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    messages[at] = messages[at] | {"content": [*parts, *content_parts]}
