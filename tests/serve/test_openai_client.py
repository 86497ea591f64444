"""The official client of OpenAI, and what it may ask for."""

import json

import openai
import pytest

from tandem.api.requests import NoiseKey
from tandem.models.tokenizer import load_tokenizer
from tests.serve.served import Served, one_by_one, request_of
from tests.tiny import tiny_model_folder

MESSAGES = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def in_process(local, tokenizer, sampling, n=1):
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    return one_by_one(local, [request_of(ids, NoiseKey(5, sample=i), **sampling) for i in range(n)])


def chat(client, **more):
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **{"max_tokens": 12, "seed": 5} | more)


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_chat_is_what_the_engine_makes(client, local, tokenizer):
    answer = chat(client, n=3, temperature=0.7, logprobs=True)

    expected = in_process(local, tokenizer, {"temperature": 0.7}, n=3)
    for choice, response in zip(answer.choices, expected, strict=True):
        assert choice.message.content == tokenizer.decode(response.output_ids, skip_special_tokens=True)
        assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(response.logprobs, abs=1e-5)
        assert choice.finish_reason == ("length" if response.truncated else "stop")
    assert answer.usage.completion_tokens == sum(len(response.output_ids) for response in expected)
    assert answer.usage.prompt_tokens == len(expected[0].input_ids)
    assert answer.system_fingerprint == "weights-0"


def test_temperature_0_is_greedy(client, local, tokenizer):
    (response,) = in_process(local, tokenizer, {"greedy": True})

    contents = {chat(client, temperature=0, seed=seed).choices[0].message.content for seed in (1, 2)}
    assert contents == {tokenizer.decode(response.output_ids, skip_special_tokens=True)}


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_whole_answer_says(client, n):
    sampling = {"n": n, "temperature": 0.9, "logprobs": True, "max_tokens": 40, "extra_body": {"min_tokens": 20}}
    whole = chat(client, **sampling)
    texts, logprobs, reasons, roles, usage = [""] * n, [[] for _ in range(n)], [None] * n, [0] * n, None
    chunks = 0
    for chunk in chat(client, stream=True, stream_options={"include_usage": True}, **sampling):
        usage = chunk.usage or usage
        chunks += 1
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            logprobs[choice.index] += [e.logprob for e in choice.logprobs.content] if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]

    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices] and roles == [1] * n
    for streamed, choice in zip(logprobs, whole.choices, strict=True):
        assert streamed == pytest.approx([entry.logprob for entry in choice.logprobs.content], abs=1e-5)
    assert usage == whole.usage
    assert chunks > n + 2  # it really came in pieces


def test_stop_strings_end_an_answer_and_are_left_out(client):
    def content(seed, **more):
        return chat(client, temperature=0.9, max_tokens=60, seed=seed, **more)

    contents = ((seed, content(seed).choices[0].message.content) for seed in range(20))
    seed, whole = next((seed, whole) for seed, whole in contents if len(whole) > 20)
    stop = next(whole[i : i + 2] for i in range(4, len(whole) - 2) if whole.index(whole[i : i + 2]) == i)
    before = whole[: whole.index(stop)]

    answer = content(seed, stop=[stop]).choices[0]
    streamed = content(seed, stop=stop, stream=True)
    assert answer.message.content == before and answer.finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == before


def test_completions_take_text_tokens_and_several_prompts(client, local, tokenizer):
    ids = tokenizer("There are three trees")["input_ids"]
    sampling = {"model": "tiny", "max_tokens": 8, "seed": 4, "temperature": 0.8, "n": 2, "logprobs": 0}
    text = client.completions.create(prompt="There are three trees", **sampling)
    tokens = client.completions.create(prompt=ids, **sampling)
    both = client.completions.create(prompt=[ids, tokenizer("four")["input_ids"]], **sampling)

    expected = one_by_one(
        local, [request_of(ids, NoiseKey(4, sample=i), temperature=0.8, max_new_tokens=8) for i in range(2)]
    )
    words = [tokenizer.decode(response.output_ids, skip_special_tokens=True) for response in expected]
    assert [c.text for c in text.choices] == [c.text for c in tokens.choices] == [c.text for c in both.choices[:2]] == words
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert text.choices[0].logprobs.token_logprobs == pytest.approx(expected[0].logprobs, abs=1e-5)


def test_completions_stream(client):
    sampling = {"model": "tiny", "prompt": "There are", "max_tokens": 20, "seed": 1}
    whole = client.completions.create(**sampling).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **sampling)) == whole


def test_a_seed_repeats_and_none_differs(client):
    def content(**more):
        return client.completions.create(model="tiny", prompt="a", max_tokens=30, **more).choices[0].text

    assert content(seed=1) == content(seed=1) != content(seed=2)
    assert content() != content()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}}, "chat_template_kwargs.chat_template"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
        ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"max_completion_tokens": 3}, "max_tokens"),
        ({"stop": [""]}, "stop[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_effect_is_refused_by_name(client, more, named):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **more)

    assert refused.value.param == named and named.partition("[")[0] in refused.value.message


def test_values_that_ask_for_nothing_are_accepted(client):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}}
    assert (
        chat(client, **neutral, temperature=0).choices[0].message.content
        == chat(client, temperature=0).choices[0].message.content
    )


def test_another_model_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="model must be 'tiny'"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)


def test_parts_of_text_are_one_message_and_pictures_are_refused(client):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 + 4?"}]
    joined = [MESSAGES[0], {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="tiny", messages=joined, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == chat(client, temperature=0).choices[0].message.content

    picture = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": picture}])


def test_tools_reach_the_chat_template(tmp_path):
    template = (
        "{# <tool_call> #}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}{% endfor %}"
    )
    folder = tiny_model_folder(tmp_path, chat_template=template)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "!"})
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    expected = {"with": "[weather]hiweather(Rome)!", "none": "hiweather(Rome)!"}
    with Served(folder) as served:
        tokenizer = load_tokenizer(folder)
        for choice, more in (("with", {"tools": [tool]}), ("none", {"tools": [tool], "tool_choice": "none"})):
            usage = served.json("POST", "/v1/chat/completions", body | more)["usage"]
            assert usage["prompt_tokens"] == len(tokenizer(expected[choice], add_special_tokens=False)["input_ids"])
        broken = json.loads(json.dumps(body))
        broken["messages"][1]["tool_calls"][0]["function"]["arguments"] = "{"
        assert "JSON object" in served.json("POST", "/v1/chat/completions", broken, status=400)["error"]["message"]


def test_a_template_that_refuses_the_messages_is_the_clients_fault(tmp_path):
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}x"
    with Served(tiny_model_folder(tmp_path, chat_template=template)) as served:
        body = {"model": "tiny", "messages": [{"role": "system", "content": "x"}]}
        assert "begin with the user" in served.json("POST", "/v1/chat/completions", body, status=400)["error"]["message"]


def test_a_model_without_a_template_serves_completions_only(tmp_path):
    with Served(tiny_model_folder(tmp_path, chat_template=None)) as served:
        body = {"model": "tiny", "messages": MESSAGES}
        assert "no chat template" in served.json("POST", "/v1/chat/completions", body, status=400)["error"]["message"]
        assert served.json("POST", "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2})["choices"]


@pytest.mark.parametrize("prompt", ["", [], [[]], [[], [1]], [["a"]], [1, "a"], [-1], [10**9], None, {"a": 1}])
def test_what_is_no_prompt_is_refused(served, prompt):
    answer = served.json("POST", "/v1/completions", {"model": "tiny", "prompt": prompt}, status=400)
    assert answer["error"]["param"].startswith("prompt")
