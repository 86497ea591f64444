"""Images and sounds as the bytes of files, good and bad."""

import io
import struct
import zlib

import numpy as np
import soundfile
from PIL import Image

PIXELS = (np.arange(12 * 20 * 3).reshape(12, 20, 3) % 251).astype(np.uint8)
"""An image ``[12, 20, 3]`` in which no two rows or columns are equal."""

TONE = (np.sin(np.arange(1600) / 7) * 8000).astype(np.int16)


def saved(image, form="PNG", **how):
    """The bytes of a PIL image or an array."""
    out = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(out, form, **how)
    return out.getvalue()


def recorded(samples, rate=16_000, form="WAV", subtype=None):
    """The bytes of a sound, ``[n]`` or ``[n, channels]``."""
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=form, subtype=subtype)
    return out.getvalue()


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, body=b"", colour=2):
    """A PNG whose header says what it likes."""
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def bmp(width, height):
    return struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def gif(width, height):
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00;"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\x00\x00\x00\xff\xff\xff" + frame


def webp(width, height):
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x00\x00\x00\x00" + canvas
    return b"RIFF" + struct.pack("<I", len(body)) + body


def tiff(width, height):
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\x00" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4)


def wav(frames, channels=1, rate=16_000, data=b""):
    """A WAV whose header says what it likes."""
    size = frames * channels * 2
    form = struct.pack("<HHIIHH", 1, channels, rate, (rate * channels * 2) & 0xFFFFFFFF, (channels * 2) & 0xFFFF, 16)
    return (
        b"RIFF\xff\xff\xff\xffWAVEfmt "
        + struct.pack("<I", 16)
        + form
        + b"data"
        + struct.pack("<I", size & 0xFFFFFFFF)
        + data
    )
