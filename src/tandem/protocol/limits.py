"""Limits of one client, and of all together, of a server."""

from dataclasses import dataclass

STRANGERS_GIB = 8.0
"""The media store of a server that other machines reach, where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bounds on requests and waits; what passes them is refused by name."""

    max_connections: int = 4096
    """Most open connections; the next is closed at once."""

    max_body_bytes: int = 8 << 20
    """Longest body of a request."""

    max_depth: int = 32
    """Deepest nesting of a body."""

    max_media_body_bytes: int = 32 << 20
    """Longest body of a request with images or sounds, where the model takes them."""

    max_media_pixels: int = 2**28
    """Most pixels of all images of one request together (268 million)."""

    max_media_seconds: float = 3600.0
    """Longest time that all sounds of one request last together."""

    max_media_requests: int = 16
    """Most requests whose images and sounds are read or wait for it; the next is refused with status 503."""

    body_timeout_s: float = 30.0
    """A body must have arrived whole after this long."""

    idle_timeout_s: float = 30.0
    """A connection on which no request has arrived whole for this long is closed."""

    shutdown_s: float = 30.0
    """Requests that run when the server is told to end have this long."""
