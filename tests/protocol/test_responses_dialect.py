"""OpenAI's responses: what an SDK sends is read as turns, and what is answered comes back as the same history."""

import json

import openai
import pytest
from hypothesis import HealthCheck, given, settings

from tandem.api.requests import StopReason
from tandem.protocol.bodies import Refusal
from tandem.protocol.dialects import responses
from tandem.protocol.turns import Call, Reply
from tests.protocol.replies import answering, replies, results_of

LOCAL = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TOOL = {"type": "function", "name": "add", "description": "Adds.", "strict": False, "parameters": {"type": "object"}}
CODEX = {
    "model": "policy",
    "stream": True,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Make a file."}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "A shell will do."}],
            "encrypted_content": "tandem:A shell will do.",
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "status": "completed",
            "name": "exec_command",
            "arguments": '{"cmd": "touch made"}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "Process exited with code 0\n"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs.",
            "strict": False,
            "parameters": {"type": "object"},
        },
        {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [TOOL]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "client_metadata": {"session_id": "01a2"},
}


@pytest.fixture(scope="module")
def server():
    with answering(responses) as state:
        yield state


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server['url']}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_a_request_of_codex_is_read_as_a_turn():
    turn = responses.read(CODEX)

    assert [message["role"] for message in turn.messages] == ["system", "system", "user", "assistant", "tool"]
    call = {"id": "call_1", "type": "function", "function": {"name": "exec_command", "arguments": {"cmd": "touch made"}}}
    assert turn.messages[3] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "A shell will do.",
        "tool_calls": [call],
    }
    assert turn.messages[4]["name"] == "exec_command" and turn.messages[4]["content"] == "Process exited with code 0\n"
    assert [tool["function"]["name"] for tool in turn.tools] == ["exec_command", "agents.add"]
    assert turn.stream and turn.tool_choice == "auto" and turn.overridden == ()
    assert {"store", "include", "prompt_cache_key", "client_metadata", "reasoning"} <= set(turn.ignored)
    assert "tools" not in turn.ignored


def test_sampling_is_noted_and_left_to_the_trainer():
    turn = responses.read(
        {"model": "m", "input": "Hi.", "temperature": 0.1, "top_p": 1, "max_output_tokens": 9, "user": None}
    )
    assert set(turn.overridden) == {"temperature", "top_p"} and turn.max_tokens == 9 and turn.ignored == ()
    assert turn.messages == ({"role": "user", "content": "Hi."},)


@pytest.mark.parametrize(
    ("change", "where", "why"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole history in input"),
        ({"conversation": "conv_1"}, "conversation", "send the whole history"),
        ({"thread": "t"}, "thread", "not known here"),
        ({"background": True}, "background", "the request that asks"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "must be an object"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "must be one of"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "a function are known"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "switch the tool .web_search. off"),
        ({"max_output_tokens": 0.5}, "max_output_tokens", "whole number"),
        ({"input": []}, "input", "at least one"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "must be text"),
        ({"input": [{"role": "assistant", "content": "I"}]}, "input", "not continued"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input[0].type", "items are"),
    ],
)
def test_what_would_mean_something_else_is_refused_by_its_place(change, where, why):
    with pytest.raises(Refusal, match=why) as refusal:
        responses.read({"model": "m", "input": "Hi."} | change)
    assert refusal.value.param == where and refusal.value.status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_sdk_sends_back_is_the_reply_that_it_got(server, client, stream):
    @LOCAL
    @given(replies())
    def ask(reply):
        server["reply"] = reply
        asked = [{"role": "user", "content": "Go."}]
        if stream:
            with client.responses.stream(model="m", input=asked, tools=[TOOL]) as events:
                *_, last = events  # its accumulator refuses events that do not fit each other
            got = last.response
        else:
            got = client.responses.create(model="m", input=asked, tools=[TOOL])
        cut = reply.stop_reason == StopReason.LENGTH
        assert got.status == ("incomplete" if cut else "completed") and got.usage.output_tokens == 7
        assert got.output_text == reply.content
        outputs = [
            {"type": "function_call_output", "call_id": r["tool_call_id"], "output": r["content"]} for r in results_of(reply)
        ]
        history = [item.model_dump(exclude_unset=True) for item in got.output]
        turn = responses.read({"model": "m", "input": [*asked, *history, *outputs, {"role": "user", "content": "On."}]})
        assert list(turn.messages) == [*asked, reply.message(), *results_of(reply), {"role": "user", "content": "On."}]

    ask()


def test_a_call_in_a_namespace_comes_back_as_one():
    turn, reply = responses.read(CODEX), Reply("", calls=(Call("agents.add", {"a": 1}, call_id="c"),))
    (item,) = responses.answer(
        turn, reply, response_id="resp_1", model="m", usage={"prompt_tokens": 1, "completion_tokens": 1}
    )["output"]
    assert (item["namespace"], item["name"], json.loads(item["arguments"])) == ("agents", "add", {"a": 1})
    again = responses.read({"model": "m", "input": [item, {"role": "user", "content": "On."}]})
    assert again.messages[0] == reply.message()
