"""Who may call: the address that was asked for, where the call comes from, and its token."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from aiohttp import web

from tandem.protocol.refusal import Refusal

Audience = Literal["open", "data", "control"]
"""`open`: a page that says nothing of anybody's; it needs no token."""

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    """True if an address can be reached from this machine only."""
    return host in LOOPBACK or host.startswith("127.")


@dataclass(frozen=True)
class Access:
    """The rules of one server.

    ``token`` opens the routes for data, and only those; None leaves them open, which is right on loopback only.
    ``admin_token`` opens the control routes, and only those; None: there are none. ``hosts`` are names under which the
    server may be asked for.
    """

    admin_token: str | None
    token: str | None
    hosts: frozenset[str]

    @classmethod
    def of(cls, host: str, *, token: str | None, admin_token: str | None, allowed_hosts: Iterable[str] = ()) -> "Access":
        names = {host.lower(), *(name.lower() for name in allowed_hosts)}
        return cls(admin_token, token, frozenset(names | LOOPBACK if is_loopback(host) else names))

    def check_place(self, request: web.Request) -> None:
        """Refuses names that are not the server's (DNS rebinding) and pages of other sites (a browser says so).

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
        """A name that was allowed, or the very address at which the connection arrived: no name can be made to mean that."""
        address = request.transport.get_extra_info("sockname") if request.transport is not None else None
        return name is not None and (name in self.hosts or (address is not None and name == address[0]))

    def check_token(self, request: web.Request, audience: Audience) -> None:
        """Compares in constant time.

        Raises:
            Refusal: 401.
        """
        if audience == "open":
            return
        if audience == "control" and self.admin_token is None:
            raise Refusal(403, "this server has no control routes")
        expected = self.admin_token if audience == "control" else self.token
        if expected is None:
            return
        given = request.headers.getall("Authorization", [])
        scheme, _, value = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        right = hmac.compare_digest(_digest(value), _digest(expected))
        if scheme.lower() != "bearer" or not right:
            which = "admin token" if audience == "control" else "token"
            message = f"this route needs the server's {which}: Authorization: Bearer …"
            raise Refusal(401, message, headers={"WWW-Authenticate": "Bearer"})


def _digest(token: str) -> bytes:
    """A digest of one length for all tokens: comparing them directly would tell how long the right one is."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _hostname(host: str) -> str | None:
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises where it is no number
    except ValueError:
        return None
    return parts.hostname if parts.netloc == host and "@" not in host else None
