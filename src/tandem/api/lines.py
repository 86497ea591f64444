"""Lines of the files of a run: one value is one line, and a line that is added is whole or not there; and of tables."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tandem.api.failures import NotWritten

_SEPARATORS = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})
"""The marks that end a line for `str.splitlines`, but that JSON allows inside a string as they are."""


def json_line(value: Any) -> str:
    """Writes a value as one line of JSON for every reader, also for one that splits at Unicode's ends of lines.

    What JSON does not know is written as its text.
    """
    return json.dumps(value, ensure_ascii=False, default=str).translate(_SEPARATORS)


def append_line(path: Path, text: str) -> None:
    """Adds a line to a file of JSON lines, which is made where it is missing.

    Raises:
        NotWritten: the disk refuses; the file is as it was before.
    """
    data = f"{text}\n".encode()
    try:
        with path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                while data:  # a disk that is nearly full takes a part, and refuses the rest
                    data = data[file.write(data) or 0 :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> NotWritten:
    """The message about a file that the disk refuses."""
    return NotWritten(
        f"{path} could not be written: {error}. It is as it was before, and so are the checkpoints: free some space there, "
        "or make it writable, and repeat the command"
    )


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old text or the new one, whole, also after the power was cut.

    Raises:
        OSError: the disk refuses; the file is as it was before.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Writes a file, or the entries of a folder, to the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table, its columns as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
