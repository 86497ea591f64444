"""Answers that are JSON, calls that must be made, log-probabilities of prompts: what evaluators, judges and apps ask for."""

import json
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tandem.models.catalog import resolve
from tests.protocol.templates import TEMPLATES
from tests.serve.served import Served
from tests.tiny import CHATML, tiny_model_folder

MESSAGES = [{"role": "user", "content": "Which city?"}]
ANY = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS}}
NOTHING = {"type": "function", "function": {"name": "nothing", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}}
SWITCH = CHATML + "{% if loud %}LOUD{% endif %}"


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]
    sunny: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_model_folder(tmp_path_factory.mktemp("switch"), chat_template=SWITCH, max_position_embeddings=2048)
    with Served(folder, max_tokens=2048) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def refused(server, path, body):
    return server.json("POST", path, body, status=400)["error"]


def test_the_official_client_parses_an_answer_into_its_class(client):
    answer = client.chat.completions.parse(**ANY, response_format=Place, seed=3)
    assert isinstance(answer.choices[0].message.parsed, Place) and answer.choices[0].finish_reason == "stop"
    response = client.responses.parse(model="tiny", input="Which city?", text_format=Place, max_output_tokens=200)
    assert isinstance(response.output_parsed, Place)


def test_a_stream_and_several_answers_fit_the_schema_too(server, client):
    chunks = client.chat.completions.create(**ANY, response_format=SCHEMA, stream=True, n=3, seed=1)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    whole = client.chat.completions.create(**ANY, response_format=SCHEMA, n=3, seed=1)
    assert texts == [choice.message.content for choice in whole.choices] and len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), PARAMETERS)


def test_json_mode_writes_an_object(client):
    answer = client.chat.completions.create(**ANY, response_format={"type": "json_object"}, n=4, temperature=1.5, seed=0)
    texts = {choice.message.content: choice.finish_reason for choice in answer.choices}
    assert all(text.startswith("{") for text in texts)
    assert all(isinstance(json.loads(text), dict) for text, reason in texts.items() if reason == "stop")


@pytest.mark.parametrize("part", ["uniqueItems", "not", "$dynamicRef"])
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_part(server, part):
    schema = {"type": "object", "properties": {"a": {part: True}}}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    error = refused(server, "/v1/chat/completions", ANY | {"response_format": named})
    assert error["param"] == "response_format.json_schema.schema" and part in error["message"]
    responses = {"model": "tiny", "input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}
    assert refused(server, "/v1/responses", responses)["param"] == "text.format.schema"
    messages = ANY | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    assert part in refused(server, "/v1/messages", messages)["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=type)
def test_a_call_that_must_be_made_is_made_and_fits_its_schema(client, choice):
    tools = [WEATHER] if choice == "required" else [NOTHING, WEATHER]
    answer = client.chat.completions.create(**ANY, tools=tools, tool_choice=choice, n=3, seed=2).choices
    for one in answer:
        (call,) = one.message.tool_calls
        assert call.function.name == "weather" and one.finish_reason == "tool_calls" and one.message.content is None
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_the_other_dialects_force_calls_and_formats_too(server, client):
    tool = {"name": "weather", "input_schema": PARAMETERS}
    message = server.json("POST", "/v1/messages", ANY | {"tools": [tool], "tool_choice": {"type": "any"}})
    (block,) = message["content"]
    assert block["type"] == "tool_use" and message["stop_reason"] == "tool_use"
    jsonschema.validate(block["input"], PARAMETERS)

    form = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    message = server.json("POST", "/v1/messages", ANY | {"output_config": form})
    jsonschema.validate(json.loads(message["content"][0]["text"]), PARAMETERS)

    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    response = client.responses.create(model="tiny", input="Which city?", tools=[tool], tool_choice="required")
    (call,) = response.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    history = [{"role": "user", "content": "Which city?"}, call.model_dump(exclude_none=True)]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "sun"})
    assert client.responses.create(model="tiny", input=history, tools=[tool], max_output_tokens=5).usage.output_tokens <= 5


@pytest.mark.parametrize("family", ["qwen_coder", "mistral"])
def test_a_call_in_a_format_that_is_no_plain_json_cannot_be_forced(tmp_path, family):
    folder = tiny_model_folder(tmp_path, chat_template=TEMPLATES[family], max_position_embeddings=4096)
    with Served(folder, max_tokens=4096) as server:
        error = refused(server, "/v1/chat/completions", ANY | {"tools": [WEATHER], "tool_choice": "required"})
    assert error["param"] == "tool_choice" and family in error["message"]


def test_what_contradicts_itself_is_refused(server):
    chat = "/v1/chat/completions"
    assert refused(server, chat, ANY | {"tools": [WEATHER], "response_format": SCHEMA})["param"].startswith(
        "response_format"
    )
    other = {"type": "function", "function": {"name": "other"}}
    assert "other" in refused(server, chat, ANY | {"tools": [WEATHER], "tool_choice": other})["message"]
    assert refused(server, chat, ANY | {"response_format": SCHEMA, "min_tokens": 3})["code"] == "bad_request"
    assert refused(server, "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 0})["param"] == "max_tokens"
    stream = {"model": "tiny", "prompt": "a", "echo": True, "stream": True}
    assert refused(server, "/v1/completions", stream)["param"] == "echo"


def test_the_most_probable_tokens_come_with_a_chat(client):
    answer = client.chat.completions.create(**ANY | {"max_tokens": 6}, temperature=0, logprobs=True, top_logprobs=20)
    for entry in answer.choices[0].logprobs.content:
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert len(logprobs) == 20 and logprobs == sorted(logprobs, reverse=True) and logprobs[0] == entry.logprob


@pytest.mark.parametrize("prompt", ["Which city?", [5, 60, 71, 88]], ids=["text", "tokens"])
def test_a_prompt_is_scored_as_if_it_had_been_written(client, prompt):
    """What the model wrote has, as a prompt, the log-probabilities that it was written with."""
    made = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, seed=4, logprobs=2, echo=True).choices[0]
    scores = made.logprobs
    assert made.text.startswith(scores.tokens[0]) and scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(scores.text_offset)
    assert all(2 <= len(top) <= 3 for top in scores.top_logprobs[1:] if "\ufffd" not in top)
    plain = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, seed=4, logprobs=0).choices[0]
    assert scores.token_logprobs[-8:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-5)
    scored = client.completions.create(model="tiny", prompt=prompt, max_tokens=0, logprobs=0, echo=True)
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(scores.token_logprobs[1:-8], abs=1e-5)
    assert scored.usage.completion_tokens == 0 and made.text.startswith(scored.choices[0].text)


def test_options_of_the_template_reach_it_and_its_other_names_are_refused(server):
    def count(**more):
        return server.json("POST", "/v1/chat/completions", ANY | {"max_tokens": 1} | more)["usage"]["prompt_tokens"]

    assert count(chat_template_kwargs={"loud": True}) > count(chat_template_kwargs={"loud": False}) == count(user="me")
    error = refused(server, "/v1/chat/completions", ANY | {"chat_template_kwargs": {"enable_thinking": False}})
    assert error["param"] == "chat_template_kwargs.enable_thinking" and "loud" in error["message"]


def test_tokens_of_a_turn_are_counted(server):
    whole = server.json("POST", "/v1/messages", ANY | {"max_tokens": 1})["usage"]["input_tokens"]
    assert whole > 5
    counted = server.json("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES})
    assert counted == {"input_tokens": whole}, "as Anthropic's"
    counted = server.json("POST", "/v1/responses/input_tokens", {"model": "tiny", "input": MESSAGES})
    assert counted == {"input_tokens": whole, "object": "response.input_tokens"}, "as OpenAI's"


def test_a_dialect_is_refused_in_its_own_shape(server):
    body = server.json("POST", "/v1/messages", ANY | {"container": "c"}, status=400)
    assert body["type"] == "error" and body["error"]["details"]["unsupported"] == ["container"]
    status, body = server.request("POST", "/v1/messages", ANY, headers={"Host": "evil.example"})[:2]
    assert (status, json.loads(body)["type"]) == (403, "error"), "also what is refused before the body is read"
    for behind in ("/", "/batches"):
        status, body = server.request("POST", f"/v1/messages{behind}", ANY)[:2]
        assert (status, json.loads(body)["type"]) == (404, "error"), "also where the path goes on behind the route"


def test_too_many_parts_of_a_message_are_told_apart_from_no_text(server):
    parts = [{"type": "text", "text": "a"}] * 3000
    error = refused(server, "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": parts}]})
    assert error["message"] == "messages[0].content must have 0 to 256 items, got 3000"
    error = refused(server, "/v1/chat/completions", ANY | {"stop": ["x"] * 17})
    assert error["message"] == "stop must have 0 to 16 items, got 17"
    body = server.json("POST", "/v1/messages", ANY | {"temperature": 9}, status=400)
    assert body["type"] == "error" and "temperature" in body["error"]["message"]


@pytest.mark.slow
@pytest.mark.invariant
def test_the_real_model_answers_a_class_and_calls_a_tool():
    with (
        Served(resolve("smollm2-135m"), vocab_size=49152, max_tokens=2048) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        question = [{"role": "user", "content": "Is Rome sunny in July? Give city and sunny as JSON."}]
        asked = {"model": "tiny", "temperature": 0, "max_tokens": 100}
        answer = client.chat.completions.parse(messages=question, response_format=Place, **asked)
        assert answer.choices[0].message.parsed == Place(city="Rome", sunny=True)
        question = [{"role": "user", "content": "What will the weather be in Oslo in the next 3 days?"}]
        choice = client.chat.completions.create(messages=question, tools=[WEATHER], tool_choice="required", **asked)
        (call,) = choice.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}
