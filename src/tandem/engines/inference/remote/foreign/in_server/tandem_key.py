"""A lock on every route of a server that Tandem starts: a request without the server's key gets status 401.

It runs in the server's environment, where Tandem is not installed. vLLM's own `--api-key` covers only some routes (and no
developer routes), and SGLang writes its key into its log. This key is passed in an environment variable, which no other user
of the machine can read.
"""

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

KEY_VARIABLE = "TANDEM_SERVER_KEY"


class RequireKey:
    """ASGI middleware that requires exactly one header ``Authorization: Bearer KEY``, compared in constant time. Without a
    key in the environment, the server does not start."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        self._right = _digest(b"Bearer " + os.environ[KEY_VARIABLE].encode())

    async def __call__(
        self, scope: Mapping[str, Any], receive: Callable[..., Awaitable[Any]], send: Callable[..., Awaitable[None]]
    ) -> None:
        keys = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        right = len(keys) == 1 and hmac.compare_digest(_digest(keys[0]), self._right)
        if scope["type"] == "lifespan" or right:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "this server needs its key"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})


def _digest(value: bytes) -> bytes:
    """Returns the hash of a value. Hashes have one length, while comparing the values would reveal the key's length."""
    return hashlib.sha256(value).digest()
