"""Turns the images and sounds of messages, in all usual formats, into media of the media store."""

import base64
import binascii
import hashlib
import http.client
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from tandem.api.failures import DataFailure
from tandem.api.media import PARTS, MediaKind, Medium, media_of, reader_of
from tandem.media.decoding import check_image, check_sound, read_image, read_sound
from tandem.media.store import image, keep, medium, packed, sound

MAX_BYTES = 2**26
"""Maximum number of bytes of a file, of a host's answer, or of a data URL."""

TIMEOUT_S = 20.0
"""Default of `Allowed.timeout_s`, in seconds."""

Messages = Sequence[Mapping[str, Any]]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:(?=//)|(?:data|file):", re.IGNORECASE)
_KEYS = (
    "medium",
    "url",
    "path",
    "base64",
    "data",
    "image",
    "audio",
    "image_url",
    "audio_url",
    "input_audio",
    "bytes",
    "array",
)


@dataclass(frozen=True)
class Allowed:
    """The folders and hosts from which media may be read. Bytes, data URLs and objects in memory are always allowed."""

    folders: tuple[Path, ...] = ()
    """Folders in which paths are looked up, in this order. The file must lie in one of them after all links are followed."""

    hosts: tuple[str, ...] = ()
    """Hosts that ``http`` and ``https`` URLs may name."""

    timeout_s: float = TIMEOUT_S
    """Time limit in seconds for a host to begin its answer. The complete answer has the same limit again."""


NOWHERE = Allowed()


class Source:
    """One image or sound of a row. The first use reads it into the media store; later uses return the stored `Medium`."""

    def __init__(self, kind: MediaKind, value: Any, allowed: Allowed = NOWHERE):
        """``value``: a path, a URL, bytes, a PIL image, an array, ``{"bytes": …, "path": …}``, or
        ``{"array": …, "sampling_rate": …}``."""
        self.kind, self.allowed = kind, allowed
        self._value, self._lock = value, threading.Lock()
        self._medium: Medium | None = None

    def read(self, again: bool = False) -> Medium:
        """Reads the medium into the media store. ``again``: read it even if it was read before, because the store may have
        lost it. Raises `DataFailure` with the reason."""
        with self._lock:
            if self._medium is None or again:
                source = self._checked()
                if isinstance(source, Path):
                    with _opened(source) as file:
                        source = _bounded(file.read(MAX_BYTES + 1))
                elif isinstance(source, str):
                    source = _fetched(source, self.allowed.timeout_s)
                self._medium = keep(self.kind, read_image(source) if self.kind == "image" else read_sound(source))
            return self._medium

    def check(self) -> float:
        """Returns the number of pixels of an image, or the seconds of a sound, from its header; 0.0 for a URL, which is not
        fetched. Nothing is decoded.

        Raises:
            DataFailure: the path, URL or header is refused.
        """
        source, check = self._checked(), check_image if self.kind == "image" else check_sound
        if isinstance(source, Path):
            with _opened(source) as file:
                return check(file)
        return 0.0 if isinstance(source, str) else check(source)

    def __str__(self) -> str:
        """Returns the path or URL; for objects in memory their kind and a digest of the content."""
        if isinstance(self._value, str) and len(self._value) < 1000:
            return self._value
        value = self._value.get("bytes") or self._value if isinstance(self._value, Mapping) else self._value
        if isinstance(value, Image.Image | np.ndarray):
            value = np.asarray(value).tobytes()
        data = value if isinstance(value, bytes) else str(value).encode(errors="replace")
        return f"{self.kind}:{hashlib.sha256(data).hexdigest()[:16]}"

    __repr__ = __str__

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __deepcopy__(self, memo: Any) -> "Source":
        """Returns itself, because a source never changes."""
        return self

    def _checked(self) -> Any:
        """Returns the value as a path, an allowed URL, bytes, or an object that `read_image` or `read_sound` accepts. Raises
        `DataFailure` if it is not allowed or of another type."""
        value = self._value
        if isinstance(value, Mapping):
            if value.get("array") is not None:
                value = (value["array"], value.get("sampling_rate"))
            else:
                value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, str | Path):
            return self._named(str(value))
        if isinstance(value, bytes | bytearray | memoryview):
            return _bounded(bytes(value))
        if isinstance(value, (Image.Image, np.ndarray) if self.kind == "image" else tuple):
            return value
        need = "with its sampling_rate" if isinstance(value, np.ndarray) else "a path, a URL, bytes or an array"
        raise DataFailure("media_unreadable", f"cannot read an {self.kind} from {type(value).__name__}: give {need}")

    def _named(self, name: str) -> Path | str | bytes:
        scheme = _SCHEME.match(name)
        word = scheme.group().lower() if scheme else ""
        if not scheme:
            return _file(name, self.allowed.folders)
        if word == "data:":
            return _of_data_url(name)
        if word in ("http:", "https:"):
            return _allowed_url(name, self.allowed.hosts)
        raise DataFailure("media_refused", f"{name:.80}: {word} is not supported; give a path, a data URL or bytes")


def read_media(messages: Messages, allowed: Allowed = NOWHERE) -> list[dict[str, Any]]:
    """Reads all images and sounds of messages. Each becomes a part ``{"type": "image" or "audio", "medium": Medium}``.

    Parts may have OpenAI's format (``image_url``, ``input_image``, ``input_audio``, ``audio_url``) or Hugging Face's
    (``image`` and ``audio`` with the medium, ``url``, ``path`` or ``base64``).

    Raises:
        DataFailure: a medium cannot be read (see `tandem.media.decoding`, `tandem.media.decoding`), is missing
            (``media_missing``), or is refused (``media_refused``) because it is a video or its path or host is not allowed.
    """
    return with_parts(messages, lambda part: {"type": part.kind, "medium": part.read()}, allowed)


def sources_in(messages: Any) -> list[Source]:
    """Returns the `Source` objects in a row's messages, whether they were read or not."""
    contents = (
        [message.get("content") for message in messages if isinstance(message, Mapping)]
        if isinstance(messages, list)
        else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    return [value for part in parts for value in part.values() if isinstance(value, Source)]


def read_for(tokenizer: Any, messages: Messages) -> list[dict[str, Any]]:
    """For a model with media: returns the result of `read_media`, and raises like it. For a text model: returns a copy of
    the messages; the chat template refuses parts other than text."""
    return [dict(message) for message in messages] if reader_of(tokenizer) is None else read_media(messages)


def opened(messages: Messages) -> list[Any]:
    """Decodes the images and sounds of messages, in order: PIL images, and arrays ``[n]`` float32 from −1 to 1 at 16 kHz.
    Raises `DataFailure` like `read_media`."""
    media = media_of(read_media(messages))
    return [Image.fromarray(image(medium.number)) if medium.kind == "image" else sound(medium.number) for medium in media]


def openai_part(medium: Medium) -> dict[str, Any]:
    """Returns a medium as a part of a message in OpenAI's format, with its content in base64."""
    data = base64.b64encode(packed(medium.number)).decode()
    if medium.kind == "image":
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def sent(number: int) -> dict[str, str]:
    """Returns a medium in the format of ``POST /media``: its kind, and its file in base64. Raises `MediaMissing`."""
    return {"kind": medium(number).kind, "data": base64.b64encode(packed(number)).decode()}


def shown_parts(value: Any, say: Callable[[Any], str]) -> list[dict[str, Any]] | None:
    """Converts the output of a tool or an environment to content parts; None if it has no image or sound.

    Args:
        value: a PIL image, a content part, or a list of these and of other values.
        say: converts any other value to text.

    Raises:
        DataFailure: as for `read_media`; paths are not allowed.
    """
    items = list(value) if isinstance(value, list | tuple) else [value]
    are_media = [
        isinstance(item, Image.Image) or (isinstance(item, Mapping) and item.get("type") in PARTS) for item in items
    ]
    if not any(are_media):
        return None
    parts = [
        ({"type": "image", "image": item} if isinstance(item, Image.Image) else item)
        if is_medium
        else {
            "type": "text",
            "text": item["text"] if isinstance(item, Mapping) and item.get("type") == "text" else say(item),
        }
        for item, is_medium in zip(items, are_media, strict=True)
    ]
    content: list[dict[str, Any]] = read_media([{"role": "tool", "content": parts}])[0]["content"]
    return content


def with_parts(messages: Messages, make: Callable[[Source], Any], allowed: Allowed = NOWHERE) -> list[dict[str, Any]]:
    """Returns the messages with each image and sound that is not a `Medium` yet replaced by the result of ``make``."""

    def replaced(part: Any) -> Any:
        if not isinstance(part, Mapping) or isinstance(part.get("medium"), Medium):
            return part
        source = source_of(part, allowed)
        return part if source is None else make(source)

    return [
        {**message, "content": [replaced(part) for part in message["content"]]}
        if isinstance(message.get("content"), list | tuple)
        else dict(message)
        for message in messages
    ]


def source_of(part: Mapping[str, Any], allowed: Allowed = NOWHERE) -> Source | None:
    """Returns the image or sound of a content part; None for text and other parts.

    Raises:
        DataFailure: the part is a video, or has no medium.
    """
    name = str(part.get("type", ""))
    if "video" in name:
        raise DataFailure("media_refused", "no model takes a video yet: give its frames as images")
    kind = PARTS.get(name)
    if kind is None:
        return None
    key = next((key for key in _KEYS if part.get(key) is not None), None)
    if key is None:
        raise DataFailure("media_mismatch", f"a part of type {name!r} has no {kind}: its keys are {', '.join(part)}")
    value = part[key]
    if isinstance(value, Source):
        return value
    if key in ("bytes", "array"):
        value = part
    if isinstance(value, Mapping) and (inner := next((k for k in ("url", "data") if value.get(k) is not None), None)):
        key, value = inner, value[inner]  # OpenAI's {"url": …} and {"data": …, "format": …}
    if key in ("base64", "data") and isinstance(value, str) and not value.startswith("data:"):
        value = f"data:;base64,{value}"
    return Source(kind, value, allowed)


def _too_long() -> DataFailure:
    return DataFailure("media_too_large", f"more than {MAX_BYTES >> 20} MiB; make the file smaller")


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise _too_long()
    return data


def _file(name: str, folders: Sequence[Path]) -> Path:
    if not folders:
        raise DataFailure("media_refused", f"{name:.200}: paths are not read here; give bytes or a data URL")
    outside = False
    try:
        roots = [folder.resolve() for folder in folders]
        for root in roots:
            file = (root / name).resolve()
            outside = outside or not file.is_relative_to(root)
            if any(map(file.is_relative_to, roots)) and file.is_file():
                return file
    except (OSError, RuntimeError, ValueError) as error:  # no permission; a loop of links; a NUL in the name
        raise DataFailure("media_missing", f"{name[:200]!r} cannot be read: {error}") from error
    places = ", ".join(map(str, folders))
    if outside:
        raise DataFailure(
            "media_refused", f"{name[:200]!r} lies outside of {places}; add its folder to media_folders to allow it"
        )
    raise DataFailure("media_missing", f"there is no file {name[:200]!r} in {places}")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise _too_long()
            yield file
    except OSError as error:
        raise DataFailure("media_missing", f"{path} cannot be read: {error.strerror}") from error


def _of_data_url(url: str) -> bytes:
    head, comma, _ = url[:200].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise DataFailure("media_unreadable", f"a data URL must be data:TYPE;base64,…, got {url[:40]!r}")
    if len(url) > MAX_BYTES * 4 // 3 + 300:
        raise _too_long()
    try:
        return base64.b64decode("".join(url[len(head) + 1 :].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataFailure("media_unreadable", f"the data URL is not valid base64: {error}") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuses all redirects, because only the first address was checked."""
        return


def _allowed_url(url: str, hosts: Sequence[str]) -> str:
    try:
        host = urllib.parse.urlsplit(url).hostname or ""
    except ValueError as error:
        raise DataFailure("media_refused", f"{url:.200} is not a URL: {error}") from error
    if host not in hosts:
        allowed = f"only {', '.join(hosts)}" if hosts else "none here: give a file"
        raise DataFailure("media_refused", f"{url:.200}: the host {host!r} is not allowed, {allowed}")
    return url


def _fetched(url: str, timeout_s: float) -> bytes:
    data = bytearray()
    try:
        with urllib.request.build_opener(_NoRedirect).open(url, timeout=timeout_s) as answer:
            until = time.monotonic() + timeout_s
            while piece := answer.read1(MAX_BYTES + 1):
                data += piece
                if len(data) > MAX_BYTES:
                    raise _too_long()
                if time.monotonic() > until:
                    raise TimeoutError(f"the answer takes more than {timeout_s:g} s")
            if answer.length:
                raise OSError(f"the answer was cut off, {answer.length} bytes are missing")
            return bytes(data)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise DataFailure("media_missing", f"{url:.200} cannot be fetched: {error}") from error
