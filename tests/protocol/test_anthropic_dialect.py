"""Anthropic's messages: what an SDK sends is read as turns, and what is answered comes back as the same history."""

import json

import pytest
from hypothesis import HealthCheck, given, settings

from tandem.api.requests import StopReason
from tandem.protocol.bodies import Refusal
from tandem.protocol.dialects import anthropic
from tests.protocol.replies import USAGE, replies, results_of

LOCAL = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
BODY = {
    "model": "policy",
    "max_tokens": 32000,
    "temperature": 1,
    "stream": True,
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "system": [
        {"type": "text", "text": "You are a coding agent. ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ],
    "stop_sequences": ["\n\nHuman:"],
    "tools": [{"name": "bash", "description": "Runs.", "input_schema": {"type": "object"}, "cache_control": None}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "messages": [
        {"role": "user", "content": "Make a file."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A shell will do.", "signature": ""},
                {"type": "text", "text": "Right."},
                {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"cmd": "touch made"}},
                {"type": "tool_use", "id": "toolu_2", "name": "bash", "input": {"cmd": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": False},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "made"}]},
                {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
}


def as_the_sdk_accumulates(raw):
    """The message that `anthropic`'s client makes of a stream."""
    message, written = None, {}
    for event in (json.loads(line[6:]) for line in b"".join(raw).decode().splitlines() if line.startswith("data: ")):
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                written[event["index"]] = written.get(event["index"], "") + delta["partial_json"]
                block["input"] = json.loads(written[event["index"]])
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def test_a_request_is_read_as_a_turn():
    turn = anthropic.read(BODY)

    assert [message["role"] for message in turn.messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert turn.messages[0]["content"] == "You are a coding agent. Be brief."
    own = turn.messages[2]
    assert (own["content"], own["reasoning_content"]) == ("Right.", "A shell will do.")
    assert [call["function"]["arguments"] for call in own["tool_calls"]] == [{"cmd": "touch made"}, {"cmd": "ls"}]
    assert [message["content"] for message in turn.messages[3:]] == ["", "made", "Go on."]
    assert [message["name"] for message in turn.messages[3:5]] == ["bash", "bash"]
    assert turn.tools[0]["function"] == {"name": "bash", "description": "Runs.", "parameters": {"type": "object"}}
    assert turn.tool_choice == "required" and turn.stops == ("\n\nHuman:",) and turn.max_tokens == 32000 and turn.stream
    assert set(turn.overridden) == {"temperature"} and set(turn.ignored) == {"metadata", "thinking"}


@pytest.mark.parametrize(
    ("change", "where", "why"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "input_schema"),
        ({"tool_choice": {"type": "best"}}, "tool_choice.type", "must be one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content", "must be text"),
        ({"messages": [{"role": "assistant", "content": "{"}]}, "messages", "not continued"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "must be one of user"),
        ({"output_config": {"format": {}}}, "output_config.format.type", "must be one of"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget", "only effort"),
        ({"thread": {"type": "continue", "previous_message_id": "m"}}, "thread", "send all messages"),
        ({"conversation": "c"}, "conversation", "not known here"),
        ({"mcp_servers": [{}]}, "mcp_servers", "by the agent"),
        ({"stop_sequences": [""]}, "stop", "none of them empty"),
    ],
)
def test_what_would_mean_something_else_is_refused_by_its_place(change, where, why):
    with pytest.raises(Refusal, match=why) as refusal:
        anthropic.read({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi."}]} | change)
    assert refusal.value.param == where


@LOCAL
@given(replies())
def test_what_a_client_sends_back_is_the_reply_that_it_got(reply):
    asked = {"role": "user", "content": "Go."}
    turn = anthropic.read({"model": "m", "max_tokens": 5, "messages": [asked]})
    facts = {"response_id": "msg_1", "model": "m", "usage": USAGE}

    message = anthropic.answer(turn, reply, **facts)
    assert as_the_sdk_accumulates(anthropic.events(turn, reply, **facts)) == message
    ended = "tool_use" if reply.calls else "end_turn"
    assert message["stop_reason"] == ("max_tokens" if reply.stop_reason == StopReason.LENGTH else ended)

    results = [{"type": "tool_result", "tool_use_id": r["tool_call_id"], "content": r["content"]} for r in results_of(reply)]
    history = [
        asked,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "On."}]},
    ]
    again = anthropic.read({"model": "m", "max_tokens": 5, "messages": history})
    assert list(again.messages) == [asked, reply.message(), *results_of(reply), {"role": "user", "content": "On."}]
