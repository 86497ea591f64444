"""Data sets: one source, or several mixed by weight."""

import functools
import hashlib
import itertools
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

from tandem.api.plugins import in_user_code, is_file_spec, load_object, warn_if_slow
from tandem.config.data import WHERE, DatasetConfig, SourceConfig
from tandem.config.errors import ConfigError
from tandem.data.examples import Reader
from tandem.data.files import ENDINGS, RawRow, hub_folders, read_file, read_folder, read_hub
from tandem.data.known import locate
from tandem.data.media import RowMedia
from tandem.data.procedural import PROCEDURAL, check_split, reasoning_gym
from tandem.data.rows import Row, normalise
from tandem.data.table import Reading, Table

MOST_ROWS = 10_000_000
"""Maximum number of rows that a user's function may yield if `max_rows` is not set, because all rows are held in memory."""


class Dataset(Sequence[Row]):
    """The rows of one or several sources, and the order of the rows in each epoch.

    With one source an epoch is every row once. With several, an epoch is as long as the weights allow without repeating a
    row, and each source's share is exact to one row. If an epoch uses only a part of a source, the next epoch continues with
    the following rows of this source. ``len`` and indices refer to epoch 0 in the order of the files; `rows` holds all rows.
    """

    def __init__(
        self, parts: Sequence[Sequence[Row]], weights: Sequence[float] | None = None, readings: Sequence[Reading] = ()
    ):
        """Mixes ``parts`` by ``weights`` (None: equal weights). ``readings``: one for each part, with the columns that were
        read."""
        self.readings = readings
        self.rows: list[Row] = [row for part in parts for row in part]
        self._sizes = [len(part) for part in parts]
        weights = list(weights) if weights is not None else [1.0] * len(parts)
        shares = [weight / sum(weights) for weight in weights]
        epoch_size = min(size / share for size, share in zip(self._sizes, shares, strict=True))
        # A tiny excess, so that 30 / (30 / 40) does not become 39 by rounding.
        self._counts = [
            min(size, max(1, int(epoch_size * share + 1e-9))) for size, share in zip(self._sizes, shares, strict=True)
        ]
        self._first = self.order(0, seed=0, shuffle=False)

    def order(self, epoch: int, *, seed: int, shuffle: bool) -> list[int]:
        """Returns the indices into `rows` of one epoch. The order depends on the arguments alone."""
        places: list[tuple[float, int]] = []
        start = 0
        for source, (size, count) in enumerate(zip(self._sizes, self._counts, strict=True)):
            pool = list(range(start, start + size))
            if shuffle:
                random.Random(f"{seed}/{source}").shuffle(pool)
            chosen = [pool[(epoch * count + j) % size] for j in range(count)]
            places += [((j + 0.5) / count, index) for j, index in enumerate(chosen)]
            start += size
        places.sort(key=lambda place: place[0])
        indices = [index for _, index in places]
        if shuffle:
            random.Random(f"{seed}/epoch {epoch}").shuffle(indices)
        return indices

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the rows, their order and the weights. It does not depend on the path of the files."""
        digest = hashlib.sha256(json.dumps([self._sizes, self._counts]).encode())
        for row in self.rows:
            columns = {name: value for name, value in row.items() if name != WHERE}
            digest.update(json.dumps(columns, sort_keys=True, default=_jsonable).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        """Returns the number of rows in one epoch."""
        return len(self._first)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Returns rows of epoch 0 in the order of the files."""
        if isinstance(index, slice):
            return [self.rows[i] for i in self._first[index]]
        return self.rows[self._first[index]]

    def __iter__(self) -> Iterator[Row]:
        """Iterates over the rows of epoch 0 in the order of the files."""
        return (self.rows[i] for i in self._first)


def _jsonable(value: object) -> object:
    """Converts a value that JSON cannot hold: an array becomes numbers, any other value, such as a date, becomes text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def load_dataset(
    config: DatasetConfig, *, seed: int = 0, default_split: str = "train", reader: Reader = normalise, section: str = ""
) -> Dataset:
    """Reads the rows that a configuration names.

    Args:
        config: the path or sources, the columns and the split.
        seed: the seed of generated data sets.
        default_split: the split if ``config.split`` is null: `train` for training, `test` for validation.
        reader: converts the raw rows to a format: `normalise` (questions with answers), or one of `tandem.data.examples`.
        section: the configuration section of the data set, such as ``train_dataset.``, for error messages.

    Raises:
        ConfigError: a data set is missing or empty, a column is missing, a line is broken, or a value has the wrong type;
            the message names the file and line.
    """
    if config.path is None and not config.sources:
        raise ConfigError("the data set has no path: give a folder, a file, a hub name, `addition` or reasoning_gym:NAME")
    sources = config.sources or (SourceConfig(config.path or ""),)
    loaded = [_load(replace(config, path=s.path), s, seed, default_split, reader, section) for s in sources]
    weights = [source.weight for source in sources]
    return Dataset([rows for rows, _ in loaded], weights, [reading for _, reading in loaded])


def _load(
    config: DatasetConfig, source: SourceConfig, seed: int, default_split: str, reader: Reader, section: str
) -> tuple[list[Row], Reading]:
    try:
        raw = _read(source.path, config, seed, default_split)
    except (OSError, RuntimeError) as error:  # no permission, a name too long, `~user` of an unknown user
        raise ConfigError(f"data set {source.path} cannot be read: {error}") from error
    if config.max_rows is not None:
        raw = raw[: config.max_rows]
    if not raw:
        raise ConfigError(
            f"data set {source.path} (split {config.split or default_split!r}) is empty; it needs at least one row"
        )
    table = Table(raw, config, section)
    media = RowMedia(table, [*_folders(source.path), *config.media_folders]) if config.media else None
    rows = reader(table, source=source.label, reward=source.reward)
    if media is None:
        return rows, table.reading(source.label)
    rows = media.placed(rows)
    return rows, replace(table.reading(source.label), left_out=media.left_out)


def _folders(path: str) -> list[Path]:
    """Returns the folders in which the relative paths of media files in a source's rows are looked up."""
    if is_file_spec(path):
        return [Path(path.partition(":")[0]).expanduser().parent]
    local = Path(path).expanduser()
    if local.is_dir():
        return [local, local / "data"]
    return [local.parent] if local.is_file() else hub_folders() if "/" in path else []


def _read(path: str, config: DatasetConfig, seed: int, default_split: str) -> list[RawRow]:
    split = config.split or default_split
    if path in PROCEDURAL:
        check_split(path, split)
        return _located(PROCEDURAL[path](split, size=config.size, seed=seed), path)
    if path.startswith("reasoning_gym:"):
        return _located(reasoning_gym(path.partition(":")[2], split, size=config.size, seed=seed), path)
    if is_file_spec(path):
        user_rows, max_rows = load_object(path), config.max_rows or MOST_ROWS + 1
        with warn_if_slow(path):
            rows = in_user_code(
                path, lambda: list(itertools.islice(user_rows() if callable(user_rows) else user_rows, max_rows))
            )
        if len(rows) > (config.max_rows or MOST_ROWS):
            raise ConfigError(f"data set {path} yields more than {MOST_ROWS} rows, or never ends; set max_rows")
        wrong = next((row for row in rows if not isinstance(row, dict)), None)
        if wrong is not None:
            raise ConfigError(f"data set {path}: a row must be a dict of columns, got {wrong!r}")
        return _located(rows, path)
    local = Path(path).expanduser()
    if local.is_dir():
        return read_folder(local, config.split, default_split)
    if local.is_file():
        if config.split is not None:
            raise ConfigError(f"split={config.split} chooses a file of a folder, but {path} is a file; leave split out")
        return read_file(local)
    if local.suffix in ENDINGS or local.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ConfigError(
            f"data set {path} does not exist; looked in {Path.cwd() if not local.is_absolute() else local.parent}"
        )
    return _located(read_hub(locate(path, None)[0], split), path)


def _located(rows: Iterable[Row], path: str) -> list[RawRow]:
    return [RawRow(row, f"{path}, row {i}") for i, row in enumerate(with_progress(rows, path), 1)]


def with_progress(rows: Iterable[Row], path: str, every_s: float = 10.0) -> Iterator[Row]:
    """Yields ``rows`` unchanged, and prints their number so far to stderr every ``every_s`` seconds."""
    reported_at = time.monotonic()
    for i, row in enumerate(rows, 1):
        yield row
        if time.monotonic() - reported_at >= every_s:
            print(f"{path}: {i:,} rows …", file=sys.stderr, flush=True)
            reported_at = time.monotonic()
