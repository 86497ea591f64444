"""An ASGI application, as those of vLLM and SGLang, that passes every request on to a stand-in of another process.

``STAND_IN`` is the stand-in's address; ``HOLE`` a path that no middleware sees.
"""

import os
import sys

import aiohttp
from aiohttp import web


class Door:
    """Takes middleware as FastAPI does: each goes around all that were added before."""

    def __init__(self):
        self._outermost = _pass_on

    def add_middleware(self, kind):
        self._outermost = kind(self._outermost)

    def serve(self, port):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        web.run_app(app, host="127.0.0.1", port=port, print=None)

    async def _handle(self, request):
        headers = [(name.lower(), value) for name, value in request.raw_headers]
        scope = {"type": "http", "method": request.method, "path": request.path_qs, "headers": headers}
        sent = []

        async def receive():
            return {"type": "http.request", "body": await request.read()}

        async def send(message):
            sent.append(message)

        await (_pass_on if request.path == os.environ.get("HOLE") else self._outermost)(scope, receive, send)
        start, body = sent
        return web.Response(status=start["status"], body=body["body"], content_type="application/json")


async def _pass_on(scope, receive, send):
    url, body = os.environ["STAND_IN"] + scope["path"], (await receive())["body"]
    kind = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession() as session, session.request(scope["method"], url, data=body, headers=kind) as answer:
        await send({"type": "http.response.start", "status": answer.status})
        await send({"type": "http.response.body", "body": await answer.read()})


def option(name):
    """What follows a word of the command line."""
    return sys.argv[sys.argv.index(name) + 1]
