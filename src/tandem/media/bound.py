"""A media store of one server with a limit in bytes; the least recently used media are removed first."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.api.failures import NotWritten
from tandem.api.media import Medium
from tandem.config.errors import ConfigError
from tandem.config.libraries import media_folder
from tandem.media import store
from tandem.media.parts import Source

REST_S = 60.0
"""Minimum time in seconds that a medium stays in the store after its last use. A request that was just read may still need
it in the engine."""

_PREFIX = "server-"


class StoreBound:
    """Limits the size of a media store. Tracks the media that this process puts there, and the time of their last use. No
    other process may use the store's folder."""

    def __init__(self, max_bytes: int, rest_s: float = REST_S):
        """``max_bytes``: maximum size of all files together, in bytes. ``rest_s``: see `REST_S`."""
        self._max_bytes, self._rest_s, self._lock = max_bytes, rest_s, threading.Lock()
        self._sizes, self._used, self._running = OrderedDict[int, int](), dict[int, float](), Counter[int]()
        self.num_bytes = 0

    def keep(self, source: Source) -> Medium:
        """Puts the medium of a source into the store, and removes older ones to make room.

        Raises:
            NotWritten: no room is left, because of media that are in use or were used in the last minute.
            DataFailure, ConfigError: as for `Source.read`.
        """
        medium = source.read()
        with self._lock:
            try:
                size = store.file_size(medium)
            except FileNotFoundError:  # another call removed the file after `read` saw it
                medium = source.read(again=True)
                size = store.file_size(medium)
            self.num_bytes += size - self._sizes.pop(medium.number, 0)
            self._sizes[medium.number], self._used[medium.number] = size, time.monotonic()
            self._trim(medium.number)
        return medium

    @contextlib.contextmanager
    def using(self, numbers: Sequence[int]) -> Iterator[None]:
        """Within the block, these media are not removed."""
        with self._lock:
            self._running.update(numbers)
        try:
            yield
        finally:
            with self._lock:
                self._running.subtract(numbers)
                self._running += Counter()  # removes counts of 0
                for number in set(numbers) & self._sizes.keys():
                    self._sizes.move_to_end(number)
                    self._used[number] = time.monotonic()

    def _trim(self, newest: int) -> None:
        resting = time.monotonic() - self._rest_s
        for number in list(self._sizes):
            if self.num_bytes <= self._max_bytes:
                return
            if number != newest and number not in self._running and self._used[number] < resting:
                self._remove(number)
        if self.num_bytes > self._max_bytes:
            if newest not in self._running:
                self._remove(newest)
            raise NotWritten(
                f"the media store may hold {self._max_bytes:,} bytes, and media in use fill it: raise --media-store-gib"
            )

    def _remove(self, number: int) -> None:
        store.remove(number)
        self.num_bytes -= self._sizes.pop(number)
        del self._used[number]


@contextlib.contextmanager
def private_store() -> Iterator[None]:
    """Within the block, this process and its child processes use an empty private media store: a folder inside the shared
    store, which is removed afterwards. First removes the private stores of servers that were killed.

    Raises:
        ConfigError: the folder cannot be created.
    """
    home, before = media_folder(), os.environ.get("TANDEM_MEDIA")
    for old in home.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _lock_of(old):
            shutil.rmtree(old, ignore_errors=True)
    try:
        home.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=home))
    except OSError as error:
        raise ConfigError(
            f"no media store can be created in {home} ({error.strerror}): set TANDEM_MEDIA to a folder that can be written"
        ) from error
    with _lock_of(folder):
        os.environ["TANDEM_MEDIA"] = str(folder)
        try:
            yield
        finally:
            os.environ.pop("TANDEM_MEDIA")
            if before is not None:
                os.environ["TANDEM_MEDIA"] = before
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock_of(folder: Path) -> Iterator[None]:
    """Locks a folder for this process. Raises `OSError` if a living process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
