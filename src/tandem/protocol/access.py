"""Access rules of a server: its address, the origin of a request, tokens, and limits for each request and for all.

A token file is read if it exists and created if it does not. Only its owner may have read permission.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from aiohttp import web

from tandem.config.errors import ConfigError
from tandem.protocol.bodies import Refusal

Audience = Literal["open", "data", "control"]
"""Who may call a route. `open`: anyone, without a token, because the page shows no private data."""

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    """True if an address can be reached from this machine only."""
    return host in LOOPBACK or host.startswith("127.")


@dataclass(frozen=True)
class Access:
    """Access rules of one server.

    ``token`` opens the data routes only; None: they need no token, which is safe on loopback only. ``admin_token`` opens the
    control routes only; None: the server has no control routes. ``hosts``: the host names under which clients may call the
    server.
    """

    admin_token: str | None
    token: str | None
    hosts: frozenset[str]

    @classmethod
    def of(cls, host: str, *, token: str | None, admin_token: str | None, allowed_hosts: Iterable[str] = ()) -> "Access":
        names = {host.lower(), *(name.lower() for name in allowed_hosts)}
        return cls(admin_token, token, frozenset(names | LOOPBACK if is_loopback(host) else names))

    def check_place(self, request: web.Request) -> None:
        """Rejects a Host header that is not the server's (DNS rebinding) and requests that a browser marks as cross-site.

        Raises:
            Refusal: 403.
        """
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not self._is_ours(_hostname(hosts[0]), request):
            raise Refusal(403, f"Host {', '.join(hosts)[:100]!r} is not a name of this server; allow it with --allow-host")
        for origin in request.headers.getall("Origin", []):
            if origin.lower() not in (f"http://{hosts[0].lower()}", f"https://{hosts[0].lower()}"):
                raise Refusal(403, f"Origin {origin[:100]!r} is another site; pages of other sites may not call this server")
        if request.headers.get("Sec-Fetch-Site", "none").lower() not in ("none", "same-origin"):
            raise Refusal(403, "pages of other sites may not call this server")

    def _is_ours(self, name: str | None, request: web.Request) -> bool:
        """True for a host name of this server, or for the IP address at which the connection arrived. No DNS record can
        forge that address."""
        address = request.transport.get_extra_info("sockname") if request.transport is not None else None
        return name is not None and (name in self.hosts or (address is not None and name == address[0]))

    def check_token(self, request: web.Request, audience: Audience) -> None:
        """Checks the request's bearer token in constant time.

        Raises:
            Refusal: 401, the token is missing or wrong; 403, the server has no control routes.
        """
        if audience == "open":
            return
        if audience == "control" and self.admin_token is None:
            raise Refusal(403, "this server has no control routes")
        expected = self.admin_token if audience == "control" else self.token
        if expected is None:
            return
        headers = request.headers.getall("Authorization", [])
        scheme, _, value = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
        matches = hmac.compare_digest(token_digest(value), token_digest(expected))
        if scheme.lower() != "bearer" or not matches:
            which = "admin token" if audience == "control" else "token"
            message = f"this route needs the server's {which}: Authorization: Bearer …"
            raise Refusal(401, message, headers={"WWW-Authenticate": "Bearer"})


def token_digest(token: str) -> bytes:
    """Hashes a token or key to a fixed length, because a direct comparison or look-up would reveal by its time the length of
    the expected one, or how much of a guess is right."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _hostname(host: str) -> str | None:
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises ValueError if the port is not a number
    except ValueError:
        return None
    return parts.hostname if parts.netloc == host and "@" not in host else None


STRANGERS_GIB = 8.0
"""Default size of the media store, in GiB, of a server that other machines can reach."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits on requests and waits. A request over a limit is refused with a message that names the limit."""

    max_connections: int = 4096
    """Maximum number of open connections; the server closes each further one at once."""

    max_body_bytes: int = 8 << 20
    """Maximum size of a request's body, in bytes."""

    max_depth: int = 32
    """Maximum nesting depth of a JSON body."""

    max_media_body_bytes: int = 32 << 20
    """Maximum size in bytes of a body with images or sounds, if the model takes them."""

    max_media_pixels: int = 2**28
    """Maximum number of pixels of all images of one request together (268 million)."""

    max_media_seconds: float = 3600.0
    """Maximum duration of all sounds of one request together, in seconds."""

    max_media_requests: int = 16
    """Maximum number of requests whose media are being read or wait to be read; further ones get status 503."""

    body_timeout_s: float = 30.0
    """Maximum time in seconds for a body to arrive completely."""

    idle_timeout_s: float = 30.0
    """A connection is closed if no complete request arrives on it within this time, in seconds."""

    shutdown_s: float = 30.0
    """Maximum time in seconds for running requests to finish when the server shuts down."""


@dataclass(frozen=True, kw_only=True)
class ServiceLimits(ServerLimits):
    """The limits of an engine's server: those of every server, and those on completions, weights and the owning run."""

    max_tokens: int
    """The model's context: most tokens of a prompt and its completion."""

    default_chat_tokens: int = 1024
    """Tokens of a chat answer whose request sets no limit. A request reserves cache for all tokens that it may generate."""

    max_completions: int = 128
    """Most completions of one request: prompts times `n`."""

    max_requests: int = 4096
    """Most completions at once, waiting ones included; further requests get status 503."""

    max_long_prompts: int = 16
    """Most prompts of more than 32,768 characters that are tokenised or wait for it; further ones get status 503."""

    max_weights_body_bytes: int = 64 << 20
    """Most bytes in the body that announces weights: a name and a digest for each tensor."""

    send_timeout_s: float = 60.0
    """Seconds after which a stream ends if the client does not read it."""

    request_timeout_s: float = 3600.0
    """Seconds after which a completion is ended, whatever deadline its request has."""

    control_timeout_s: float = 600.0
    """Seconds that a control request waits for the one before it."""

    owner_silent_s: float = 600.0
    """Seconds of silence, without completions under way, after which the owning run loses the server to the next that
    attaches."""

    ready_window_s: float = 30.0
    """Age in seconds up to which the last generated token counts for `/ready`; after that `/ready` generates one."""

    ready_timeout_s: float = 10.0
    """Seconds that `/ready` waits for a token that it generates."""


MIN_CHARACTERS = 16


def token_from(file: Path) -> str:
    """Returns the token in a file. If the file does not exist, creates it with mode 0600 and a new token.

    Raises:
        ConfigError: others can read the file, or it does not hold one token of at least 16 characters without white
            space.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(file)
    except OSError as error:
        raise ConfigError(f"the token file {file} cannot be made: {error.strerror}") from error
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(token + "\n")
    return token


def _read(file: Path) -> str:
    try:
        mode, token = stat.S_IMODE(file.stat().st_mode), file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(
            f"the token file {file} must be readable by its owner only, its mode is {mode:04o}; chmod 600 {file}"
        )
    if len(token) < MIN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token file {file} must hold one token of at least {MIN_CHARACTERS} printable characters without spaces, "
            f"it has {len(token)}; delete it and a new one is made"
        )
    return token
