"""A session records what an agent asks of the model: one turn for each reply, whatever the client does, and named bounds."""

import asyncio
import io
import json
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import openai
import pytest
from aiohttp.test_utils import make_mocked_request

from tandem.api.failures import DataFailure, InfrastructureFailure
from tandem.api.requests import NoiseKey, StopReason
from tandem.protocol.bodies import Refusal
from tandem.rollout.recorder import ENDED, SessionRecorder, Sessions
from tandem.rollout.recording_session import SessionLimits
from tests.rollout.scripted import GCONFIG, ScriptedEngine, opened, reply_of, user
from tests.rollout.test_recorded_forest import CALLS, TOOLS
from tests.tiny import CHATML

HELLO = {"model": "m", "messages": [user("hello")]}


def counting(request, number):
    return f"answer {number}"


def test_a_conversation_is_one_trajectory_of_the_tokens_that_the_engine_saw_and_made():
    async def talk():
        engine, messages = ScriptedEngine(lambda r, n: f"an|swer {n}"), [user("3 + 4 =")]
        async with opened(engine) as (session, ask):
            for _ in range(3):
                status, answer = await ask({"model": "m", "messages": messages})
                assert status == 200 and answer["model"] == "m"
                messages += [reply_of(answer), user("again")]
        return engine, session.sample(1.0), messages

    engine, sample, messages = asyncio.run(talk())
    (trajectory,) = sample.trajectories
    request, response = engine.log[-1]
    assert tuple(trajectory.input_ids.tolist()) == request.input_ids + response.output_ids
    made = [token for _, response in engine.log for token in response.output_ids]
    assert trajectory.input_ids[trajectory.loss_mask].tolist() == made
    assert engine.tokenizer.decode(trajectory.input_ids).startswith("<|im_start|>user\n3 + 4 =<|im_end|>\n")
    assert [dict(m) for m in sample.messages] == messages[:-1]
    assert sample.metrics["rollout/recorded/turns"] == 3 and sample.metrics["rollout/recorded/roots"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_of_openai_reads_text_and_calls_whole_or_as_a_stream(stream):
    async def talk():
        engine = ScriptedEngine(lambda r, n: CALLS[2] if n == 0 else "It is 6.", delay_s=lambda n: 0.05)
        recorder = SessionRecorder(engine.tokenizer, keep_alive_s=0.01)
        async with opened(engine, recorder=recorder) as (session, _):
            client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key)
            assert [model.id async for model in client.models.list()] == ["policy"]
            messages, options = [user("1 + 2 + 3 =")], {"tools": TOOLS, "model": "gpt-4o", "tool_choice": "required"}
            for _ in range(2):
                message = await said(client, messages, {**options, "stream": stream})
                messages.append({"role": "assistant", "content": message.content, "tool_calls": message.tool_calls})
                messages += [{"role": "tool", "tool_call_id": i, "content": "6"} for i in message.ids]
            await client.close()
        return message, messages, session.sample(1.0)

    async def said(client, messages, options):
        if not options["stream"]:
            message = (await client.chat.completions.create(messages=messages, **options)).choices[0].message
            calls = [call.model_dump() for call in message.tool_calls or ()]
        else:
            pieces = [c.choices[0] async for c in await client.chat.completions.create(messages=messages, **options)]
            calls = [call.model_dump() for piece in pieces for call in piece.delta.tool_calls or ()]
            message = SimpleNamespace(content="".join(piece.delta.content or "" for piece in pieces))
            assert pieces[-1].finish_reason == ("tool_calls" if calls else "stop")
        return SimpleNamespace(content=message.content, tool_calls=calls, ids=[call["id"] for call in calls])

    message, messages, sample = asyncio.run(talk())
    assert message.content == "It is 6." and len(messages) == 5
    assert [json.loads(c["function"]["arguments"])["a"] for c in messages[1]["tool_calls"]] == [1, 2]
    assert len(sample.trajectories) == 1 and sample.metrics["rollout/recorded/without_call"] == 1
    assert sample.metrics["rollout/recorded/orphans"] == 0, "a stream is read too"


def test_a_request_that_is_sent_again_is_sampled_once_and_two_that_are_alike_are_two():
    async def talk():
        engine = ScriptedEngine(counting, delay_s=lambda n: 0.15)
        async with opened(engine) as (session, ask):
            with pytest.raises(TimeoutError):  # the client leaves, and asks again, twice: while it runs, and when it is done
                await asyncio.wait_for(ask(HELLO), 0.05)
            again = await ask(HELLO, headers={"x-stainless-retry-count": "1"})
            late = await ask(HELLO, headers={"x-stainless-retry-count": "2"})
            assert again[1]["id"] == late[1]["id"] and engine.asked == 1
            keyed = [await ask({"messages": [user("b")]}, headers={"Idempotency-Key": "k"}) for _ in range(2)]
            assert keyed[0][1]["id"] == keyed[1][1]["id"] and engine.asked == 2
            alike = await asyncio.gather(*(ask({"messages": [user("c")]}) for _ in range(2)))
            assert engine.asked == 4 and alike[0][1]["id"] != alike[1][1]["id"]
        return session.metrics()

    metrics = asyncio.run(talk())
    assert metrics["rollout/recorded/retries"] == 3 and metrics["rollout/recorded/orphans"] == 0


def test_what_asks_for_something_else_is_no_retry():
    """A retry is known by its key, its prompt and what it asks for; not where its turn was continued, or is long ago."""
    again = {"headers": {"x-stainless-retry-count": "1"}}

    async def talk():
        engine = ScriptedEngine(counting)
        async with opened(engine) as (_, ask):
            keyed = [(await ask(HELLO, headers={"Idempotency-Key": key}))[1] for key in "ab"]
            retried = await ask(HELLO, headers={"Idempotency-Key": "a", **again["headers"]})
            retried, (first, second) = retried[1]["id"], [one["id"] for one in keyed]
            assert retried == first != second, "the key counts before the order"
            for fields in ({"max_tokens": 5}, {"stop": "."}, {"tool_choice": "none"}):
                assert (await ask(HELLO | fields, **again))[1]["id"] not in {one["id"] for one in keyed}
            assert engine.asked == 5
        for retry_s, asked in ((60.0, 1), (0.0, 2)):
            before = engine.asked
            async with opened(engine, limits=SessionLimits(retry_s=retry_s)) as (_, ask):
                for _ in range(2):
                    await ask(HELLO, **again)
            assert engine.asked - before == asked
        async with opened(engine) as (_, ask):
            _, first = await ask(HELLO)
            await ask({"messages": [*HELLO["messages"], reply_of(first), user("go on")]})
            _, other = await ask(HELLO, **again)
            assert other["id"] != first["id"], "its reply was read"

    asyncio.run(talk())


def test_the_noise_of_a_turn_that_failed_is_that_of_its_retry():
    """So a run whose engine failed is the run whose engine did not."""

    async def noises(fails):
        line = lambda r, n: InfrastructureFailure("server", "gone") if n == fails else "x"  # noqa: E731
        engine = ScriptedEngine(line, delay_s=lambda n: 0.03)
        async with opened(engine) as (_, ask):
            await asyncio.gather(*(ask(HELLO) for _ in range(2)))
            if fails is not None:
                assert (await ask(HELLO))[0] == 200
        return {request.noise_key for request, _ in engine.log}

    first, second, whole = (asyncio.run(noises(fails)) for fails in (0, 1, None))
    assert first == second == whole and len(whole) == 2


def test_paths_without_a_trained_token_are_no_trajectories():
    async def talk():
        engine = ScriptedEngine(lambda r, n: ("", StopReason.LENGTH) if n == 0 else f"answer {n}")
        async with opened(engine) as (session, ask):
            _, cut = await ask(HELLO)
            for text in ("go on", "once more"):
                await ask({"messages": [*HELLO["messages"], reply_of(cut), user(text)]})
        return session.sample(1.0)

    sample = asyncio.run(talk())
    assert sample.metrics["rollout/recorded/trajectories"] == 3
    assert [int(one.loss_mask.sum() > 0) for one in sample.trajectories] == [1, 1]
    assert [chat[-1]["content"] for chat in sample.conversations] == ["answer 1", "answer 2"]
    assert (sample.completion_text, sample.messages) == ("answer 2", sample.conversations[-1])


def test_the_sample_is_judged_by_the_turn_that_was_asked_for_last():
    """Also where an earlier one is answered later; what the agent says of itself last counts."""

    async def talk(side_calls):
        engine = ScriptedEngine(counting, delay_s={0: 0.3, 1: 0.0, 2: 0.1, 3: 0.0}.get)
        async with opened(engine, side_calls=side_calls) as (session, ask):

            async def begun(messages):
                task = asyncio.create_task(ask({"messages": messages}))
                while engine.asked == len(tasks):
                    await asyncio.sleep(0.001)
                tasks.append(task)
                return task

            tasks = []
            await begun([user("a title?")])
            _, first = await (await begun(HELLO["messages"]))
            for text in ("slow", "fast"):
                await begun([*HELLO["messages"], reply_of(first), user(text)])
            await asyncio.gather(*tasks)
            for reward in (1, 2):
                await ask({"reward": reward, "metrics": {"m": reward}}, path="/reward")
        return session.reward, session.sample(0.0)

    (reward, trained), (_, skipped) = (asyncio.run(talk(side_calls)) for side_calls in ("train", "skip"))
    assert reward == {"reward": 2.0, "own_reward": True, "metrics": {"m": 2.0}}
    assert (trained.completion_text, len(trained.trajectories)) == ("answer 3", 3)
    assert (skipped.completion_text, len(skipped.trajectories)) == ("answer 3", 2)
    assert trained.metrics["rollout/recorded/without_call"] == 0, "no turn had to call a tool"
    assert skipped.metrics["rollout/recorded/side_calls"] == 1
    assert skipped.metrics["rollout/recorded/last_left_out"] == 0


def test_an_episode_whose_last_call_is_left_out_is_told(caplog):
    async def talk():
        engine = ScriptedEngine(counting, delay_s={0: 0.2, 1: 0.0}.get)
        async with opened(engine) as (session, ask):
            task = asyncio.create_task(ask(HELLO | {"tools": TOOLS}))
            while engine.asked == 0:
                await asyncio.sleep(0.001)
            await asyncio.gather(task, ask({"messages": [user("a title?")]}))
        return session.sample(0.0)

    sample = asyncio.run(talk())
    assert sample.metrics["rollout/recorded/last_left_out"] == 1 and sample.completion_text == "answer 0"
    assert "the last call of an episode is a side call" in caplog.text and "side_calls=train" in caplog.text


def test_a_key_is_remembered_as_over_as_long_as_there_is_room():
    sessions, ended = Sessions(), [SimpleNamespace(key=f"sk-{i}") for i in range(ENDED + 1)]
    for one in ended:
        sessions.open(one)
        sessions.end(one)
    told = []
    for one in (ended[0], ended[1], ended[-1]):
        with pytest.raises(Refusal) as refusal:
            sessions.of(make_mocked_request("GET", "/", {"Authorization": f"Bearer {one.key}"}))
        told.append(refusal.value.status)
    assert told == [401, 410, 410]


def test_an_answer_that_nobody_took_leaves_the_loss():
    async def talk():
        engine = ScriptedEngine(counting, delay_s=lambda n: 0.1)
        async with opened(engine) as (session, ask):
            _, first = await ask(HELLO)
            messages = [*HELLO["messages"], reply_of(first)]
            left = asyncio.create_task(ask({"messages": [*messages, user("left")]}))
            while engine.asked < 2:
                await asyncio.sleep(0.001)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            await ask({"messages": [*messages, user("taken")]})
            await asyncio.sleep(0.2)
        return engine, session.sample(1.0)

    engine, sample = asyncio.run(talk())
    assert len(engine.log) == 3 and sample.metrics["rollout/recorded/orphans"] == 1
    (trajectory,) = sample.trajectories
    assert "left" not in engine.tokenizer.decode(trajectory.input_ids)


def test_the_noise_of_a_turn_is_named_by_its_prompt_and_not_by_its_arrival():
    async def keys(order):
        engine = ScriptedEngine(lambda r, n: "x", delay_s=lambda n: 0.01 * n)
        async with opened(engine) as (_, ask):
            await asyncio.gather(*(ask({"messages": [user(text)]}) for text in order))
        return {engine.tokenizer.decode(list(request.input_ids)): request.noise_key for request, _ in engine.log}

    one, other = asyncio.run(keys("abc")), asyncio.run(keys("cab"))
    assert one == other and len(set(one.values())) == 3
    assert {key._replace(trajectory=0) for key in one.values()} == {NoiseKey(3, 1, 2)}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": 2}, "n is not served"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "'image_url'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search'"),
        ({"stop": ""}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [user("a"), {"role": "assistant", "content": "{"}]}, "not continued"),
        ({"continue_final_message": True}, "continue_final_message is not served"),
        ({"chat_template": "{{ 1 }}"}, "chat_template is not served"),
        ({"regex": "[0-9]"}, "regex is not served"),
        ({"json_schema": "{}"}, "json_schema is not served"),
        ({"min_tokens": 5}, "min_tokens is not served"),
        ({"previous_response_id": "r"}, "previous_response_id is not served"),
    ],
)
def test_what_would_change_the_meaning_is_refused_with_the_reason(fields, words):
    async def talk():
        engine = ScriptedEngine(counting)
        async with opened(engine) as (_, ask):
            return await ask(HELLO | fields), engine.asked

    (status, answer), asked = asyncio.run(talk())
    assert status == 400 and words in answer["error"]["message"] and asked == 0


def test_sampling_is_the_trainers_and_what_an_agent_sets_is_counted():
    async def talk():
        engine = ScriptedEngine(lambda r, n: "one Observation: two")
        async with opened(engine) as (session, ask):
            fields = {"temperature": 0, "seed": 5, "max_tokens": 32000, "store": True, "user": "u", "stop": ["Observation:"]}
            _, answer = await ask(HELLO | fields)
            await ask({"messages": [user("b")], "max_completion_tokens": 7})
        engine.line = lambda r, n: ("one Observation: two", StopReason.LENGTH)
        async with opened(engine, replace(GCONFIG, stop=("End:",))) as (_, ask):
            _, cut = await ask(HELLO | {"stop": ["Observation:", "End:"]})
        assert engine.log[-1][0].gconfig.stop == ("End:", "Observation:")
        assert cut["choices"][0]["message"]["content"] == "one Observation: two", "the reply did not end with it"
        return engine, session, answer

    engine, session, answer = asyncio.run(talk())
    (first, _), (second, _), _ = engine.log
    assert first.gconfig.temperature == GCONFIG.temperature and first.gconfig.max_new_tokens == GCONFIG.max_new_tokens
    assert first.gconfig.stop == ("Observation:",) and second.gconfig.max_new_tokens == 7
    assert answer["choices"][0]["message"]["content"] == "one "
    assert session.counts.overridden == {"temperature": 1, "seed": 1, "max_tokens": 1}


def calling(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}, user("b")]}


ODD = [
    ("/chat/completions", calling("[" * 400 + "]" * 400), {}, "64 deep"),
    ("/chat/completions", calling('{"a": ' * 900 + "1" + "}" * 900), {}, "64 deep"),
    ("/chat/completions", calling('{"a": "\\ud800"}'), {}, "must be a JSON object as text"),
    ("/chat/completions", {"messages": [{"role": {}, "content": "a"}]}, {}, "messages[0].role must be one of"),
    ("/chat/completions", {"messages": ["user"]}, {}, "messages[0] must be an object"),
    ("/messages", {"messages": [{"role": [], "content": "a"}]}, {}, "messages[0].role must be one of"),
    ("/messages", {"messages": [user("a")], "tool_choice": {"type": {}}}, {}, "tool_choice.type must be one of"),
    ("/responses", {"input": [{"role": {}, "content": "a"}]}, {}, "input[0].role must be one of"),
    ("/chat/completions", HELLO, {"x-stainless-retry-count": "1" * 5000}, "x-stainless-retry-count must be"),
    ("/reward", {"reward": 10**400}, {}, "reward must be a number up to"),
    ("/reward", b'{"reward": 1e999}', {}, "1e999 is too large a number"),
    ("/chat/completions", b'{"messages": [' + b"[]," * 70_000 + b"[]]}", {}, "at most 1048576 values"),
    ("/chat/completions", b'{"messages": [' + b"[]," * 400_000 + b"[]]}", {}, "at most 1048576 values"),
    ("/chat/completions", {"messages": [user("one, two [three] " * 70_000)]}, {}, "characters have"),
]


def test_odd_requests_are_refused_with_the_reason_and_fail_nothing():
    async def talk():
        engine = ScriptedEngine(counting)
        recorder = SessionRecorder(engine.tokenizer, context=512)
        async with opened(engine, recorder=recorder) as (session, ask):
            said = []
            for path, body, headers, _ in ODD:
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                kind = {"Content-Type": "application/json", "Authorization": f"Bearer {session.key}"}
                async with aiohttp.request(
                    "POST", session.base_url + path, data=io.BytesIO(body), headers=kind | headers
                ) as answer:
                    said.append((answer.status, (await answer.json())["error"]["message"]))
            assert (await ask(HELLO))[0] == 200
        return said, engine.asked

    said, asked = asyncio.run(talk())
    assert [status for status, _ in said] == [400] * len(ODD) and asked == 1
    for (_, words), (*_, expected) in zip(said, ODD, strict=True):
        assert expected in words


def test_tokens_are_counted_and_a_model_is_told_without_a_turn():
    async def talk():
        engine = ScriptedEngine(counting)
        async with opened(engine) as (session, ask):
            body = {"messages": [user("hello")], "output_config": {"effort": "low"}, "max_tokens": 5}
            counted = [await ask(body, path="/messages/count_tokens")]
            counted.append(await ask({"input": "hello"}, path="/responses/input_tokens"))
            client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key)
            model = await client.models.retrieve("org/policy")
            await client.close()
            assert engine.asked == 0 and not session.has_requests
            await ask(body, path="/messages")
        return counted, model.id, len(engine.log[0][0].input_ids)

    counted, model, tokens = asyncio.run(talk())
    assert [(status, answer["input_tokens"]) for status, answer in counted] == [(200, tokens)] * 2
    assert model == "org/policy"


def test_a_call_where_none_may_be_is_text():
    async def talk():
        async with opened(ScriptedEngine(lambda r, n: CALLS[0])) as (_, ask):
            return [(await ask(HELLO | {"tools": TOOLS, "tool_choice": choice}))[1] for choice in ("none", "auto")]

    without, with_call = (answer["choices"][0]["message"] for answer in asyncio.run(talk()))
    assert "tool_calls" not in without and without["content"] == CALLS[0]
    assert len(with_call["tool_calls"]) == 1 and with_call["content"] is None


# ------------------------------------------------------------------ faults: docs/agents_recorder.md has them as a table


def refused(act, *, engine=None, **options):
    """(status, code) of what ``act(session, ask)`` is answered, while a turn of another session goes on undisturbed."""

    async def talk():
        one = engine or ScriptedEngine(counting)
        other = ScriptedEngine(lambda r, n: "fine", delay_s=lambda n: 0.2)
        recorder = SessionRecorder(one.tokenizer, max_body_bytes=1 << 20)
        async with opened(other, recorder=recorder) as (_, ask_other), opened(one, recorder=recorder, **options) as (s, ask):
            beside = asyncio.create_task(ask_other(HELLO))
            status, answer = await act(s, ask)
            assert reply_of((await beside)[1])["content"] == "fine"
        return status, answer["error"]["code"] or answer["error"]["message"]

    return asyncio.run(talk())


def test_a_key_that_opens_no_session_is_refused():
    assert refused(lambda session, ask: ask(HELLO, key="sk-other")) == (401, "unknown_key")


def test_a_turn_belongs_to_the_session_whose_key_it_has():
    """The agent that holds another's key has called nobody; its turns are the other one's."""

    async def talk():
        engine, messages = ScriptedEngine(counting), [user("3 + 4 =")]
        recorder = SessionRecorder(engine.tokenizer)
        async with opened(engine, recorder=recorder) as (thief, ask), opened(engine, recorder=recorder) as (owner, ask_own):
            for _ in range(2):
                _, answer = await ask_own({"messages": messages})
                messages += [reply_of(answer), user("again")]
                assert (await ask({"messages": [user("another's task")]}, key=owner.key))[0] == 200
        return thief, owner.sample(1.0), messages[:-1]  # the turn before the user's last words is the owner's

    thief, sample, messages = asyncio.run(talk())
    with pytest.raises(DataFailure, match="agent_never_called"):
        thief.sample(1.0)
    assert messages in [[dict(message) for message in one] for one in sample.conversations]
    assert sample.metrics["rollout/recorded/turns"] == 4 and sample.metrics["rollout/recorded/side_calls"] == 0


def test_a_body_that_is_too_long_is_refused_before_it_is_read():
    async def act(session, ask):
        port = int(session.base_url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {session.key}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {100 << 20}\r\n\r\n{{".encode())
        said = (await reader.read()).decode()  # the rest is never sent
        writer.close()
        return int(said.split()[1]), json.loads(said.partition("\r\n\r\n")[2])

    assert refused(act) == (413, "the body must have at most 1048576 bytes")


def test_a_flood_is_bounded():
    async def act(session, ask):
        answers = await asyncio.gather(*(ask({"messages": [user(str(i))]}) for i in range(40)))
        assert sorted(status for status, _ in answers) == [200] * 4 + [429] * 36
        return next(answer for answer in answers if answer[0] == 429)

    slow = ScriptedEngine(counting, delay_s=lambda n: 0.1)
    assert refused(act, engine=slow, limits=SessionLimits(max_concurrent=4)) == (429, "max_concurrent")


def test_turns_are_bounded():
    async def act(session, ask):
        for i in range(3):
            await ask({"messages": [user(str(i))]})
        return await ask({"messages": [user("one more")]})

    assert refused(act, limits=SessionLimits(max_turns=3)) == (403, "max_turns")


def test_a_prompt_longer_than_the_context_is_refused_as_openai_does():
    engine = ScriptedEngine(lambda r, n: DataFailure("prompt_too_long", "9 tokens"))
    assert refused(lambda session, ask: ask(HELLO), engine=engine) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [(InfrastructureFailure("server", "gone"), 503, "server"), (("half a wo", StopReason.CANCELLED), 400, "cancelled")],
)
def test_a_failure_of_the_engine_is_not_the_agents_and_a_retry_samples_anew(line, status, reason):
    async def act(session, ask):
        answer = await ask(HELLO)
        assert session.failure.reason == reason and not session.forest.nodes
        status, _ = await ask(HELLO, headers={"x-stainless-retry-count": "1"})
        assert status == 200 and session.failure is None and len(session.forest.nodes) == 1
        return answer

    engine = ScriptedEngine(lambda r, n: line if n == 0 else "fine")
    assert refused(act, engine=engine) == (status, reason)


def test_messages_that_the_template_refuses_are_refused():
    engine = ScriptedEngine(counting)
    engine.tokenizer.chat_template = CHATML.replace(
        "{% for", "{{ raise_exception('no b') if messages[0].content == 'b' }}{% for"
    )
    assert refused(lambda session, ask: ask({"messages": [user("b")]}), engine=engine) == (400, "template_refuses")


def test_a_reward_that_is_none_is_refused():
    status, words = refused(lambda session, ask: ask({"reward": "high"}, path="/reward"))
    assert status == 400 and "reward must be a number" in words


def test_a_call_after_the_end_is_refused_and_one_under_way_ends():
    async def talk():
        engine = ScriptedEngine(counting, delay_s=lambda n: 5.0)
        recorder = SessionRecorder(engine.tokenizer)
        async with aiohttp.ClientSession() as http:
            async with recorder.session(engine, GCONFIG) as session:
                url, header = f"{session.base_url}/chat/completions", {"x-api-key": session.key}
                under_way = asyncio.create_task(http.post(url, json=HELLO, headers=header))
                while not engine.asked:
                    await asyncio.sleep(0.01)
            late = await http.post(f"{session.keyed_url}/chat/completions", json=HELLO)
            answers = [await under_way, late]
            return [(one.status, (await one.json())["error"]["code"]) for one in answers], session

    answers, session = asyncio.run(talk())
    assert answers == [(410, "session_ended")] * 2
    with pytest.raises(DataFailure, match="agent_exited_early"):
        session.sample(1.0)


def test_a_stream_that_fails_says_so_in_the_stream():
    async def talk():
        engine = ScriptedEngine(lambda r, n: DataFailure("prompt_too_long"), delay_s=lambda n: 0.1)
        recorder = SessionRecorder(engine.tokenizer, keep_alive_s=0.02)
        async with opened(engine, recorder=recorder) as (_, ask):
            return await ask(HELLO | {"stream": True})

    status, text = asyncio.run(talk())
    assert status == 200 and text.startswith(": the turn is being made") and "context_length_exceeded" in text


def test_a_reply_that_was_cut_is_not_continued():
    async def talk():
        engine = ScriptedEngine(lambda r, n: ("long", StopReason.LENGTH) if n == 0 else "short")
        async with opened(engine) as (session, ask):
            _, answer = await ask(HELLO)
            assert answer["choices"][0]["finish_reason"] == "length"
            await ask({"messages": [*HELLO["messages"], reply_of(answer), user("go on")]})
        return session.sample(1.0)

    sample = asyncio.run(talk())
    assert len(sample.trajectories) == 2 and sample.metrics["rollout/recorded/roots"] == 2
    assert [len(one) for one in sample.conversations] == [2, 4] and sample.conversations[1] == sample.messages
