"""A stream of server-sent events, read on the event loop of whoever asks: for a person who watches an answer grow."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from tandem.api.failures import ServerFailed
from tandem.protocol.client import failure_of

MAX_EVENT_BYTES = 8 << 20
_END = "[DONE]"


async def stream_events(
    url: str, body: dict[str, Any], *, token: str | None, deadline_s: float
) -> AsyncGenerator[dict[str, Any], None]:
    """Posts ``body`` and yields each event's JSON, up to the end that OpenAI's protocol marks.

    Raises:
        DataFailure, ServerFailed: as `HttpClient`; also where the stream ends without its mark, or holds an error.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        async with (
            asyncio.timeout(deadline_s),
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(url, json=body, headers=headers, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise failure_of(url, answer.status, await answer.content.read(MAX_EVENT_BYTES))
            buffer = b""
            async for chunk in answer.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                if len(buffer) > MAX_EVENT_BYTES:
                    raise ServerFailed(f"{url} sent an event of more than {MAX_EVENT_BYTES} bytes", url=url, status=200)
                for line in lines:
                    event = line.decode(errors="replace").strip().removeprefix("data:").strip()
                    if event == _END:
                        return
                    if event and not event.startswith(":"):
                        yield _parsed(url, event)
    except aiohttp.ClientError as error:
        raise ServerFailed(f"{url}: {type(error).__name__}: {error}", url=url) from error
    except TimeoutError:
        raise ServerFailed(f"{url} had not ended its answer within {deadline_s:g} s", url=url) from None
    raise ServerFailed(f"{url} ended its answer without {_END}", url=url, status=200)


def _parsed(url: str, event: str) -> dict[str, Any]:
    try:
        parsed = json.loads(event)
    except (ValueError, RecursionError) as error:
        raise ServerFailed(f"{url} sent an event that is no JSON: {error}", url=url, status=200) from error
    if not isinstance(parsed, dict) or "error" in parsed:
        raise ServerFailed(f"{url} ended its answer: {parsed}", url=url, status=200)
    return parsed
