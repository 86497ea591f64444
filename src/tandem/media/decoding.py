"""Reads images and sounds from untrusted bytes: the header is checked first, then the content is decoded.

An image becomes RGB pixels, a sound mono samples at `RATE`.
"""

import importlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
from PIL import Image

from tandem.api.failures import DataFailure
from tandem.config.errors import ConfigError
from tandem.media.store import RATE

MAX_PIXELS = 2**25
"""Maximum number of pixels of an image (33 million). A larger image is refused before it is decoded."""

MAX_RATIO = 200
"""Largest ratio of the longer to the shorter side of an image."""

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""The formats that are read, recognised by their content and never by the file's name."""

_ORIENTATION = 0x0112
_TURNED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation → the operation that turns the image upright."""


def read_image(source: bytes | Image.Image | np.ndarray) -> np.ndarray:
    """Decodes an image to pixels, ``[H, W, 3]`` uint8.

    The image is turned upright by its EXIF orientation. Palettes, grey, CMYK and other modes become RGB; transparent pixels
    are blended with white; values of 16 bits keep their upper 8; colour profiles are ignored. An array must be ``[H, W]``,
    ``[H, W, 1]``, ``[H, W, 3]`` or ``[H, W, 4]`` uint8.

    Raises:
        DataFailure: ``media_unreadable``: the source is not an image, or damaged; ``media_too_large``; ``media_refused``: it
            has several frames, floats or 32-bit values, an unsupported format, or is very long and thin.
    """
    with _opened_image(source) as image:
        image.load()
        _check_image(image)
        orientation = _orientation(image)
        upright = image.transpose(_TURNED[orientation]) if orientation in _TURNED else image
        return np.array(_rgb(upright), dtype=np.uint8)


def check_image(source: bytes | IO[bytes] | Image.Image | np.ndarray) -> float:
    """Returns the number of pixels, from the header. Raises `DataFailure` if the header is refused; decodes no pixels."""
    with _opened_image(source) as image:
        return float(image.width * image.height)


@contextmanager
def _at_fault(medium: str) -> Iterator[None]:
    """Context manager in which every error is a `DataFailure`, because the image or sound is at fault."""
    try:
        yield
    except DataFailure:
        raise
    except MemoryError as error:
        raise DataFailure("media_too_large", f"there is not enough memory to decode the {medium}") from error
    except Exception as error:  # boundary: untrusted bytes, for which the library raises any kind of exception
        raise DataFailure("media_unreadable", f"a damaged {medium}: {type(error).__name__}: {error!s:.200}") from error


@contextmanager
def _opened_image(source: Any) -> Iterator[Image.Image]:
    """Opens an image without decoding it. An error within the block becomes a `DataFailure`, because the image is at
    fault."""
    with _at_fault("image"):
        try:
            if isinstance(source, Image.Image):
                image = source
            else:
                image = _image_of_array(source) if isinstance(source, np.ndarray) else _open(source)
            _check_image(image)
            yield image
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataFailure("media_too_large", f"{error}; at most {MAX_PIXELS:,} are read") from error


def _open(source: bytes | IO[bytes]) -> Image.Image:
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    head = file.read(256)
    try:
        return Image.open(file, formats=IMAGE_FORMATS)
    except Image.UnidentifiedImageError:
        start = head.lstrip().lower()
        if start.startswith((b"<svg", b"<?xml", b"<!doctype svg")):
            raise DataFailure("media_refused", "an SVG is a drawing program, not pixels: convert it to PNG") from None
        words = f"not an image, or none of {', '.join(IMAGE_FORMATS)}; it begins with {head[:12]!r}"
        raise DataFailure("media_unreadable", words if head else "the file is empty") from None


def _image_of_array(array: np.ndarray) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or not array.size:
        raise DataFailure(
            "media_refused",
            f"an image as an array is [H, W], [H, W, 3] or [H, W, 4] of uint8, got {list(array.shape)} of {array.dtype}",
        )
    return Image.fromarray(np.ascontiguousarray(array))


def _check_image(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataFailure("media_too_large", f"{width} × {height} pixels, at most {MAX_PIXELS:,} are read: make it smaller")
    if not width or not height:
        raise DataFailure("media_unreadable", f"an image of {width} × {height} pixels")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise DataFailure("media_refused", f"{width} × {height} pixels: no side may be {MAX_RATIO} times the other")
    if image.format != "MPO" and getattr(
        image, "is_animated", False
    ):  # MPO (from a camera): the first frame is the photograph
        frames = getattr(image, "n_frames", 2)
        raise DataFailure("media_refused", f"{frames} frames or pages: no model takes a video yet; save a single frame")
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise DataFailure("media_refused", "pixels of 32 bits have no agreed range: convert them to 8 bits")


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # boundary: damaged EXIF data do not make the image unreadable
        return 1


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits, in either byte order
        image = Image.fromarray((np.asarray(image.convert("I")) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours).convert("RGB")
    return image.convert("RGB")


MAX_SECONDS = 600
MAX_VALUES = 2**26
"""Maximum number of samples of a sound, all channels together."""

MIN_RATE, MAX_RATE = 1_000, 768_000
"""Lowest and highest sample rate that is read, in samples per second."""

SOUND_FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3", "AIFF")
"""The formats that are read, recognised by their content and never by the file's name."""

_BEGINNINGS = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"FORM", *(bytes((0xFF, byte)) for byte in (0xF2, 0xF3, 0xFA, 0xFB)))
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)
"""Sizes in the header of a WAV file whose length was unknown when the header was written, because the file was written to a
pipe."""


def read_sound(source: bytes | tuple[Any, float]) -> np.ndarray:
    """Decodes a sound to samples, ``[n]`` int16 at `RATE`. Averages channels, resamples other rates, clips loud samples.

    ``source``: a file's bytes; or (samples, rate) with samples ``[n]``, ``[n, channels]`` or ``[channels, n]``, as floats
    from −1 to 1 or integers of 8 (unsigned), 16 or 32 bits.

    Raises:
        DataFailure: ``media_unreadable``: the source is not a sound, empty or damaged, or its samples are not finite;
            ``media_too_large``; ``media_refused``: the format, rate or type of samples is not supported.
    """
    samples, rate = _samples_of_file(source) if isinstance(source, bytes) else _samples_of_array(*source)
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
    """Returns the length of a sound in seconds, from its header. Raises `DataFailure` if the header is refused; the samples
    of a file are not decoded."""
    if isinstance(source, tuple):
        samples, rate = _samples_of_array(*source)
        return len(samples) / rate
    with _opened_sound(source) as file:
        return float(file.frames / file.samplerate)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise ConfigError(f"sounds need the library {name}: pip install {name} ({error})") from error


@contextmanager
def _opened_sound(source: bytes | IO[bytes]) -> Iterator[Any]:
    """Opens a sound without decoding it. An error within the block becomes a `DataFailure`, because the sound is at
    fault."""
    soundfile = _library("soundfile")
    data = io.BytesIO(source) if isinstance(source, bytes) else source
    head, length = data.read(12), data.seek(0, io.SEEK_END)
    data.seek(0)
    if not head.startswith(_BEGINNINGS):
        words = f"not a sound, or none of {', '.join(SOUND_FORMATS)}; it begins with {head!r}"
        raise DataFailure("media_unreadable", words if head else "the file is empty")
    if head.startswith(b"RIFF"):
        size = int.from_bytes(head[4:8], "little")
        if size not in _UNKNOWN_SIZES and size + 8 > length + 1:  # the last byte of an odd size may be left out
            raise DataFailure("media_unreadable", f"the file is cut off: {length} of {size + 8} bytes")
    with _at_fault("sound"), soundfile.SoundFile(data) as file:
        if file.format not in SOUND_FORMATS:
            raise DataFailure("media_refused", f"the format {file.format} is not read, only {', '.join(SOUND_FORMATS)}")
        _check_sound(file.frames, file.channels, file.samplerate)
        yield file


def _samples_of_file(data: bytes) -> tuple[np.ndarray, float]:
    """Decodes a file to samples ``[n, channels]`` and their rate."""
    with _opened_sound(data) as file:
        samples = file.read(dtype="float32", always_2d=True)
        if len(samples) != file.frames:
            raise DataFailure("media_unreadable", f"the file is cut off: {len(samples)} of {file.frames} samples")
        return samples, file.samplerate


def _samples_of_array(samples: Any, rate: float) -> tuple[np.ndarray, float]:
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
    _check_sound(len(array), array.shape[1], rate)
    if array.dtype.kind == "f":
        return array, rate
    if array.dtype not in (np.uint8, np.int16, np.int32):
        raise DataFailure("media_refused", f"samples are floats, uint8, int16 or int32, got {array.dtype}")
    scale = 2.0 ** (8 * array.dtype.itemsize - 1)
    return (array - (scale if array.dtype == np.uint8 else 0.0)) / scale, rate


def _check_sound(frames: int, channels: int, rate: float) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise DataFailure("media_refused", f"{rate:g} samples a second; {MIN_RATE} to {MAX_RATE} are read")
    if frames > MAX_SECONDS * rate or frames * channels > MAX_VALUES:
        raise DataFailure(
            "media_too_large",
            f"{frames / rate:,.0f} s of {channels} channels; at most {MAX_SECONDS} s and {MAX_VALUES:,} values are read",
        )
    if not frames or not channels:
        raise DataFailure("media_unreadable", "the sound has no samples")
