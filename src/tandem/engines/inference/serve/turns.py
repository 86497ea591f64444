"""`/v1/responses` and `/v1/messages`: the dialects of agents and apps, answered by the engine itself."""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from tandem.api.requests import LLMResponse
from tandem.engines.inference.serve.answers import EVENTS, ReplyReading
from tandem.engines.inference.serve.questions import CompletionQuestion, turn_question
from tandem.engines.inference.serve.service import EngineService, check_finished
from tandem.protocol.dialects import Dialect
from tandem.protocol.refusal import Refusal
from tandem.protocol.turns import Reply

KEEP_ALIVE_S = 5.0
"""A stream whose turn is not there yet gets a comment this often."""


async def answer_turn(service: EngineService, dialect: Dialect, body: dict[str, Any], request: web.Request) -> Any:
    """One turn in a dialect, whole or as the events of a stream, which come when the turn has ended.

    Raises:
        Refusal: 400, 503, 504.
    """
    question = await _question(service, dialect, body)
    made = asyncio.ensure_future(service.complete(question.requests()))
    try:
        if question.turn.stream:
            return await _stream(service, dialect, question, made, request)
        reply, names = _reply(service, question, await made)
        return dialect.answer(question.turn, reply, **names)
    finally:
        made.cancel()  # the client may have left


async def count_tokens(service: EngineService, dialect: Dialect, body: dict[str, Any], request: web.Request) -> Any:
    """The number of tokens of a turn's prompt."""
    question = await _question(service, dialect, body)
    return dialect.counted(len(question.prompts[0]))


async def _question(service: EngineService, dialect: Dialect, body: dict[str, Any]) -> CompletionQuestion:
    turn = dialect.read(body, bool(service.tokenizers.media))
    return await turn_question(turn, body | {"stream": turn.stream}, service.tokenizers, service.limits)


def _reply(
    service: EngineService, question: CompletionQuestion, responses: Sequence[LLMResponse]
) -> tuple[Reply, dict[str, Any]]:
    check_finished(responses)
    (response,) = responses
    reading = ReplyReading(question, service.tokenizers.decoder, service.tokenizers.reader)
    usage = {"prompt_tokens": len(response.input_ids), "completion_tokens": len(response.output_ids)}
    names = {"response_id": uuid.uuid4().hex, "model": service.name, "usage": usage}
    return reading.read(response.output_ids, response.stop_reason), names


async def _stream(
    service: EngineService,
    dialect: Dialect,
    question: CompletionQuestion,
    made: "asyncio.Future[list[LLMResponse]]",
    request: web.Request,
) -> web.StreamResponse:
    """Refusals before the first byte are ordinary ones, and events after it."""
    response = web.StreamResponse(headers=EVENTS)

    async def send(data: bytes) -> None:
        try:
            async with asyncio.timeout(service.limits.send_timeout_s):
                await response.prepare(request)  # once
                await response.write(data)
        except TimeoutError:
            raise ConnectionResetError("the reader of a stream takes nothing") from None

    while not (await asyncio.wait([made], timeout=KEEP_ALIVE_S))[0]:
        await send(b": the turn is being made\n\n")
    try:
        reply, names = _reply(service, question, made.result())
    except Refusal as refusal:
        if not response.prepared:
            raise
        await send(dialect.failed(refusal))
        return response
    for event in dialect.events(question.turn, reply, **names):
        await send(event)
    return response
