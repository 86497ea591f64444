"""Rows of local files: jsonl, json, csv, parquet; a folder of them has one file (or several) a split."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tandem.config.errors import ConfigError
from tandem.data.hub import read_parquet

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
SPLITS = ("train", "test", "validation", "valid", "val", "dev")


class Written(float):
    """A number of a JSON file that still knows how it was written, such as ``1e-05`` or ``0.10``."""

    text: str

    def __new__(cls, text: str) -> "Written":
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]
        return (self.text,)


class RawRow(NamedTuple):
    """One row as it stands in its file."""

    columns: dict[str, Any]
    where: str
    """File and line (or row), for error messages."""


def read_file(file: Path) -> list[RawRow]:
    """All rows.

    Raises:
        ConfigError: broken JSON (with file and line), a row that is not an object, an ending we do not know.
    """
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    if file.suffix not in readers:
        raise ConfigError(f"{file} is not a data file; the endings are {', '.join(ENDINGS)}")
    try:
        return list(readers[file.suffix](file))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start}); convert it") from error


def read_folder(folder: Path, split: str | None, default_split: str) -> list[RawRow]:
    """The rows of one split: `train.jsonl`, `train-00000-of-00002.parquet`, in the folder or in its `data/`.

    Raises:
        ConfigError: no data files, or not this split; names those that are there.
    """
    files = sorted(
        f for place in (folder, folder / "data") if place.is_dir() for f in place.iterdir() if f.suffix in ENDINGS
    )
    if not files:
        raise ConfigError(f"data set folder {folder} has no files ending in {', '.join(ENDINGS)}")
    wanted = split or default_split
    chosen = [f for f in files if f.stem == wanted or f.stem.startswith((wanted + "-", wanted + "_"))]
    if not chosen and split is None and wanted == "train" and len(files) == 1 and files[0].stem not in SPLITS:
        chosen = files
    if not chosen:
        there = ", ".join(sorted({f.stem for f in files}))
        raise ConfigError(f"data set folder {folder} has no split {wanted!r}; there are {there}: set split to one of them")
    return [row for file in chosen for row in read_file(file)]


def _row(columns: Any, where: str) -> RawRow:
    if not isinstance(columns, dict):
        raise ConfigError(f"{where}: a row must be an object of columns, got {type(columns).__name__}")
    return RawRow(columns, where)


def _jsonl(file: Path) -> Iterator[RawRow]:
    with file.open(encoding="utf-8-sig") as lines:
        for i, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                columns = json.loads(line, parse_float=Written)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{file}:{i}: not valid JSON ({error.msg}, column {error.colno}); mend or remove the line"
                ) from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
                raise ConfigError(f"{file}:{i}: {error}; mend or remove the line") from error
            if "\\u" in line:
                _refuse_half_characters(columns, f"{file}:{i}")
            yield _row(columns, f"{file}:{i}")


def _json(file: Path) -> Iterator[RawRow]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"), parse_float=Written)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{file}:{error.lineno}: not valid JSON ({error.msg}); is it one object a line? Then call it .jsonl"
        ) from error
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise ConfigError(f"{file}: {error}; mend it") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{file} must hold a list of rows, got {type(rows).__name__}")
    for i, columns in enumerate(rows, 1):
        _refuse_half_characters(columns, f"{file}, row {i}")
        yield _row(columns, f"{file}, row {i}")


def _refuse_half_characters(columns: Any, where: str) -> None:
    """JSON may hold half of a character outside of Unicode's first plane, such as ``"\\ud83d"``; no tokenizer takes one."""
    try:
        json.dumps(columns, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: holds half a character, {error.object[error.start]!r}, which is no text; mend or remove the row"
        ) from None


def _csv(file: Path) -> Iterator[RawRow]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)  # a quote that nobody closes is an error, not a long field
        for columns in _told(reader, file):
            where = f"{file}:{reader.line_num}"
            if None in columns or None in columns.values():
                raise ConfigError(f"{where}: the row has another number of columns than the first line")
            yield RawRow(dict(columns), where)


def _told(reader: "csv.DictReader[str]", file: Path) -> Iterator[dict[str, Any]]:
    """The rows; what is wrong with the file, and after which line, as a ConfigError."""
    try:
        yield from reader
    except csv.Error as error:
        raise ConfigError(
            f"{file}, after line {reader.line_num}: not valid csv: {error}; mend it, or write .jsonl, one object a line"
        ) from error


def _parquet(file: Path) -> Iterator[RawRow]:
    yield from (RawRow(columns, f"{file}, row {i}") for i, columns in enumerate(read_parquet(file), 1))
