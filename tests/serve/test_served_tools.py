"""Calls of tools and thinking in the answers of `tandem serve`: read as the recorder reads them, whole and as a stream."""

import json

import openai
import pytest

from tandem.api.requests import StopReason
from tandem.models.tokenizer import load_tokenizer
from tests.protocol.templates import TEMPLATES
from tests.serve.served import Saying, Served
from tests.tiny import tiny_model_folder

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS}}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": "3"}}\n</tool_call>'
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    with Served(tiny_model_folder(tmp_path_factory.mktemp("hermes"), chat_template=TEMPLATES["hermes"])) as served:
        yield served


@pytest.fixture
def ask(hermes):
    """Asks with the official client; the model says ``text``. Answers a choice, or the joined parts of a stream."""
    model = hermes.service.engine

    def ask(text, *, reason=StopReason.STOP, eos=True, **more):
        hermes.service.engine = Saying(load_tokenizer(hermes.folder), text, reason, eos)
        with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
            answer = client.chat.completions.create(model="tiny", **{"messages": MESSAGES, "tools": [WEATHER]} | more)
            return joined(answer) if more.get("stream") else answer.choices[0]

    yield ask
    hermes.service.engine = model


def joined(stream):
    """(content, thinking, calls, reason, number of parts with words) of a stream."""
    content, thinking, calls, reasons, parts = "", "", [], [], 0
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        thinking += getattr(choice.delta, "reasoning_content", None) or ""
        parts += bool(choice.delta.content)
        calls += [
            (call.index, call.function.name, json.loads(call.function.arguments)) for call in choice.delta.tool_calls or ()
        ]
        reasons += [choice.finish_reason] if choice.finish_reason else []
    (reason,) = reasons
    return content, thinking, calls, reason, parts


def test_a_call_is_parsed_and_its_arguments_fit_the_schema(ask):
    choice = ask(f"Let me see.\n{ROME}\n{OSLO}")

    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("weather", {"city": "Rome", "days": 3}), ("weather", {"city": "Oslo"})]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_a_stream_gives_the_words_at_once_and_the_calls_when_they_are_whole(ask):
    content, _, calls, reason, parts = ask(f"Let me see.\n{ROME}\n{OSLO}", stream=True)

    assert content == "Let me see." and parts > 3
    assert (
        calls == [(0, "weather", {"city": "Rome", "days": 3}), (1, "weather", {"city": "Oslo"})] and reason == "tool_calls"
    )


@pytest.mark.parametrize("more", [{"tools": []}, {"tool_choice": "none"}], ids=["no tools", "tool_choice"])
def test_without_tools_a_call_is_text(ask, more):
    choice = ask(ROME, **more)
    assert choice.message.content == ROME and choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert ask(ROME, stream=True, **more)[:4] == (ROME, "", [], "stop")


def test_tools_that_may_not_be_called_are_not_shown_to_the_model(hermes):
    def prompt_tokens(**more):
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1} | more
        return hermes.json("POST", "/v1/chat/completions", body)["usage"]["prompt_tokens"]

    assert prompt_tokens(tools=[WEATHER]) > prompt_tokens(tools=[WEATHER], tool_choice="none") == prompt_tokens()


@pytest.mark.parametrize("text", [ROME[:-13], ROME.replace("weather", "wether")], ids=["broken", "unknown tool"])
def test_what_is_no_call_of_a_tool_stays_text(ask, text):
    choice = ask(text)
    assert choice.message.content == text and choice.finish_reason == "stop"
    assert ask(text, stream=True)[:4] == (text, "", [], "stop")


def test_a_call_that_was_cut_is_not_given_to_the_client(ask):
    choice = ask(ROME[:-12], reason=StopReason.LENGTH)
    assert choice.message.tool_calls is None and choice.finish_reason == "length"


def test_thinking_is_apart_from_the_answer(ask):
    choice = ask("<think>\nHm, 3 + 4.\n</think>\n\nIt is 7.", tools=[])
    assert choice.message.content == "It is 7." and choice.message.reasoning_content == "Hm, 3 + 4."
    streamed = ask("<think>\nHm, 3 + 4.\n</think>\n\nIt is 7.", tools=[], stream=True)
    assert streamed[:4] == ("It is 7.", "Hm, 3 + 4.", [], "stop")


def test_a_stop_string_ends_a_reply_with_tools_before_it(ask):
    assert ask("It is 7. END", eos=False, stop="END").message.content == "It is 7."
    assert ask("It is 7. END", eos=False, stop="END", stream=True)[0] == "It is 7."


def test_a_template_that_knows_no_tools_gets_them_in_the_system_prompt(tmp_path):
    with Served(tiny_model_folder(tmp_path), max_tokens=4096) as served:
        real, served.service.engine = served.engine, Saying(load_tokenizer(served.folder), ROME)
        body = {"model": "tiny", "messages": MESSAGES}
        plain, told = (served.json("POST", "/v1/chat/completions", body | more) for more in ({}, {"tools": [WEATHER]}))
        served.service.engine = real
    assert told["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 100
    assert told["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_an_agent_sends_the_answer_back_as_the_official_client_gives_it(ask):
    said = f"<think>\nHm.\n</think>\n\n{ROME}"
    first = ask(said, parallel_tool_calls=True).message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sun"}
    for back in (first, first.model_dump()):
        assert ask("It is sunny.", messages=[*MESSAGES, back, result]).message.content == "It is sunny."
