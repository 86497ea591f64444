"""Reading a request's body: bounded in bytes, seconds and depth, and JSON in the strict sense."""

import asyncio
import json
from typing import Any, NoReturn

from aiohttp import web

from tandem.protocol.limits import ServerLimits
from tandem.protocol.refusal import Refusal
from tandem.protocol.schema import Schema, SchemaError, check_text, check_value

_LARGE_BYTES = 1 << 16
"""A body above this is parsed in a thread, so that other requests need not wait."""


async def read_body(request: web.Request, schema: Schema, limits: ServerLimits, max_bytes: int) -> dict[str, Any]:
    """The body, checked.

    Raises:
        Refusal: 400 no JSON, nested too deep, or against the schema; 408 too slow; 413 too long; 415 not called JSON.
    """
    if request.content_type != "application/json":
        raise Refusal(415, f"Content-Type must be application/json, got {request.content_type!r}")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refusal(415, f"a body is sent as it is, got Content-Encoding {request.headers['Content-Encoding']!r}")
    raw = await _read(request, limits, max_bytes)
    if len(raw) < _LARGE_BYTES:
        return parse(raw, schema, limits.max_depth)
    return await asyncio.to_thread(parse, raw, schema, limits.max_depth)


async def _read(request: web.Request, limits: ServerLimits, max_bytes: int) -> bytes:
    too_long = Refusal(413, f"the body must have at most {max_bytes} bytes", headers={"Connection": "close"})
    if (request.content_length or 0) > max_bytes:
        raise too_long
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > max_bytes:
                    raise too_long
                chunks.append(chunk)
    except TimeoutError:
        message = f"the body must arrive within {limits.body_timeout_s:g} s"
        raise Refusal(408, message, headers={"Connection": "close"}) from None
    return b"".join(chunks)


def parse(raw: bytes, schema: Schema, max_depth: int) -> dict[str, Any]:
    """The value of a JSON text, if the schema allows it; raises `Refusal`."""
    try:
        value = json.loads(raw.decode(), parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None
    check_depth(value, max_depth)
    try:
        return check_value(value, schema)
    except SchemaError as failure:
        raise Refusal(400, str(failure), param=failure.where or None) from None


def check_depth(value: Any, max_depth: int) -> None:
    """Raises `Refusal` where objects and arrays are nested deeper, or a string anywhere holds half a character."""
    level = [value]
    for _ in range(max_depth + 1):
        inner: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                inner += entry.values()
                inner += entry.keys()
            elif isinstance(entry, list):
                inner += entry
            elif isinstance(entry, str):
                _check_string(entry)
        if not inner:
            return
        level = inner
    raise _too_deep(max_depth)


def _check_string(entry: str) -> None:
    if not entry.isascii():
        try:
            check_text(entry, "a string")
        except SchemaError as failure:
            raise Refusal(400, str(failure)) from None


def _too_deep(max_depth: int) -> Refusal:
    return Refusal(400, f"the body must be nested at most {max_depth} deep")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")
