"""Coroutines of the user's as agents: where their reward comes from, and a name for each way in which one fails."""

import asyncio
import contextlib
import json
import sys
import time
import urllib.request

import aiohttp
import pytest

from tandem.api.failures import DataFailure, EngineDied, InfrastructureFailure, WrongWorkflow
from tandem.api.requests import StopReason
from tandem.api.workflow import RewardResult
from tandem.config.errors import ConfigError
from tandem.rollout.agents import AgentWorkflow
from tandem.rollout.recorder import SessionRecorder
from tests.rollout.clockwork import Constant
from tests.rollout.scripted import GCONFIG, ScriptedEngine, user

ROW = {"messages": [user("3 + 4 =")], "answer": "7"}


async def ask(base_url, api_key, messages, path="/chat/completions", **fields):
    headers = {"Authorization": f"Bearer {api_key}"}
    body = {"messages": messages} | fields
    async with aiohttp.ClientSession() as http, http.post(base_url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def run(agent, engine=None, reward=None, count=1, **knobs):
    """The sample of an agent, or those of ``count`` that run beside each other."""

    async def play():
        one = engine or ScriptedEngine(lambda r, n: "7")
        recorder = SessionRecorder(one.tokenizer)
        names = dict.fromkeys(("base_url", "api_key", "data"))
        workflow = AgentWorkflow(agent, names, reward, GCONFIG, recorder, **knobs)
        try:
            return await asyncio.gather(*(workflow.arun_episode(one, dict(ROW)) for _ in range(count)))
        finally:
            recorder.close()

    samples = asyncio.run(play())
    return samples[0] if count == 1 else samples


@pytest.mark.parametrize(
    ("given", "expected"), [(0.5, {"reward": 0.5}), ({"reward": 1, "accuracy": 1.0, "rewards": {"a": 2}}, {"accuracy": 1.0})]
)
def test_the_reward_is_what_the_agent_returns(given, expected):
    async def agent(base_url, api_key, data):
        await ask(base_url, api_key, data["messages"])
        return given

    sample = run(agent, reward=Constant())
    assert {name: getattr(sample, name) for name in expected} == expected and sample.completion_text == "7"


def test_the_agent_sends_the_reward_or_the_configured_one_judges_the_last_reply():
    async def sends(base_url, api_key, data):
        await ask(base_url, api_key, data["messages"])
        async with aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {api_key}"}
            await (await http.post(f"{base_url}/reward", json={"reward": 0.25}, headers=headers)).read()

    async def says_nothing(base_url, api_key, data):
        await ask(base_url, api_key, data["messages"])

    assert run(sends, reward=Constant()).reward == 0.25
    assert run(says_nothing, reward=Constant()).accuracy == 1.0
    with pytest.raises(DataFailure, match="no_reward"):
        run(says_nothing)

    class Gold(Constant):
        def check_row(self, row):
            raise ConfigError("the row has no column 'gold'")

    with pytest.raises(DataFailure, match=r"no_reward.*gave no reward, and the run's reward cannot judge this row.*'gold'"):
        run(says_nothing, reward=Gold())
    assert run(sends, reward=Gold()).reward == 0.25

    async def both(base_url, api_key, data):
        await sends(base_url, api_key, data)
        return 1.0

    with pytest.raises(DataFailure, match="two_rewards"):
        run(both)


@pytest.mark.parametrize(("beside", "better"), [("9", 1), ("6", 0), ("no number", 0)])
def test_an_episode_whose_best_rewarded_call_is_left_out_is_told(beside, better, caplog):
    """The reward is the number in a reply; it raises where there is none, which costs the sample nothing."""

    class Number(Constant):
        async def __call__(self, *, completion, **given):
            return RewardResult(float(completion))

    async def agent(base_url, api_key, data):
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
        title = asyncio.create_task(ask(base_url, api_key, [user("a title?")]))
        while engine.asked == 0:
            await asyncio.sleep(0.001)
        await asyncio.gather(title, ask(base_url, api_key, data["messages"], tools=tools))
        return own

    def line(request, number):
        return beside if "a title?" in engine.tokenizer.decode(request.input_ids) else "7"

    for own, left_out in ((None, better), (0.5, 0)):
        engine = ScriptedEngine(line, delay_s=lambda number: 0.2)
        sample = run(agent, engine=engine, reward=Number())
        assert (sample.reward, sample.metrics["rollout/recorded/side_calls"]) == (own or 7.0, 1)
        assert sample.metrics["rollout/recorded/best_left_out"] == left_out
    assert ("the best call of an episode is a side call" in caplog.text) == better
    own, engine = None, ScriptedEngine(line, delay_s=lambda number: 0.2)
    kept = run(agent, engine=engine, reward=Number(), side_calls="train")
    assert kept.metrics["rollout/recorded/best_left_out"] == 0


@pytest.mark.parametrize("wrong", ["good", {"accuracy": 1.0}, {"reward": 1.0, "colour": 2}, {"reward": None}, [1.0]])
def test_an_agent_that_returns_something_else_ends_the_run_and_says_what_to_return(wrong):
    async def agent(base_url, api_key, data):
        await ask(base_url, api_key, data["messages"])
        return wrong

    with pytest.raises(WrongWorkflow, match="must return a number, a dict with 'reward', or None"):
        run(agent)


# ------------------------------------------------------------------ faults: docs/agents_recorder.md has them as a table


async def never_calls(base_url, api_key, data):
    return 1.0


async def exits_early(base_url, api_key, data):
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ask(base_url, api_key, data["messages"]), 0.7)
    return 1.0


async def raises(base_url, api_key, data):
    await ask(base_url, api_key, data["messages"])
    raise KeyError("plan")


async def leaves(base_url, api_key, data):
    sys.exit(3)


async def cancels_itself(base_url, api_key, data):
    raise asyncio.CancelledError


async def asks_in_vain(base_url, api_key, data):
    await ask(base_url, api_key, data["messages"], n=3)
    return 1.0


async def hangs(base_url, api_key, data):
    await ask(base_url, api_key, data["messages"])
    await asyncio.sleep(60)


async def raises_on_cut(base_url, api_key, data):
    _, answer = await ask(base_url, api_key, data["messages"])
    assert answer["choices"][0]["finish_reason"] == "length"
    raise ValueError("unfinished")


async def hangs_and_will_not_end(base_url, api_key, data):
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        hangs_and_will_not_end.late = await ask(base_url, api_key, data["messages"])


def test_an_agent_leaves_the_rewards_part_of_the_episodes_time():
    engine = ScriptedEngine(lambda r, n: "7")
    engine.remaining_s = 0.5
    with pytest.raises(DataFailure, match=r"agent_timeout: the agent was not done after 0\.4\d* s"):
        run(hangs, engine=engine)
    with pytest.raises(ConfigError, match=r"agent_timeout_s must be .* below rollout\.episode_timeout_s \(100\), got 100"):
        run(hangs, episode_timeout_s=100.0, agent_timeout_s=100.0)


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (never_calls, "agent_never_called"),
        (exits_early, "agent_exited_early"),
        (asks_in_vain, "agent_refused: no request of the agent could be served; the last: n is not served"),
        (raises, "agent_raised: KeyError: 'plan'"),
        (raises_on_cut, "agent_raised_on_cut_reply: ValueError: unfinished.*raise gconfig.max_new_tokens"),
        (leaves, "agent_raised: RuntimeError: the agent called sys.exit\\(3\\)"),
        (cancels_itself, "agent_raised: CancelledError"),
        (hangs, "agent_timeout"),
        (hangs_and_will_not_end, "agent_timeout"),
    ],
)
def test_an_agent_that_fails_is_dropped_under_a_name_and_others_go_on(agent, reason):
    async def fine(base_url, api_key, data):
        return float((await ask(base_url, api_key, data["messages"]))[0] == 200)

    async def play():
        words = ("7", StopReason.LENGTH) if agent is raises_on_cut else "7"
        engine = ScriptedEngine(lambda r, n: words, delay_s=lambda n: 1.5 if agent is exits_early else 0.3)
        recorder = SessionRecorder(engine.tokenizer)
        one, other = (
            AgentWorkflow(
                f, dict.fromkeys(("base_url", "api_key", "data")), None, GCONFIG, recorder, agent_timeout_s=seconds
            )
            for f, seconds in ((agent, 1.0 if agent in (hangs, hangs_and_will_not_end) else 30.0), (fine, 30.0))
        )
        try:
            return await asyncio.gather(
                *(workflow.arun_episode(engine, dict(ROW)) for workflow in (one, other)), return_exceptions=True
            )
        finally:
            await asyncio.sleep(0.2)
            recorder.close()

    failure, sample = asyncio.run(play())
    assert sample.reward == 1.0
    with pytest.raises(DataFailure, match=reason):
        raise failure
    if agent is hangs_and_will_not_end:
        status, answer = agent.late
        assert status == 410 and answer["error"]["code"] == "session_ended"


def test_an_agent_that_blocks_its_thread_blocks_neither_the_engine_nor_the_server():
    """A client that is not asynchronous, in a coroutine."""

    async def blocks(base_url, api_key, data):
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        body = json.dumps({"messages": data["messages"]}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
            return float(answer.status == 200)

    assert [sample.reward for sample in run(blocks, count=3)] == [1.0] * 3


def test_agents_run_beside_each_other():
    async def agent(base_url, api_key, data):
        await ask(base_url, api_key, data["messages"])
        return 1.0

    began = time.monotonic()
    run(agent, ScriptedEngine(lambda r, n: "7", delay_s=lambda n: 0.5), count=20)
    assert time.monotonic() - began < 8.0  # one after the other takes ten


GONE = [InfrastructureFailure("server", "gone"), EngineDied("gone"), DataFailure("prompt_too_long", "9 tokens")]


@pytest.mark.parametrize("failure", GONE)
def test_a_failure_of_the_engine_is_not_the_agents(failure):
    async def agent(base_url, api_key, data):
        assert (await ask(base_url, api_key, data["messages"]))[0] == 200

    with pytest.raises(type(failure), match=failure.reason):
        run(agent, ScriptedEngine(lambda r, n: failure))
