"""What docs/serve.md shows works: its blocks are taken from the page, with this server's address and model put in."""

import ast
import asyncio
import inspect
import json
import re
import shlex
from pathlib import Path

import openai
import pydantic
import pytest

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.remote.tandem_server import TandemServer
from tandem.models.tokenizer import load_tokenizer
from tests.serve.served import ADMIN, Saying, Served

PAGE = (Path(__file__).parents[2] / "docs/serve.md").read_text()
BLOCKS = [text for language, text in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S) if not language]


@pytest.fixture(scope="module")
def own(folder):
    """A server of its own: the page takes it for a run."""
    with Served(folder, run="my-run") as server:
        yield server


def block(words, served):
    (text,) = (text for text in BLOCKS if words in text)
    return text.replace("http://127.0.0.1:8000", served.url).replace("smollm2-135m", "tiny")


def test_the_command_of_curl(own):
    words = shlex.split(block("curl", own).replace("\\\n", " "))
    answer = own.json("POST", words[1].removeprefix(own.url), json.loads(words[words.index("-d") + 1]))
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_the_lines_with_the_official_client(own, capsys):
    code = block("openai.OpenAI", own)
    names = {"openai": openai, "messages": [{"role": "user", "content": "hi"}]}
    exec(compile(code, "page", "exec"), names)
    names["client"].close()
    assert capsys.readouterr().out


def test_the_lines_with_tools(folder, capsys):
    words = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": "3"}}\n</tool_call>'
    with Served(folder) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30) as client:
        real, server.service.engine = server.service.engine, Saying(load_tokenizer(folder), words)
        exec(compile(block("tools=[weather]", server), "page", "exec"), {"client": client})
        server.service.engine = real
    assert capsys.readouterr().out == 'weather {"city": "Rome", "days": 3}\n'


def test_the_lines_with_a_class(folder, capsys):
    with Served(folder) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30) as client:
        real, server.service.engine = server.service.engine, Saying(load_tokenizer(folder), '{"city": "Rome", "days": 3}')
        exec(compile(block("pydantic.BaseModel", server), "page", "exec"), {"client": client, "pydantic": pydantic})
        server.service.engine = real
    assert capsys.readouterr().out == "city='Rome' days=3\n"


def test_the_body_of_a_message(own):
    call = ast.parse(block("anthropic.Anthropic", own)).body[0].value
    body = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    message = own.json("POST", "/v1/messages", body)
    assert message["type"] == "message" and message["content"][0]["text"] and message["usage"]["input_tokens"]


def test_the_lines_with_our_client(own):
    code = compile(block("TandemServer.attach", own), "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = {"TandemServer": TandemServer, "LLMRequest": LLMRequest, "GenerationConfig": GenerationConfig}
    names |= {"NoiseKey": NoiseKey, "ids": (5, 6), "token": ADMIN}

    async def run():
        result = eval(code, names)
        assert inspect.iscoroutine(result)
        await result

    asyncio.run(run())
    assert names["response"].output_ids and own.json("GET", "/health")["run"] is None
    own.json("POST", "/control/attach", {"run": "my-run"})


def test_the_body_and_the_answer_of_generate(own):
    request, answer = (
        json.loads(re.sub(r" {3,}[a-z].*$", "", text, flags=re.M).replace("…", ""))
        for text in block('"input_ids"', own).split("\n\n")
    )
    given = own.json("POST", "/generate", request | {"input_ids": [5, 6]})
    assert given.keys() == answer.keys() and {type(v) for v in given["versions"]} == {int}


def test_the_body_and_the_answer_of_the_token_route(own):
    request, answer = (
        json.loads(re.sub(r" {3,}may be.*$", "", text, flags=re.M).replace("…", ""))
        for text in block('"token_ids"', own).split("\n\n")
    )
    given = own.json("POST", "/inference/v1/generate", request | {"token_ids": [5, 6]})
    assert given.keys() == answer.keys() and given["choices"][0].keys() == answer["choices"][0].keys()
    entries = [one["choices"][0]["logprobs"]["content"][0] for one in (given, answer)]
    assert entries[0].keys() == entries[1].keys() and entries[0]["token"].startswith("token_id:")
