"""Intake of the images and sounds of requests: checks their sizes in the headers, then decodes them in threads. Limits each
request and the number of requests."""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tandem.api.failures import DataFailure, NotWritten
from tandem.api.media import MediaKind, Medium
from tandem.config.errors import ConfigError
from tandem.media.bound import StoreBound
from tandem.media.parts import NOWHERE, Allowed, Source, with_parts
from tandem.protocol.access import ServerLimits
from tandem.protocol.bodies import Refusal

LOG = logging.getLogger("tandem.serve")

LACKING = (
    "an image or sound that the request names by number is missing or damaged in the server's media store (the server's log "
    "says which); send it to /media and ask again"
)
"""Message to a client about a medium that is not in the store. The error's own text is not sent, because it names a folder
of this machine."""

DECODERS = 2
"""Number of media decoded at the same time; an image has at most 33 million pixels, so this also bounds the memory."""


class MediaIntake:
    """Reads the media of requests. Each request reads one medium at a time, so that no small request waits long."""

    def __init__(self, limits: ServerLimits, allowed: Allowed = NOWHERE, bound: StoreBound | None = None):
        """``bound``: the size limit of the media store; None: the store may grow without limit."""
        self._limits, self._allowed, self.bound = limits, allowed, bound
        self._pool = ThreadPoolExecutor(DECODERS, "media")
        self.num_requests = 0

    async def read(
        self, messages: Sequence[Mapping[str, Any]], kinds: Collection[MediaKind], room: int, param: str
    ) -> list[dict[str, Any]]:
        """Returns the messages with every image and sound moved to the media store, in the form of
        `tandem.media.parts.read_media`. ``kinds``: the kinds of media that the model takes. ``room``: the size of the
        model's context in tokens; each medium takes at least one of them. ``param``: the body's field, for errors.

        Raises:
            Refusal: 400, a medium is of another kind or cannot be read, or the media alone would fill the context; 413,
                together they are too large; 503, too many requests are waiting for media, or the store is full.
        """
        sources: list[Source] = []

        def listed(source: Source) -> dict[str, Any]:
            if source.kind not in kinds:
                raise Refusal(
                    400, f"{param} has a part of type {source.kind}; this model takes {' and '.join(kinds)}", param=param
                )
            sources.append(source)
            return {"type": source.kind, "medium": source}

        with reading(param):
            made = with_parts(messages, listed, self._allowed)
        if not sources:
            return made
        if len(sources) >= room:
            message = f"prompt_too_long: {len(sources)} images and sounds leave no room in the context of {room}"
            raise Refusal(400, message, code="prompt_too_long", param=param)
        if self.num_requests >= self._limits.max_media_requests:
            most = self._limits.max_media_requests
            message = f"{self.num_requests} requests already wait for their images and sounds, the maximum is {most}"
            raise Refusal(503, f"{message}; try again later", code="full", headers={"Retry-After": "1"})
        self.num_requests += 1
        loop = asyncio.get_running_loop()
        try:
            with reading(param):
                spent = {"image": 0.0, "audio": 0.0}
                sizes = [await loop.run_in_executor(self._pool, source.check) for source in sources]
                for source, size in zip(sources, sizes, strict=True):
                    self._spend(spent, source, size, param)
                for source, size in zip(sources, sizes, strict=True):
                    medium = await loop.run_in_executor(self._pool, self._keep, source)
                    if not size:  # fetched from a URL: its size is known only after the download
                        self._spend(spent, source, amount(medium), param)
                return with_parts(made, lambda source: {"type": source.kind, "medium": source.read()})
        finally:
            self.num_requests -= 1

    def _keep(self, source: Source) -> Medium:
        return source.read() if self.bound is None else self.bound.keep(source)

    def _spend(self, spent: dict[str, float], source: Source, size: float, param: str) -> None:
        spent[source.kind] += size
        pixels, seconds = self._limits.max_media_pixels, self._limits.max_media_seconds
        if spent["image"] > pixels or spent["audio"] > seconds:
            message = f"the images and sounds of one request have at most {pixels:,} pixels and {seconds:,.0f} s together"
            raise Refusal(
                413, f"media_too_large: {message}; send fewer, or smaller ones", code="media_too_large", param=param
            )

    def using(self, numbers: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Context manager within which these media are not removed from the store."""
        return contextlib.nullcontext() if self.bound is None else self.bound.using(numbers)

    def close(self) -> None:
        """Stops the threads. Media that are being decoded are finished first."""
        self._pool.shutdown(cancel_futures=True)


def amount(medium: Medium) -> float:
    """Returns the pixels of an image, or the seconds of a sound."""
    width, height = medium.size
    return float(width * height) if medium.kind == "image" else width / height


@contextlib.contextmanager
def reading(param: str) -> Iterator[None]:
    """Context manager that turns failures to read media into refusals: 400 if the medium is at fault, 503 if this server
    cannot store it."""
    try:
        yield
    except DataFailure as failure:
        raise Refusal(400, str(failure), code=failure.reason, param=param) from failure
    except (ConfigError, NotWritten) as error:
        LOG.error("%s", error)
        raise Refusal(503, "the server cannot keep images and sounds now; its log says why", code="media_store") from error
