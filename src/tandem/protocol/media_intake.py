"""Images and sounds of requests: counted by their headers, then decoded beside everything else, with bounds on each request
and on all at once."""

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
from tandem.protocol.limits import ServerLimits
from tandem.protocol.refusal import Refusal

LOG = logging.getLogger("tandem.serve")

LACKING = (
    "an image or sound that the request names by number is not in the server's media store, or damaged there, which its log "
    "says; send it to /media and ask again"
)
"""Told to a client in place of the error itself, which names a folder of this machine."""

DECODERS = 2
"""Media that are decoded at once; an image is at most 33 million pixels, so this bounds the memory too."""


class MediaIntake:
    """Reads the media of requests, one after another of each request, so that no small request waits long."""

    def __init__(self, limits: ServerLimits, allowed: Allowed = NOWHERE, bound: StoreBound | None = None):
        """``bound``: of the media store; None: it grows."""
        self._limits, self._allowed, self.bound = limits, allowed, bound
        self._pool = ThreadPoolExecutor(DECODERS, "media")
        self.num_requests = 0

    async def read(
        self, messages: Sequence[Mapping[str, Any]], kinds: Collection[MediaKind], room: int, param: str
    ) -> list[dict[str, Any]]:
        """The messages with every image and sound in the media store, as `tandem.media.parts.read_media` gives them.
        ``kinds``: those that the model takes.

        Raises:
            Refusal: 400, a medium is of another kind or cannot be read, or there are more than ``room`` tokens could stand
                for; 413, together they are too large; 503, too many requests wait for theirs, or the store takes no more.
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
            message = f"{self.num_requests} requests wait for their images and sounds, of at most {most}"
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
                    if not size:  # of a host, whose answer alone says how large it is
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
        """A block in which these media stay in the store."""
        return contextlib.nullcontext() if self.bound is None else self.bound.using(numbers)

    def close(self) -> None:
        """Ends the threads once they have done what they are doing."""
        self._pool.shutdown(cancel_futures=True)


def amount(medium: Medium) -> float:
    """The pixels of an image, the seconds of a sound."""
    width, height = medium.size
    return float(width * height) if medium.kind == "image" else width / height


@contextlib.contextmanager
def reading(param: str) -> Iterator[None]:
    """Refuses media that are wrong as the fault of the client; that they cannot be kept here is the fault of the server."""
    try:
        yield
    except DataFailure as failure:
        raise Refusal(400, str(failure), code=failure.reason, param=param) from failure
    except (ConfigError, NotWritten) as error:
        LOG.error("%s", error)
        raise Refusal(503, "the server cannot keep images and sounds now; its log says why", code="media_store") from error
