"""Images and sounds of rows: those of their columns go where the messages have a mark or a part for them."""

import logging
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
"""Columns of rows that hold messages; all follow the first."""


class RowMedia:
    """The images and sounds of a table's rows."""

    def __init__(self, table: Table, folders: Iterable[str | Path]):
        """Puts sources in place of what the table has in columns of media. ``folders``: in which paths are looked up."""
        self._table = table
        self._allowed = Allowed(tuple(Path(folder).expanduser() for folder in folders))
        self._given: dict[str, dict[MediaKind, list[Source]]] = {}
        self._videos: set[str] = set()
        self.left_out: Counter[str] = Counter()
        """Rows that are left out, by reason."""

        there = [name for name in (*COLUMNS, *VIDEOS) if table.has(name)]
        if there:
            table.replace([self._sourced(row, there) for row in table.rows])
        for name in there:
            if any(table.samples(name)):
                table.column(name, "shown to the model")

    def placed(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with their images and sounds in the messages, as parts ``{"type": kind, kind: Source}``. A row whose
        media are missing, refused or damaged, as far as the beginning of their files says it, is left out and counted.

        Raises:
            ConfigError: no row is left.
        """
        found: list[Row] = []
        first: dict[str, str] = {}
        for row in rows:
            try:
                found.append(self._placed(row))
            except DataFailure as failure:
                self.left_out[failure.reason] += 1
                first.setdefault(failure.reason, f"{row[WHERE]}: {failure.words}")
        if rows and not found:
            raise ConfigError(
                f"no row has images and sounds that can be used. {next(iter(first.values()))}. To read the text alone: "
                f"{self._table.section}media=false"
            )
        for reason, words in first.items():
            log.warning("%d of %d rows left out, %s; the first: %s", self.left_out[reason], len(rows), reason, words)
        return found

    def _placed(self, row: Row) -> Row:
        if row[WHERE] in self._videos:
            raise DataFailure("media_refused", "the row has a video, and no model takes one yet")
        placing = _Placing(self._given.get(row[WHERE], {}), self._allowed)
        placed = placing.row(row)
        for source in placing.sources:
            source.check()
        return placed

    def _sourced(self, row: RawRow, names: Sequence[str]) -> RawRow:
        """The row with sources in its columns of media."""
        columns = dict(row.columns)
        for name in names:
            value = columns.get(name)
            values = [one for one in (value if isinstance(value, list | tuple) else [value]) if not _is_nothing(one)]
            if values and name in VIDEOS:
                self._videos.add(row.where)
            elif values:
                kind = COLUMNS[name]
                columns[name] = [Source(kind, one, self._allowed) for one in values]
                self._given.setdefault(row.where, {}).setdefault(kind, []).extend(columns[name])
        return RawRow(columns, row.where)


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | bytes) and not value)


class _Placing:
    """The media of one row on their way into its messages."""

    def __init__(self, given: Mapping[MediaKind, Sequence[Source]], allowed: Allowed):
        self._given, self._allowed = given, allowed
        self._next: Counter[MediaKind] = Counter()
        self.sources: list[Source] = []
        """All that the row shows."""

        self._mark = re.compile("(" + "|".join(f"<{kind}>" for kind in given) + ")") if given else None

    def row(self, row: Row) -> Row:
        """The row with media in its messages. Raises `DataFailure`."""
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
        for kind, sources in self._given.items():
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
        return {**message, "content": [part for one in content for part in self._parts(one)]}

    def _parts(self, part: Any) -> list[Any]:
        if not isinstance(part, Mapping) or isinstance(part.get("medium"), Medium):
            return [part]
        text = part.get("text")
        if self._mark is not None and part.get("type") == "text" and isinstance(text, str):
            pieces = [piece for piece in self._mark.split(text) if piece]
            return [
                self._taken(PARTS[piece[1:-1]]) if self._mark.fullmatch(piece) else {"type": "text", "text": piece}
                for piece in pieces
            ]
        kind = PARTS.get(str(part.get("type")))
        if kind in self._given and all(value is None for key, value in part.items() if key not in ("type", "index")):
            return [self._taken(kind)]
        source = source_of(part, self._allowed)
        return [part if source is None else self._shown(source)]

    def _taken(self, kind: MediaKind) -> Message:
        """The part of the next medium of the row's columns."""
        sources = self._given[kind]
        if self._next[kind] == len(sources):
            raise DataFailure("media_mismatch", f"the row has {len(sources)} {kind} media and more places for them")
        self._next[kind] += 1
        return self._shown(sources[self._next[kind] - 1])

    def _shown(self, source: Source) -> Message:
        self.sources.append(source)
        return {"type": source.kind, source.kind: source}


def _put_first(messages: list[Message], parts: list[Message]) -> None:
    """Media for which the messages have no place stand in front of what the user says first."""
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        raise DataFailure("media_mismatch", "the row has media, and no message of the user that they could stand in")
    content = messages[at]["content"]
    said = [{"type": "text", "text": content}] if isinstance(content, str) else content
    messages[at] = messages[at] | {"content": [*parts, *said]}
