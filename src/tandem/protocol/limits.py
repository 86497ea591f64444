"""Limits of one client, and of all together, of a server."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bounds on requests and waits; what passes them is refused by name."""

    max_connections: int = 4096
    """Most open connections; the next is closed at once."""

    max_body_bytes: int = 8 << 20
    """Longest body of a request."""

    max_depth: int = 32
    """Deepest nesting of a body."""

    body_timeout_s: float = 30.0
    """A body must have arrived whole after this long."""

    idle_timeout_s: float = 30.0
    """A connection on which no request has arrived whole for this long is closed."""

    shutdown_s: float = 30.0
    """Requests that run when the server is told to end have this long."""
