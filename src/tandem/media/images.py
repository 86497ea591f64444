"""Images of strangers, as pixels: checked by their header first, then decoded and brought into one form."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
from PIL import Image

from tandem.api.failures import DataFailure

MAX_PIXELS = 2**25
"""Pixels of an image (33 million); one of more is refused before it is decoded."""

MAX_RATIO = 200
"""The longer side of an image in multiples of the shorter one."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""The formats that are read, known by their content and never by their name."""

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
"""EXIF's orientation of a camera → what turns the image upright."""


def read_image(source: bytes | Image.Image | np.ndarray) -> np.ndarray:
    """The pixels of an image, ``[H, W, 3]`` uint8.

    It is turned upright as its EXIF says. Palettes, grey, CMYK and the like become RGB; transparency is laid over white; of
    16 bits the upper 8 are taken; colour profiles are not applied. An array is ``[H, W]``, ``[H, W, 1]``, ``[H, W, 3]`` or
    ``[H, W, 4]`` uint8.

    Raises:
        DataFailure: ``media_unreadable``: no image, or a damaged one; ``media_too_large``; ``media_refused``: several
            frames, a format that is not read, floats, very long and thin.
    """
    with _opened(source) as image:
        image.load()
        _check(image)
        orientation = _orientation(image)
        upright = image.transpose(_TURNED[orientation]) if orientation in _TURNED else image
        return np.array(_rgb(upright), dtype=np.uint8)


def check_image(source: bytes | IO[bytes] | Image.Image | np.ndarray) -> float:
    """The number of pixels. Raises the `DataFailure` that the header gives reason for; the pixels are not looked at."""
    with _opened(source) as image:
        return float(image.width * image.height)


@contextmanager
def _opened(source: Any) -> Iterator[Image.Image]:
    """The image, not yet decoded; what goes wrong with it within the block too is the image's fault."""
    try:
        if isinstance(source, Image.Image):
            image = source
        else:
            image = _of_array(source) if isinstance(source, np.ndarray) else _open(source)
        _check(image)
        yield image
    except DataFailure:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataFailure("media_too_large", f"{error}; at most {MAX_PIXELS:,} are read") from error
    except MemoryError as error:
        raise DataFailure("media_too_large", "there is not enough memory to decode the image") from error
    except Exception as error:  # boundary: the bytes of a stranger, in a library that raises whatever it stumbles over
        raise DataFailure("media_unreadable", f"a damaged image: {type(error).__name__}: {error!s:.200}") from error


def _open(source: bytes | IO[bytes]) -> Image.Image:
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    head = file.read(256)
    try:
        return Image.open(file, formats=FORMATS)
    except Image.UnidentifiedImageError:
        start = head.lstrip().lower()
        if start.startswith((b"<svg", b"<?xml", b"<!doctype svg")):
            raise DataFailure("media_refused", "an SVG is a program that draws, no image: convert it to PNG") from None
        words = f"not an image, or none of {', '.join(FORMATS)}; it begins with {head[:12]!r}"
        raise DataFailure("media_unreadable", words if head else "the file is empty") from None


def _of_array(array: np.ndarray) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or not array.size:
        raise DataFailure(
            "media_refused",
            f"an image as an array is [H, W], [H, W, 3] or [H, W, 4] of uint8, got {list(array.shape)} of {array.dtype}",
        )
    return Image.fromarray(np.ascontiguousarray(array))


def _check(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataFailure("media_too_large", f"{width} × {height} pixels, at most {MAX_PIXELS:,} are read: make it smaller")
    if not width or not height:
        raise DataFailure("media_unreadable", f"an image of {width} × {height} pixels")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise DataFailure("media_refused", f"{width} × {height} pixels: no side may be {MAX_RATIO} times the other")
    if image.format != "MPO" and getattr(image, "is_animated", False):  # of an MPO, a camera's, the first is the photograph
        frames = getattr(image, "n_frames", 2)
        raise DataFailure("media_refused", f"{frames} frames or pages: no model takes a video yet; save the one that counts")
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise DataFailure("media_refused", "pixels of 32 bits have no agreed range: convert them to 8 bits")


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # boundary: notes of a camera that are damaged do no harm to the image
        return 1


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits, whatever their order
        image = Image.fromarray((np.asarray(image.convert("I")) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours).convert("RGB")
    return image.convert("RGB")
