"""The media store: a folder that holds each image and sound once, under a number computed from its content.

All processes of a run open the same folder, so processes exchange only the number of a medium. Files are written atomically
and never changed: an image is an RGB PNG of 8 bits, a sound a mono WAV of 16 bits at `RATE`.
"""

import contextlib
import hashlib
import os
import tempfile
import threading
import wave
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from tandem.api.failures import NotWritten
from tandem.api.media import MediaKind, Medium
from tandem.config.errors import ConfigError
from tandem.config.libraries import media_folder

RATE = 16_000
"""Sample rate of every sound, in samples per second."""

MAX_CACHED_BYTES = 2**28
"""Maximum size in bytes of the decoded media that a process caches in memory; the least recently used are dropped."""

_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
_WAV_HEADER = 44
"""Length of the header of a WAV file, in bytes."""

_ENDINGS: dict[MediaKind, str] = {"image": ".png", "audio": ".wav"}


class MediaMissing(ConfigError):
    """A medium is not in the media store of this process."""

    reason = "media_missing"
    """Reason of the `DataFailure` with which this error ends an episode."""


class MediaDamaged(MediaMissing):
    """The file of a medium in the media store cannot be read: it is damaged, or this process may not read it."""

    reason = "media_unreadable"


class _Cache:
    """A cache of decoded media by file, with at most `MAX_CACHED_BYTES`."""

    def __init__(self) -> None:
        self._lock, self._arrays, self._size = threading.Lock(), OrderedDict[Path, np.ndarray](), 0

    def get(self, file: Path) -> np.ndarray | None:
        with self._lock:
            data = self._arrays.pop(file, None)
            if data is not None:
                self._arrays[file] = data
            return data

    def add(self, file: Path, data: np.ndarray) -> None:
        with self._lock:
            self._size += data.nbytes - getattr(self._arrays.pop(file, None), "nbytes", 0)
            self._arrays[file] = data
            while self._size > MAX_CACHED_BYTES:
                self._size -= self._arrays.popitem(last=False)[1].nbytes


_CACHE = _Cache()


def keep(kind: MediaKind, data: np.ndarray) -> Medium:
    """Writes a medium to the store, if it is missing or incomplete there. Several processes may write the same one at once.

    Args:
        kind: `image` or `audio`.
        data: an image ``[H, W, 3]`` uint8, or a sound ``[n]`` int16 at `RATE`; becomes read-only.

    Raises:
        ConfigError: the folder cannot be created or written.
        NotWritten: the disk is full.
    """
    assert (data.dtype, data.ndim) == {"image": (np.uint8, 3), "audio": (np.int16, 1)}[kind] and data.size, data.shape
    data = np.ascontiguousarray(data)
    data.setflags(write=False)
    number = _number(kind, data)
    file = _file(kind, number)
    if not _is_complete(file, data.size):
        _write(file, kind, data)
    _CACHE.add(file, data)
    return Medium(kind, number, (data.shape[1], data.shape[0]) if kind == "image" else (len(data), RATE))


def medium(number: int) -> Medium:
    """Returns the medium with this number; reads only the beginning of its file. Raises `MediaMissing`."""
    if (image_file := _file("image", number)).is_file():
        with _opening(number), Image.open(image_file, formats=["PNG"]) as image:
            return Medium("image", number, image.size)
    with _opening(number), wave.open(str(_file("audio", number)), "rb") as sound:
        return Medium("audio", number, (sound.getnframes(), RATE))


def is_whole(number: int) -> bool:
    """True if the medium with this number is in the store and its file is complete."""
    with contextlib.suppress(MediaMissing):
        stored = medium(number)
        return _is_complete(_file(stored.kind, number), stored.size[0])
    return False


def image(number: int) -> np.ndarray:
    """Returns the pixels of an image, ``[H, W, 3]`` uint8, read-only. Raises `MediaMissing`."""

    def read(file: Path) -> np.ndarray:
        with Image.open(file, formats=["PNG"]) as png:
            return np.array(png)

    return _read("image", number, read)


def sound(number: int) -> np.ndarray:
    """Returns the samples of a sound, ``[n]`` float32 from −1 to 1, at `RATE`. Raises `MediaMissing`."""

    def read(file: Path) -> np.ndarray:
        with wave.open(str(file), "rb") as wav:
            return np.frombuffer(wav.readframes(wav.getnframes()), "<i2").astype(np.int16)

    return _read("audio", number, read).astype(np.float32) / 2**15


def packed(number: int) -> bytes:
    """Returns the bytes of a medium's file, PNG or WAV; `tandem.media.parts` reads the same medium from them. Raises
    `MediaMissing`."""
    with _opening(number):
        return _file(medium(number).kind, number).read_bytes()


def file_size(medium: Medium) -> int:
    """Returns the size of a medium's file in bytes. Raises `FileNotFoundError`."""
    return _file(medium.kind, medium.number).stat().st_size


def remove(number: int) -> None:
    """Removes a medium from the store, if it is there."""
    for kind in _ENDINGS:
        _file(kind, number).unlink(missing_ok=True)


def _number(kind: MediaKind, data: np.ndarray) -> int:
    digest = hashlib.sha256(f"{kind} {data.shape}".encode())
    digest.update(np.ascontiguousarray(data, "<i2" if kind == "audio" else None).data)
    return -1 - (int.from_bytes(digest.digest()[:8]) >> 1)


def _file(kind: MediaKind, number: int) -> Path:
    return media_folder() / f"{-1 - number:016x}{_ENDINGS[kind]}"


def _read(kind: MediaKind, number: int, read: Callable[[Path], np.ndarray]) -> np.ndarray:
    file = _file(kind, number)
    data = _CACHE.get(file)
    if data is None:
        with _opening(number):
            data = read(file)
        if _number(kind, data) != number:
            raise MediaDamaged(
                f"{file} was changed after it was written: remove it and start again; it is then written anew"
            )
        data.setflags(write=False)
        _CACHE.add(file, data)
    return data


@contextlib.contextmanager
def _opening(number: int) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise MediaMissing(
            f"medium {number} is not in the media store {media_folder()}: all processes of a run, on all nodes, need the "
            "same folder: set TANDEM_MEDIA to one on a shared file system, and never empty it while a run may go on"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError, wave.Error) as error:
        raise MediaDamaged(f"medium {number} in the media store {media_folder()} cannot be read: {error}") from error


def _is_complete(file: Path, num_samples: int) -> bool:
    """True if the file exists and is complete. A machine that crashed may have left a part of it. ``num_samples``: number of
    samples of a sound; an image does not need it."""
    try:
        if file.suffix == ".wav":
            return file.stat().st_size == _WAV_HEADER + 2 * num_samples
        with file.open("rb") as png:
            png.seek(-len(_PNG_END), os.SEEK_END)
            return png.read() == _PNG_END
    except OSError:
        return False


def _write(file: Path, kind: MediaKind, data: np.ndarray) -> None:
    """Writes a medium to a file atomically: readers see the complete file or none."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=file.stem, suffix=".partial", dir=file.parent)
    except OSError as error:
        raise ConfigError(
            f"the media store {file.parent} cannot be written ({error.strerror}): set TANDEM_MEDIA to another folder"
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as out:
            if kind == "image":
                Image.fromarray(data).save(out, "PNG", compress_level=1, compress_type=zlib.Z_RLE)  # the fastest settings
            else:
                write_sound(out, data)
            os.fchmod(out.fileno(), 0o644)  # other users of a shared folder may read it
        os.replace(partial, file)
    except OSError as error:
        raise NotWritten(f"writing to the media store {file.parent} failed ({error.strerror}): free space there") from error
    finally:
        Path(partial).unlink(missing_ok=True)


def write_sound(out: IO[bytes], data: np.ndarray) -> None:
    """Writes samples ``[n]`` int16 as a WAV at `RATE`."""
    with wave.open(out, "wb") as sound_file:
        sound_file.setnchannels(1)
        sound_file.setsampwidth(2)
        sound_file.setframerate(RATE)
        sound_file.writeframes(data.astype("<i2").tobytes())
