"""A tool for keyword search over a folder of texts, with SQLite's full-text index in memory."""

import json
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tandem.config.errors import ConfigError
from tandem.rollout.tools.tool import Tool, Toolbox, ToolFailure, tool_schema

SUFFIXES = (".txt", ".md", ".rst", ".jsonl")


class SearchBox(Toolbox):
    """The tools `search` and `read`: passages of a folder of text files, or of JSONL files with ``title`` and ``text``.

    The index is built once for a run and shared by its episodes.
    """

    def __init__(self, folder: str, *, results: int = 3, passage_characters: int = 800):
        """``results``: maximum number of passages that a search returns; ``passage_characters``: approximate length of a
        passage."""
        root = Path(folder).expanduser()
        if not root.exists():
            raise ConfigError(f"tool search: there is no folder {root}")
        if results < 1 or passage_characters < 1:
            raise ConfigError(
                f"tool search: results and passage_characters must be at least 1, got {results}, {passage_characters}"
            )
        self.results, self._lock = results, threading.Lock()
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize='porter unicode61')")
        rows = [(title, passage) for title, text in sorted(_texts(root)) for passage in passages(text, passage_characters)]
        if not rows:
            raise ConfigError(f"tool search: {root} has no text; it reads {', '.join(SUFFIXES)}")
        self._index.executemany("INSERT INTO passages VALUES (?, ?)", rows)

    @asynccontextmanager
    async def open(self, data: Mapping[str, Any]) -> Any:
        """Implements `Toolbox.open`."""
        yield (Tool(tool_schema(self.search), self._search), Tool(tool_schema(self.read), self._read))

    def search(self, query: str) -> str:
        """Finds passages about something.

        Args:
            query: a few words
        """
        words = re.findall(r"\w+", query)
        if not words:
            raise ToolFailure("the query has no words")
        match = " OR ".join(f'"{word}"' for word in words)
        order = (
            "SELECT rowid, title, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages, 3.0, 1.0), rowid LIMIT ?"
        )
        with self._lock:
            rows = self._index.execute(order, (match, self.results)).fetchall()
        return "\n\n".join(f"[{number}] {title}\n{text}" for number, title, text in rows) or "Nothing was found."

    def read(self, number: int) -> str:
        """Reads on: the passage of this number, as those before and after one that was found.

        Args:
            number: of the passage
        """
        with self._lock:
            row = self._index.execute("SELECT title, text FROM passages WHERE rowid = ?", (number,)).fetchone()
        if row is None:
            raise ToolFailure(f"there is no passage {number}")
        return f"[{number}] {row[0]}\n{row[1]}"

    async def _search(self, arguments: Mapping[str, Any]) -> str:
        return self.search(str(arguments["query"]))

    async def _read(self, arguments: Mapping[str, Any]) -> str:
        return self.read(int(arguments["number"]))

    def close(self) -> None:
        """Implements `Toolbox.close`."""
        self._index.close()


def _texts(root: Path) -> Iterator[tuple[str, str]]:
    """Yields title and text of each document in a folder or in one file."""
    for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
        if not path.is_file() or path.suffix not in SUFFIXES:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix != ".jsonl":
            yield str(path.relative_to(root)) if path != root else path.name, text
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield _row(line, f"{path}, line {number}")


def _row(line: str, where: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
        return str(row.get("title", "")), str(row["text"])
    except (ValueError, KeyError, AttributeError):
        raise ConfigError(f'tool search: {where} is not a JSON object with "text"') from None


def passages(text: str, characters: int) -> Iterator[str]:
    """Yields pieces of about ``characters`` characters, cut between paragraphs; long paragraphs are cut between words."""
    piece = ""
    for part in re.split(r"\n\s*\n", text):
        if piece and len(piece) + len(part) > characters:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{part}".strip()
        while len(piece) > 2 * characters:
            cut = piece.rfind(" ", 1, characters)
            cut = cut if cut > 0 else characters
            yield piece[:cut]
            piece = piece[cut:].strip()
    if piece:
        yield piece
