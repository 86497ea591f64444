"""A lock on every route of a server that Tandem starts: whoever has not its key gets 401, developer routes included.

It runs in the server's environment, where there is no Tandem. vLLM's own `--api-key` covers a part of its routes, and
SGLang's is written into its log; here the key comes in the environment, which no other user of the machine can read.
"""

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

KEY_VARIABLE = "TANDEM_SERVER_KEY"


class RequireKey:
    """ASGI middleware: ``Authorization: Bearer KEY``, once, compared in constant time. Without a key it does not start."""

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
    """The hash of a value. All hashes have one length; comparing the values would tell how long the right one is."""
    return hashlib.sha256(value).digest()
