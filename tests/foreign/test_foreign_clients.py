"""Official clients at the recorder: one that loses patience and asks again gets the same turn, and the dialects mix."""

import asyncio

import openai
import pytest

from tests.rollout.scripted import ScriptedEngine, opened, user


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_times_out_and_asks_again_gives_one_turn(dialect, stream):
    async def talk():
        engine = ScriptedEngine(lambda request, number: f"answer {number}", delay_s=lambda number: 1.0)
        async with opened(engine) as (session, _):
            client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, timeout=0.4, max_retries=6)
            async with client:
                if dialect == "chat":
                    asked = client.chat.completions.create(model="m", messages=[user("Hi.")], stream=stream)
                else:
                    asked = client.responses.create(model="m", input=[user("Hi.")], stream=stream)
                if stream:
                    pieces = [piece async for piece in await asked]
                    said = pieces[-1].response.output_text if dialect == "responses" else said_in(pieces)
                else:
                    answer = await asked
                    said = answer.output_text if dialect == "responses" else answer.choices[0].message.content
        return engine, session, said

    engine, session, said = asyncio.run(talk())
    metrics = session.sample(1.0).metrics
    assert said == "answer 0" and len(engine.log) == 1
    assert metrics["rollout/recorded/turns"] == 1 and metrics["rollout/recorded/orphans"] == 0


def said_in(pieces):
    return "".join(piece.choices[0].delta.content or "" for piece in pieces)


def test_a_chat_may_change_its_dialect_in_the_middle():
    async def talk():
        engine = ScriptedEngine(lambda request, number: f"answer {number}")
        async with (
            opened(engine) as (session, _),
            openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0) as client,
        ):
            first = await client.chat.completions.create(model="m", messages=[user("Hi.")])
            history = [user("Hi."), {"role": "assistant", "content": first.choices[0].message.content}, user("On.")]
            await client.responses.create(model="m", input=history)
        return session

    metrics = asyncio.run(talk()).sample(1.0).metrics
    assert metrics["rollout/recorded/turns"] == 2 and metrics["rollout/recorded/roots"] == 1


def test_anthropics_key_and_refusal_have_its_shape():
    async def talk():
        async with opened(ScriptedEngine(lambda request, number: "hm")) as (session, ask):
            body = {"model": "m", "max_tokens": 5, "messages": [user("Hi.")]}
            keyed = {"x-api-key": session.key, "Authorization": ""}
            good = await ask(body, path="/messages", headers=keyed)
            bad = await ask(body | {"container": "c"}, path="/messages", headers=keyed)
            lost = await ask(body, path="/messages", headers={"x-api-key": "sk-other", "Authorization": ""})
        return good, bad, lost

    (status, message), (refused, error), (unknown, _) = asyncio.run(talk())
    assert status == 200 and message["content"] == [{"type": "text", "text": "hm"}] and message["stop_reason"] == "end_turn"
    assert refused == 400 and error["type"] == "error" and "called by the agent" in error["error"]["message"]
    assert unknown == 401
