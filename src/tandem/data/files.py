"""Reads raw rows: of local files (jsonl, json, csv, parquet), of a folder with one or several files for each split, and of
data sets on the Hugging Face hub. No other module uses the optional library `datasets`.
"""

import csv
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.config.errors import ConfigError, install_extra, kind_and_text

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
SPLITS = ("train", "test", "validation", "valid", "val", "dev")


class Written(float):
    """A number from a JSON file that also has its original text, such as ``1e-05`` or ``0.10``."""

    text: str

    def __new__(cls, text: str) -> "Written":
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]
        return (self.text,)


class RawRow(NamedTuple):
    """One row of a file, unchanged."""

    columns: dict[str, Any]
    where: str
    """File and line (or row), for error messages."""


def read_file(file: Path) -> list[RawRow]:
    """Returns all rows of a file.

    Raises:
        ConfigError: the JSON is broken (the message names file and line), a row is not an object, or the file's ending is
            unknown.
    """
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    if file.suffix not in readers:
        raise ConfigError(f"{file} is not a data file; the endings are {', '.join(ENDINGS)}")
    try:
        return list(readers[file.suffix](file))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start}); convert it") from error


def read_folder(folder: Path, split: str | None, default_split: str) -> list[RawRow]:
    """Returns the rows of one split, from files such as `train.jsonl` or `train-00000-of-00002.parquet` in the folder or in
    its subfolder `data`.

    Raises:
        ConfigError: there are no data files, or none of this split; the message names the splits of the folder.
    """
    files = sorted(
        f for place in (folder, folder / "data") if place.is_dir() for f in place.iterdir() if f.suffix in ENDINGS
    )
    if not files:
        raise ConfigError(f"data set folder {folder} has no files ending in {', '.join(ENDINGS)}")
    name = split or default_split
    chosen = [f for f in files if f.stem == name or f.stem.startswith((name + "-", name + "_"))]
    if not chosen and split is None and name == "train" and len(files) == 1 and files[0].stem not in SPLITS:
        chosen = files
    if not chosen:
        splits = ", ".join(sorted({f.stem for f in files}))
        raise ConfigError(f"data set folder {folder} has no split {name!r}; there are {splits}: set split to one of them")
    return [row for file in chosen for row in read_file(file)]


def _row(columns: Any, where: str) -> RawRow:
    if not isinstance(columns, dict):
        raise ConfigError(f"{where}: a row must be an object of columns, got {type(columns).__name__}")
    return RawRow(columns, where)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. Raises `ValueError` if a key comes twice, for all values but the last would be lost.

    This makes reading a line of two texts 12 % slower, one with five messages 32 %: 1.5 s for a million of these.
    """
    columns = dict(pairs)
    if len(columns) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for key in keys if keys.count(key) > 1)
        first, second, *_ = (value for name, value in pairs if name == key)
        raise ValueError(f"the key {key!r} comes twice in one object, with {first!r:.60} and with {second!r:.60}")
    return columns


def _jsonl(file: Path) -> Iterator[RawRow]:
    with file.open(encoding="utf-8-sig") as lines:
        for i, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                columns = json.loads(line, parse_float=Written, object_pairs_hook=_object)
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
        rows = json.loads(file.read_text(encoding="utf-8-sig"), parse_float=Written, object_pairs_hook=_object)
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
    """Raises `ConfigError` for a lone surrogate, half of a character, such as ``"\\ud83d"``. JSON allows it; no tokenizer
    does."""
    try:
        json.dumps(columns, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: holds half a character, {error.object[error.start]!r}, which is not text; fix or remove the row"
        ) from None


def _csv(file: Path) -> Iterator[RawRow]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)  # strict: an unclosed quote is an error, not a long field
        reader.fieldnames = names = [name.strip() for name in _csv_names(reader, file)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(
                f"{file}:1: two columns are called {twice!r}, and only one could be read: rename or remove one"
            )
        if len(names) == 1 and (mark := next((mark for mark in ";\t|" if mark in names[0]), "")):
            raise ConfigError(f"{file}:1: the columns are separated by {mark!r}; write the file with commas")
        for columns in _csv_rows(reader, file):
            where = f"{file}:{reader.line_num}"
            if None in columns or None in columns.values():
                raise ConfigError(f"{where}: the row has another number of columns than the first line")
            yield RawRow(dict(columns), where)


def _csv_names(reader: "csv.DictReader[str]", file: Path) -> Sequence[str]:
    """Returns the names of the columns, which are the first line."""
    try:
        return reader.fieldnames or ()
    except csv.Error as error:
        raise ConfigError(f"{file}:1: not valid csv: {error}; mend it, or write .jsonl, one object a line") from error


def _csv_rows(reader: "csv.DictReader[str]", file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows. Turns an error of the csv format into a `ConfigError` with the last good line."""
    try:
        yield from reader
    except csv.Error as error:
        raise ConfigError(
            f"{file}, after line {reader.line_num}: not valid csv: {error}; mend it, or write .jsonl, one object a line"
        ) from error


def _parquet(file: Path) -> Iterator[RawRow]:
    yield from (RawRow(columns, f"{file}, row {i}") for i, columns in enumerate(read_parquet(file), 1))


def _need(purpose: str) -> None:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"{purpose} needs the library `datasets`: {install_extra('data')}")


def without_nulls(value: Any, calls: bool = False) -> Any:
    """Removes nulls within the tools and tool calls of a row. Arrow adds them: it gives each function the arguments of all
    other functions, with null as value. ``calls``: the value is within tools or tool calls."""
    if isinstance(value, dict):
        parts = {key: without_nulls(part, calls or key in ("tools", "tool_calls")) for key, part in value.items()}
        return {key: part for key, part in parts.items() if not (calls and part is None)}
    return [without_nulls(part, calls) for part in value] if isinstance(value, list) else value


def read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a parquet file.

    Raises:
        ConfigError: the library is not installed, or the file is not parquet.
    """
    _need(f"reading {file}")
    import pyarrow  # noqa: PLC0415 comes with the optional library
    import pyarrow.parquet  # noqa: PLC0415

    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{file} is not a parquet file: {error}") from error
    yield from map(without_nulls, table.to_pylist())


def read_hub(name: str, split: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a data set on the Hugging Face hub; ``openai/gsm8k:main`` chooses a configuration.

    Raises:
        ConfigError: the library is not installed; the data set, configuration or split does not exist; or the hub cannot be
            reached.
    """
    _need(f"there is no file or folder {name}, and a data set of the hub")
    import datasets  # noqa: PLC0415 optional library

    path, _, configuration = name.partition(":")
    try:
        if not configuration:
            names = datasets.get_dataset_config_names(path)
            configuration = "default" if "default" in names else "main" if "main" in names else names[0]
        rows = datasets.load_dataset(path, configuration, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"data set {name} (split {split!r}) could not be loaded: there is no such file or folder, and the hub said: "
            f"{' '.join(kind_and_text(error).split())[:300]}"
        ) from error
    if _has_media(rows.features):  # read in arrow format: media stay ``{"bytes": …, "path": …}`` and are not decoded
        rows = (row for table in rows.with_format("arrow").iter(256) for row in table.to_pylist())
    yield from map(without_nulls, rows)


def _has_media(feature: Any) -> bool:
    import datasets  # noqa: PLC0415 optional library

    inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
    return isinstance(feature, datasets.Image | datasets.Audio | datasets.Video) or any(map(_has_media, filter(None, inner)))


def hub_folders() -> list[Path]:
    """Returns the folders to which data sets of the hub are downloaded; none if the library is not installed."""
    if importlib.util.find_spec("datasets") is None:
        return []
    import datasets  # noqa: PLC0415 optional library
    import huggingface_hub.constants  # noqa: PLC0415

    return [Path(datasets.config.HF_DATASETS_CACHE), Path(huggingface_hub.constants.HF_HUB_CACHE)]
