"""Reading a request's body: bounded in bytes and seconds while it comes; a long one is parsed beside the others."""

import asyncio
import marshal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from tandem.protocol.limits import ServerLimits
from tandem.protocol.parsing import parse
from tandem.protocol.refusal import Refusal
from tandem.protocol.schema import Schema

_LARGE_BYTES = 1 << 16
"""A body above this is parsed in a thread, so that other requests need not wait."""

_HUGE_BYTES = 1 << 20
"""A body above this is parsed in a process: a thread would hold the interpreter, and keep the memory."""

_PARSE_S = 60.0
"""The process is given so long; it takes well below a second."""

_BESIDE = ThreadPoolExecutor(2, "bodies")
"""Few, because each thread that computes makes the loop wait for its turn."""

_PARSER = "import sys; sys.path[:] = sys.argv[1:]; from tandem.protocol.parsing import main; main()"


async def read_body(request: web.Request, schema: Schema, limits: ServerLimits, max_bytes: int) -> dict[str, Any]:
    """The body, checked.

    Raises:
        Refusal: 400 no JSON, too many values or nested too deep, or against the schema; 408 too slow; 413 too long; 415 not
            called JSON.
    """
    if request.content_type != "application/json":
        raise Refusal(415, f"Content-Type must be application/json, got {request.content_type!r}")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refusal(415, f"a body is sent as it is, got Content-Encoding {request.headers['Content-Encoding']!r}")
    pieces = await _read(request, limits, max_bytes)
    if len(pieces[0]) < _LARGE_BYTES:
        return parse(pieces[0], schema, limits.max_depth)
    return await asyncio.get_running_loop().run_in_executor(_BESIDE, _parse_beside, pieces, schema, limits.max_depth)


async def _read(request: web.Request, limits: ServerLimits, max_bytes: int) -> list[bytearray]:
    """The body in pieces of `_LARGE_BYTES` or a little more: to let one of megabytes grow would copy it again and again."""
    too_long = Refusal(413, f"the body must have at most {max_bytes} bytes", headers={"Connection": "close"})
    if (request.content_length or 0) > max_bytes:
        raise too_long
    pieces, size = [bytearray()], 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > max_bytes:
                    raise too_long
                if len(pieces[-1]) >= _LARGE_BYTES:
                    pieces.append(bytearray())
                pieces[-1] += chunk
    except TimeoutError:
        message = f"the body must arrive within {limits.body_timeout_s:g} s"
        raise Refusal(408, message, headers={"Connection": "close"}) from None
    return pieces


def _parse_beside(pieces: list[bytearray], schema: Schema, max_depth: int) -> dict[str, Any]:
    """`parse`, of a huge body in a process of its own, which ends with it."""
    if sum(map(len, pieces)) <= _HUGE_BYTES:
        return parse(b"".join(pieces), schema, max_depth)
    command = [sys.executable, "-S", "-c", _PARSER, *sys.path]
    try:
        given = b"".join((marshal.dumps((dict(schema), max_depth)), *pieces))  # marshalling these would hold it
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, timeout=_PARSE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:  # no process can be started, or it was killed
        words = f"the body could not be parsed ({type(error).__name__} of its process); send it again"
        raise Refusal(503, words, headers={"Retry-After": "1"}) from error
    value, status, message, param = marshal.loads(done.stdout)
    if status:
        raise Refusal(status, message, param=param)
    return dict(value)
