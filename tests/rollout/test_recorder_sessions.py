"""A session records what an agent asks of the model: one answer a turn, whatever the client does, and bounds by name."""

import asyncio

from tests.rollout.scripted import ScriptedEngine, opened, reply_of, user


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
