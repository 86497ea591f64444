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

from tandem.api.plugins import in_user_code, is_file_spec, load_object, told_if_slow
from tandem.config.data import WHERE, DatasetConfig, SourceConfig
from tandem.config.errors import ConfigError
from tandem.data.examples import Reader
from tandem.data.files import ENDINGS, RawRow, read_file, read_folder
from tandem.data.hub import hub_folders, read_hub
from tandem.data.known import locate
from tandem.data.media import RowMedia
from tandem.data.procedural import PROCEDURAL, reasoning_gym
from tandem.data.rows import Row, normalise
from tandem.data.table import Reading, Table

MOST_ROWS = 10_000_000
"""A user's function that gives more than this, without `max_rows`, has no end: all rows are held in memory."""


class Dataset(Sequence[Row]):
    """Rows, and which of them make an epoch, in which order.

    With one source an epoch is every row once. With several, an epoch is as long as the weights allow without repeating a
    row: the sources' shares are exact to one row, and a source that is larger than its share goes on where it stopped
    in the next epoch. ``len`` and indices are those of epoch 0 in the order of the files; `rows` are all there are.
    """

    def __init__(
        self, parts: Sequence[Sequence[Row]], weights: Sequence[float] | None = None, readings: Sequence[Reading] = ()
    ):
        """``readings``: what was read of each part's columns."""
        self.readings = readings
        self.rows: list[Row] = [row for part in parts for row in part]
        self._sizes = [len(part) for part in parts]
        weights = list(weights) if weights is not None else [1.0] * len(parts)
        shares = [weight / sum(weights) for weight in weights]
        whole = min(size / share for size, share in zip(self._sizes, shares, strict=True))
        # A tiny excess, so that 30 / (30 / 40) does not become 39 by rounding.
        self._counts = [
            min(size, max(1, int(whole * share + 1e-9))) for size, share in zip(self._sizes, shares, strict=True)
        ]
        self._first = self.order(0, seed=0, shuffle=False)

    def order(self, epoch: int, *, seed: int, shuffle: bool) -> list[int]:
        """Indices into `rows` of one epoch; the same for the same arguments."""
        places: list[tuple[float, int]] = []
        start = 0
        for source, (size, count) in enumerate(zip(self._sizes, self._counts, strict=True)):
            own = list(range(start, start + size))
            if shuffle:
                random.Random(f"{seed}/{source}").shuffle(own)
            chosen = [own[(epoch * count + j) % size] for j in range(count)]
            places += [((j + 0.5) / count, index) for j, index in enumerate(chosen)]
            start += size
        places.sort(key=lambda place: place[0])
        indices = [index for _, index in places]
        if shuffle:
            random.Random(f"{seed}/epoch {epoch}").shuffle(indices)
        return indices

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with any row, and with their order and weights, but not with the place that they are read from."""
        digest = hashlib.sha256(json.dumps([self._sizes, self._counts]).encode())
        for row in self.rows:
            told = {name: value for name, value in row.items() if name != WHERE}
            digest.update(json.dumps(told, sort_keys=True, default=_told).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        """Rows in one epoch."""
        return len(self._first)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Rows of epoch 0 in the order of the files."""
        if isinstance(index, slice):
            return [self.rows[i] for i in self._first[index]]
        return self.rows[self._first[index]]

    def __iter__(self) -> Iterator[Row]:
        """Rows of epoch 0 in the order of the files."""
        return (self.rows[i] for i in self._first)


def _told(value: object) -> object:
    """Values that JSON has no word for: numbers of arrays, and dates and the like as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def load_dataset(
    config: DatasetConfig, *, seed: int = 0, default_split: str = "train", reader: Reader = normalise, section: str = ""
) -> Dataset:
    """Reads the rows that a configuration names.

    ``default_split`` is taken where ``config.split`` is null: `train` for training, `test` for validation. ``reader``: gives
    rows their shape, questions with answers unless another one (`tandem.data.examples`) is given.

    Raises:
        ConfigError: missing or empty data set, missing column, broken line, wrong type; says where.
    """
    if config.path is None and not config.sources:
        raise ConfigError("the data set has no path: give a folder, a file, a hub name, `addition` or reasoning_gym:NAME")
    sources = config.sources or (SourceConfig(config.path or ""),)
    found = [_load(replace(config, path=s.path), s, seed, default_split, reader, section) for s in sources]
    weights = [source.weight for source in sources]
    return Dataset([rows for rows, _ in found], weights, [reading for _, reading in found])


def _load(
    config: DatasetConfig, source: SourceConfig, seed: int, default_split: str, reader: Reader, section: str
) -> tuple[list[Row], Reading]:
    try:
        raw = _read(source.path, config, seed, default_split)
    except (OSError, RuntimeError) as error:  # no permission, a name too long, a home folder that nobody has
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
    """The folders in which the paths of a source's rows are looked up."""
    if is_file_spec(path):
        return [Path(path.partition(":")[0]).expanduser().parent]
    local = Path(path).expanduser()
    if local.is_dir():
        return [local, local / "data"]
    return [local.parent] if local.is_file() else hub_folders() if "/" in path else []


def _read(path: str, config: DatasetConfig, seed: int, default_split: str) -> list[RawRow]:
    split = config.split or default_split
    if path in PROCEDURAL:
        return _located(PROCEDURAL[path](split, size=config.size, seed=seed), path)
    if path.startswith("reasoning_gym:"):
        return _located(reasoning_gym(path.partition(":")[2], split, size=config.size, seed=seed), path)
    if is_file_spec(path):
        own, most = load_object(path), config.max_rows or MOST_ROWS + 1
        with told_if_slow(path):
            rows = in_user_code(path, lambda: list(itertools.islice(own() if callable(own) else own, most)))
        if len(rows) > (config.max_rows or MOST_ROWS):
            raise ConfigError(f"data set {path} gives more than {MOST_ROWS} rows, or has no end; set max_rows")
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
    """Passes ``rows`` on, and says on stderr every ``every_s`` seconds how many have been computed."""
    told = time.monotonic()
    for i, row in enumerate(rows, 1):
        yield row
        if time.monotonic() - told >= every_s:
            print(f"{path}: {i:,} rows …", file=sys.stderr, flush=True)
            told = time.monotonic()
