"""Reads sounds from untrusted bytes: the header is checked first, then the sound is decoded to mono samples at `RATE`."""

import importlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from tandem.api.failures import DataFailure
from tandem.config.errors import ConfigError
from tandem.media.store import RATE

MAX_SECONDS = 600
MAX_VALUES = 2**26
"""Most samples of a sound, all channels together."""

MIN_RATE, MAX_RATE = 1_000, 768_000
"""Lowest and highest sample rate that is read, in samples per second."""

FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3", "AIFF")
"""The formats that are read, recognised by their content and never by the file's name."""

_BEGINNINGS = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"FORM", *(bytes((0xFF, byte)) for byte in (0xF2, 0xF3, 0xFA, 0xFB)))
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)
"""Sizes in the header of a WAV that was piped, whose writer did not know the length."""


def read_sound(source: bytes | tuple[Any, float]) -> np.ndarray:
    """The samples of a sound, ``[n]`` int16 at `RATE`: channels are averaged, other rates resampled, loud samples clipped.

    ``source``: a file's bytes; or (samples, rate) with samples ``[n]``, or channels and samples in either order, as floats
    from −1 to 1 or integers of 8 (unsigned), 16 or 32 bits.

    Raises:
        DataFailure: ``media_unreadable``: no sound, an empty or damaged one, samples that are not finite;
            ``media_too_large``; ``media_refused``: a format, rate or kind of samples that is not read.
    """
    samples, rate = _of_file(source) if isinstance(source, bytes) else _of_array(*source)
    with np.errstate(all="ignore"):
        mono = samples.mean(axis=1, dtype=np.float64).astype(np.float32)
    if not np.isfinite(mono).all():
        raise DataFailure("media_unreadable", "samples are not finite numbers")
    if rate != RATE:
        mono = _library("soxr").resample(mono, rate, RATE)
    if not len(mono):
        raise DataFailure("media_unreadable", "the sound has no samples")
    return np.rint(mono * 2**15).clip(-(2**15), 2**15 - 1).astype(np.int16)


def check_sound(source: bytes | IO[bytes] | tuple[Any, float]) -> float:
    """The length of a sound in seconds, by its header. Raises `DataFailure` for what the header shows; the samples of a file
    are not decoded."""
    if isinstance(source, tuple):
        samples, rate = _of_array(*source)
        return len(samples) / rate
    with _opened(source) as file:
        return float(file.frames / file.samplerate)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise ConfigError(f"sounds need the library {name}: pip install {name} ({error})") from error


@contextmanager
def _opened(source: bytes | IO[bytes]) -> Iterator[Any]:
    """Opens a sound without decoding it. Errors within the block count as the sound's fault, `DataFailure`."""
    soundfile = _library("soundfile")
    data = io.BytesIO(source) if isinstance(source, bytes) else source
    head, length = data.read(12), data.seek(0, io.SEEK_END)
    data.seek(0)
    if not head.startswith(_BEGINNINGS):
        words = f"not a sound, or none of {', '.join(FORMATS)}; it begins with {head!r}"
        raise DataFailure("media_unreadable", words if head else "the file is empty")
    if head.startswith(b"RIFF"):
        size = int.from_bytes(head[4:8], "little")
        if size not in _UNKNOWN_SIZES and size + 8 > length + 1:  # the last byte of an odd size may be left out
            raise DataFailure("media_unreadable", f"the file is cut off: {length} of {size + 8} bytes")
    try:
        with soundfile.SoundFile(data) as file:
            if file.format not in FORMATS:
                raise DataFailure("media_refused", f"the format {file.format} is not read, only {', '.join(FORMATS)}")
            _check(file.frames, file.channels, file.samplerate)
            yield file
    except DataFailure:
        raise
    except MemoryError as error:
        raise DataFailure("media_too_large", "there is not enough memory to decode the sound") from error
    except Exception as error:  # boundary: the bytes of a stranger, in a library that raises whatever it stumbles over
        raise DataFailure("media_unreadable", f"a damaged sound: {type(error).__name__}: {error!s:.200}") from error


def _of_file(data: bytes) -> tuple[np.ndarray, float]:
    """Decodes a file to samples ``[n, channels]`` and their rate."""
    with _opened(data) as file:
        samples = file.read(dtype="float32", always_2d=True)
        if len(samples) != file.frames:
            raise DataFailure("media_unreadable", f"the file is cut off: {len(samples)} of {file.frames} samples")
        return samples, file.samplerate


def _of_array(samples: Any, rate: float) -> tuple[np.ndarray, float]:
    """Checks samples in memory, and returns them as floats ``[n, channels]`` with their rate."""
    try:
        array = np.asarray(samples)
        rate = float(rate)
    except (TypeError, ValueError) as error:
        raise DataFailure("media_unreadable", f"samples must be numbers, beside their rate: {error}") from error
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.dtype.kind not in "fiu":
        raise DataFailure("media_refused", f"samples are [n] numbers, got {list(array.shape)} of {array.dtype}")
    if array.shape[0] < array.shape[1]:
        array = array.T
    _check(len(array), array.shape[1], rate)
    if array.dtype.kind == "f":
        return array, rate
    if array.dtype not in (np.uint8, np.int16, np.int32):
        raise DataFailure("media_refused", f"samples are floats, uint8, int16 or int32, got {array.dtype}")
    scale = 2.0 ** (8 * array.dtype.itemsize - 1)
    return (array - (scale if array.dtype == np.uint8 else 0.0)) / scale, rate


def _check(frames: int, channels: int, rate: float) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise DataFailure("media_refused", f"{rate:g} samples a second; {MIN_RATE} to {MAX_RATE} are read")
    if frames > MAX_SECONDS * rate or frames * channels > MAX_VALUES:
        raise DataFailure(
            "media_too_large",
            f"{frames / rate:,.0f} s of {channels} channels; at most {MAX_SECONDS} s and {MAX_VALUES:,} values are read",
        )
    if not frames or not channels:
        raise DataFailure("media_unreadable", "the sound has no samples")
