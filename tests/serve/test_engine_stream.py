"""The embedded engine hands tokens over as it draws them."""

import asyncio
from contextlib import aclosing

import pytest

from tandem.api.failures import DataFailure, EngineDied
from tandem.api.requests import LLMResponse, NoiseKey, StopReason
from tests.serve.served import CONTEXT, one_by_one, request_of, tiny_engine

REQUEST = request_of((5, 6, 7), NoiseKey(3), max_new_tokens=30, min_new_tokens=30)


def pieces_of(engine, request):
    async def read():
        async with aclosing(engine.stream(request)) as pieces:
            return [piece async for piece in pieces]

    return asyncio.run(read())


def test_the_pieces_and_the_response_are_one_answer(local):
    *pieces, response = pieces_of(local, REQUEST)
    (whole,) = one_by_one(local, [REQUEST])

    assert isinstance(response, LLMResponse) and response == whole
    told = [token for piece in pieces for token in piece.output_ids]
    assert tuple(told) == response.output_ids[: len(told)] and len(pieces) > 20
    assert tuple(x for piece in pieces for x in piece.logprobs) == response.logprobs[: len(told)]


def test_a_stream_beside_ordinary_requests_changes_nothing(local):
    others = [request_of((5, i), NoiseKey(i)) for i in range(8, 12)]

    async def both():
        async def read():
            async with aclosing(local.stream(REQUEST)) as pieces:
                return [piece async for piece in pieces][-1]

        streamed, *rest = await asyncio.gather(read(), *(local.agenerate(request) for request in others))
        return streamed, rest

    streamed, rest = asyncio.run(both())
    alone = one_by_one(local, [REQUEST, *others])
    assert [streamed.output_ids, *(r.output_ids for r in rest)] == [r.output_ids for r in alone]


def test_closing_a_stream_frees_its_request(local):
    before = local.statistics()["cancelled"]

    async def leave():
        async with aclosing(local.stream(request_of((5,), NoiseKey(1), max_new_tokens=500, min_new_tokens=500))) as pieces:
            await anext(pieces)
        while (await asyncio.to_thread(local.statistics))["running"]:
            await asyncio.sleep(0.005)

    asyncio.run(leave())
    assert local.statistics()["cancelled"] == before + 1


def test_a_request_that_does_not_fit_fails_its_stream(local):
    with pytest.raises(DataFailure, match="no room"):
        pieces_of(local, request_of([5] * CONTEXT))


def test_a_stream_ends_at_its_deadline(local):
    (response,) = pieces_of(local, request_of((5,), deadline_s=0.0))
    assert response.stop_reason == StopReason.CANCELLED


def test_closing_the_engine_fails_a_stream(folder):
    engine = tiny_engine(folder)

    async def read():
        async with aclosing(engine.stream(request_of((5,), NoiseKey(1), max_new_tokens=500, min_new_tokens=500))) as pieces:
            await anext(pieces)
            await asyncio.to_thread(engine.close)
            async for _ in pieces:
                pass

    with pytest.raises(EngineDied):
        asyncio.run(read())
    with pytest.raises(EngineDied):
        pieces_of(engine, REQUEST)
