"""A media store of one server, which does not grow beyond a number of bytes: what was used last stays."""

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
from tandem.config.cache import media_folder
from tandem.config.errors import ConfigError
from tandem.media import store
from tandem.media.parts import Source

REST_S = 60.0
"""A medium stays so long after its last use: a request that was just read has not reached the engine yet."""

_PREFIX = "server-"


class StoreBound:
    """The media that one process keeps in the store, by their last use. No other process may keep media in that folder."""

    def __init__(self, max_bytes: int, rest_s: float = REST_S):
        self._max_bytes, self._rest_s, self._lock = max_bytes, rest_s, threading.Lock()
        self._sizes, self._used, self._running = OrderedDict[int, int](), dict[int, float](), Counter[int]()
        self.num_bytes = 0

    def keep(self, source: Source) -> Medium:
        """The medium of a source, in the store; others go for it.

        Raises:
            NotWritten: what is in use, or was in the last minute, leaves no room.
            DataFailure, ConfigError: as `Source.read`.
        """
        medium = source.read()
        with self._lock:
            try:
                size = store.file_size(medium)
            except FileNotFoundError:  # it went between the look whether it is there and now
                medium = source.read(again=True)
                size = store.file_size(medium)
            self.num_bytes += size - self._sizes.pop(medium.number, 0)
            self._sizes[medium.number], self._used[medium.number] = size, time.monotonic()
            self._trim(medium.number)
        return medium

    @contextlib.contextmanager
    def using(self, numbers: Sequence[int]) -> Iterator[None]:
        """A block in which these media stay."""
        with self._lock:
            self._running.update(numbers)
        try:
            yield
        finally:
            with self._lock:
                self._running.subtract(numbers)
                self._running += Counter()  # those of no request are dropped
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
                f"the media store takes no more than {self._max_bytes:,} bytes, and what is in use fills it: give it more "
                "(--media-store-gib)"
            )

    def _remove(self, number: int) -> None:
        store.remove(number)
        self.num_bytes -= self._sizes.pop(number)
        del self._used[number]


@contextlib.contextmanager
def private_store() -> Iterator[None]:
    """A block in which the media store of this process, and of those that it starts, is an empty folder of its own in the
    media store of all. It goes with the block; what servers left there that were killed goes at the beginning of one.

    Raises:
        ConfigError: it cannot be made.
    """
    home, before = media_folder(), os.environ.get("TANDEM_MEDIA")
    for left in home.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _lock_of(left):
            shutil.rmtree(left, ignore_errors=True)
    try:
        home.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=home))
    except OSError as error:
        raise ConfigError(
            f"no media store can be made in {home} ({error.strerror}): set TANDEM_MEDIA to a folder that can be written"
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
    """A block in which the folder is this process's. Raises `OSError` where it is that of another one that lives."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
