"""Calls of tools: what a family's template writes is read back, and nothing that is cut off is carried out."""

import random
import string
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tandem.api.requests import StopReason
from tandem.config.errors import ConfigError
from tandem.protocol.tool_calls import CallReader
from tandem.protocol.tool_families import FAMILIES
from tandem.protocol.turns import CallStatus
from tests.protocol.templates import TEMPLATES
from tests.tiny import tiny_tokenizer

SCHEMAS = 200
QUESTION = [{"role": "user", "content": "?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "?",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def readers():
    return {family: CallReader(tiny_tokenizer(template)) for family, template in TEMPLATES.items()} | {
        "no tools": CallReader(tiny_tokenizer())
    }


def text_of(draw):
    pieces = [
        " ",
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\n",
        "é",
        "日本",
        "🙂",
        "</b>",
        "0",
        "true",
        *string.ascii_letters,
    ]
    return "a" + "".join(draw.choice(pieces) for _ in range(draw.randrange(12))) + "z"  # bare values lose outer white space


def value_of(draw, depth=0):
    """A random JSON schema, and a value that fits it."""
    kind = draw.choice(
        ["string", "integer", "number", "boolean", "enum", "null", *(["array", "object"] if depth < 2 else [])]
    )
    if kind == "array":
        schema, _ = value_of(draw, 2)
        values = [one_more(draw, schema) for _ in range(draw.randrange(3))]
        return {"type": "array", "items": schema}, values
    if kind == "object":
        parts = {f"k{i}": value_of(draw, depth + 1) for i in range(draw.randrange(3))}
        return (
            {"type": "object", "properties": {k: s for k, (s, _) in parts.items()}, "required": list(parts)},
            {k: v for k, (_, v) in parts.items()},
        )
    if kind == "enum":
        return {"type": "string", "enum": ["red", "blue"]}, draw.choice(["red", "blue"])
    if kind == "null":
        return {"anyOf": [{"type": "integer"}, {"type": "null"}]}, draw.choice([None, 7])
    return {"type": kind}, one_more(draw, {"type": kind})


def one_more(draw, schema):
    values = {
        "string": text_of(draw),
        "integer": draw.randint(-(10**12), 10**12),
        "number": draw.uniform(-1e6, 1e6),
        "boolean": draw.random() < 0.5,
    }
    if "enum" in schema:
        return draw.choice(schema["enum"])
    return None if "anyOf" in schema else values[schema["type"]]


def tool_and_call(draw):
    name = draw.choice(["get", "get_weather", "a.b", "f-1", "Search2"])
    parts = {f"arg_{i}": value_of(draw) for i in range(draw.randrange(4))}
    properties = {key: schema for key, (schema, _) in parts.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    tool = {"type": "function", "function": {"name": name, "description": "?", "parameters": parameters}}
    return tool, {key: value for key, (_, value) in parts.items()}


def written(reader, tools, *calls):
    """The text that the template writes for a reply with these calls (name, arguments), and its prompt."""
    made = [
        {"id": f"{i:09d}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    prompt = reader.render(QUESTION, tools)
    reply = {"role": "assistant", "content": "", "tool_calls": made}
    whole = reader.render([*QUESTION, reply], tools, add_generation_prompt=False)
    before = reader.render(QUESTION, tools, add_generation_prompt=False)
    tail = whole[-(len(whole) - len(before)) :] if not whole.startswith(prompt) else whole[len(prompt) :]
    return tail.removeprefix("<|im_start|>assistant\n").split("<|im_end|>")[0], prompt


def read(reader, text, tools, stop_reason=StopReason.STOP, **more):
    return reader.read(reader.tokenizer(text, add_special_tokens=False)["input_ids"], tools, stop_reason=stop_reason, **more)


def same_characters(one, other):
    """The number of characters with which two texts begin alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_every_family_is_known_by_its_template(readers):
    assert set(TEMPLATES) == set(FAMILIES)
    assert {name: reader.family.name for name, reader in readers.items() if name != "no tools"} == {n: n for n in TEMPLATES}
    assert readers["no tools"].family.name == "hermes"


@pytest.mark.parametrize("family", [*TEMPLATES, "no tools"])
def test_what_a_template_writes_is_read_as_the_same_call(readers, family):
    reader, draw = readers[family], random.Random(family)
    for _ in range(SCHEMAS):
        tool, arguments = tool_and_call(draw)
        text, prompt = written(reader, [tool], (tool["function"]["name"], arguments))
        reply = read(reader, text + "<|im_end|>", [tool], prompt=prompt)
        assert [(call.status, call.name, call.arguments) for call in reply.calls] == [
            (CallStatus.OK, tool["function"]["name"], arguments)
        ], text
        assert reply.content == ""


@pytest.mark.parametrize("schemas", [4, pytest.param(SCHEMAS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", [*TEMPLATES, "no tools"])
def test_a_reply_that_ends_anywhere_has_no_call_but_the_whole_one(readers, family, schemas):
    reader, draw = readers[family], random.Random(family)
    for _ in range(schemas):
        tool, arguments = tool_and_call(draw)
        name = tool["function"]["name"]
        text, prompt = written(reader, [tool], (name, arguments))
        for end in range(len(text)):
            assert read(reader, text[:end], [tool], StopReason.LENGTH, prompt=prompt).good_calls == (), text[:end]
            stopped = read(reader, text[:end], [tool], StopReason.STOP, prompt=prompt).good_calls  # by a text in the call
            assert [call.arguments for call in stopped] in ([], [arguments]), text[:end]


@pytest.mark.parametrize("family", [name for name in TEMPLATES if name not in ("harmony",)])
def test_several_calls_of_one_reply_are_read_in_order_with_different_ids(readers, family):
    reader = readers[family]
    text, prompt = written(reader, [WEATHER], ("weather", {"city": "Ulm"}), ("weather", {"city": "Rom", "days": 2}))
    first, second = read(reader, text, [WEATHER], prompt=prompt).good_calls
    assert (first.arguments, second.arguments) == ({"city": "Ulm"}, {"city": "Rom", "days": 2})
    assert first.call_id != second.call_id
    if family == "kimi":  # it names its calls itself
        assert second.call_id == "functions.weather:1"
    else:
        assert first.call_id.isalnum() and len(first.call_id) == 9


@pytest.mark.parametrize("family", [*TEMPLATES, "no tools"])
def test_garbage_never_raises(readers, family):
    reader, draw = readers[family], random.Random(family)
    good, prompt = written(reader, [WEATHER], ("weather", {"city": "Ulm", "days": 3}))
    for _ in range(100):
        start, end = sorted(draw.randrange(len(good) + 1) for _ in range(2))
        text = good[:start] + draw.choice(["", good[end:], "[" * 2000, '{"', "\x00�", good * 2, "9" * 5000]) + good[end:]
        for call in read(reader, text, [WEATHER], prompt=prompt).calls:
            assert (call.status == CallStatus.OK) == (call.why == "")


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>', "invalid_json", "at character"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "invalid_json", '"name"'),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}', "unclosed", "</tool_call>"),
        ('<tool_call>\n{"name": "wether", "arguments": {}}\n</tool_call>', "unknown_tool", "The tools are: weather"),
        ('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', "wrong_arguments", "'city' is missing"),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "Ulm", "days": 0}}</tool_call>',
            "wrong_arguments",
            "'days' must be at least 1",
        ),
        ('<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>', "invalid_json", ""),
        ('<tool_call>{"name": "weather", "arguments": {"city": "x", "days": NaN}}</tool_call>', "invalid_json", "NaN"),
        ('<tool_call>{"name": "weather", "arguments": {"city": "x", "days": 1e999}}</tool_call>', "invalid_json", "1e999"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_with_it(readers, text, status, words):
    (call,) = read(readers["hermes"], text, [WEATHER]).calls
    assert call.status == status and words in call.why and call.text == text


@pytest.mark.parametrize("family", [*TEMPLATES, "no tools"])
def test_a_whole_call_counts_in_a_cut_reply_if_its_own_mark_ends_it(readers, family):
    """A call that was cut may not be whole where the end of the turn closes a call."""
    reader = readers[family]
    text, prompt = written(reader, [WEATHER], ("weather", {"city": "Ulm"}))
    (call,) = read(reader, text, [WEATHER], StopReason.LENGTH, prompt=prompt).calls
    assert call.status == ("unclosed" if reader.family.end_closes else "ok")


def test_a_broken_call_ends_where_the_next_begins(readers):
    broken, whole = '[TOOL_CALLS]weather[ARGS]{"city": ', '[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}'
    for reason, last in ((StopReason.STOP, "ok"), (StopReason.LENGTH, "unclosed")):
        first, second = read(readers["mistral_args"], broken + whole, [WEATHER], reason).calls
        assert (first.status, first.text, second.status) == ("invalid_json", broken, last)


def test_calls_have_ids_of_their_own_whatever_a_model_calls_them(readers):
    kimi = readers["kimi"]
    text, _ = written(kimi, [WEATHER], ("weather", {"city": "Ulm"}))
    first, second = read(kimi, text + text, [WEATHER]).good_calls
    assert first.call_id == "functions.weather:0" != second.call_id
    hermes = readers["hermes"]
    text, _ = written(hermes, [WEATHER], ("weather", {"city": "Ulm"}))
    ids = [read(hermes, text, [WEATHER], prompt=prompt).calls[0].call_id for prompt in ("a", "b", "a")]
    assert ids[0] == ids[2] != ids[1], "results are matched by id over a whole chat"


def test_arguments_are_cast_by_the_schema(readers):
    text = '<tool_call>{"name": "weather", "arguments": {"city": 89073, "days": "3"}}</tool_call>'
    (call,) = read(readers["hermes"], text, [WEATHER]).good_calls
    assert call.arguments == {"city": "89073", "days": 3}


def test_thinking_is_no_content_and_calls_in_it_are_none(readers):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    hermes = readers["hermes"]
    reply = read(hermes, f"<think>\nMaybe {call}?\n</think>\n\nLet me see.\n{call}", [WEATHER])
    assert (len(reply.calls), reply.content, reply.reasoning) == (1, "Let me see.", f"Maybe {call}?")
    reply = read(hermes, f"Maybe.</think>{call}", [WEATHER], prompt="<|im_start|>assistant\n<think>\n")
    assert (len(reply.calls), reply.reasoning) == (1, "Maybe.")
    reply = read(hermes, call.replace("Ulm", "a</think>b"), [WEATHER])
    assert (reply.good_calls[0].arguments, reply.reasoning) == ({"city": "a</think>b"}, "")
    reply = read(hermes, f"<think>{call}", [WEATHER], StopReason.LENGTH)
    assert (reply.calls, reply.content) == ((), "")


@pytest.mark.parametrize("family", ["harmony", "kimi", "deepseek", "hermes"])
def test_a_special_token_that_ends_a_call_is_part_of_the_call(family):
    tokenizer = tiny_tokenizer(TEMPLATES[family])
    closing = FAMILIES[family].closing_text
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.all_special_tokens, closing]})
    reader = CallReader(tokenizer)
    text, prompt = written(reader, [WEATHER], ("weather", {"city": "Ulm"}))
    whole = text[: text.rindex(closing) + len(closing)]
    for ended in (whole, f"{whole}<|im_end|>"):
        reply = read(reader, ended, [WEATHER], prompt=prompt)
        assert ([call.status for call in reply.calls], reply.content) == (["ok"], "")


def test_of_several_templates_the_one_for_tools_tells_the_family():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATES["hermes"], "tool_use": TEMPLATES["glm"]}
    assert CallReader(tokenizer).family.name == "glm"


def test_harmony_channels_are_thinking_content_and_calls(readers):
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Ulm"}<|call|>'
    )
    reply = read(readers["harmony"], text, [WEATHER])
    assert (reply.reasoning, reply.content, reply.good_calls[0].arguments) == ("Hm.", "", {"city": "Ulm"})
    assert read(readers["harmony"], "<|channel|>final<|message|>Fine.<|return|>", [WEATHER]).content == "Fine."


def test_a_template_without_tools_gets_them_in_the_system_prompt_results_as_the_user(readers):
    reader = readers["no tools"]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "name": "weather", "content": "sun"},
    ]
    text = reader.render(chat, [WEATHER])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and '"name": "weather"' in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_the_templates_of_real_models_are_read_as_the_same_calls(tmp_path):
    """Those that TRL publishes, downloaded: of Qwen, GLM, Llama, gpt-oss, Gemma, DeepSeek, Nemotron and others."""
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path, "trl==1.16.0"]
    subprocess.run(fetch, check=True, timeout=200)
    (wheel,) = tmp_path.glob("trl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".jinja")]
        texts = {Path(name).stem: archive.read(name).decode() for name in names}
    families = Counter()
    for name, template in texts.items():
        reader, draw = CallReader(tiny_tokenizer(template)), random.Random(name)
        if "tool_calls" not in template:
            continue
        families[reader.family.name] += 1
        for _ in range(10):
            tool, arguments = tool_and_call(draw)
            function = tool["function"]
            for schema in function["parameters"]["properties"].values():
                schema["description"] = "?"  # some templates want one
            call = {"id": "000000001", "type": "function", "function": {"name": function["name"], "arguments": arguments}}
            before = reader.render(QUESTION, [tool], add_generation_prompt=False)
            reply = {"role": "assistant", "content": "", "tool_calls": [call]}
            whole = reader.render([*QUESTION, reply], [tool], add_generation_prompt=False)
            found = read(reader, whole[same_characters(before, whole) :], [tool]).calls
            assert [(c.status, c.name, c.arguments) for c in found] == [("ok", function["name"], arguments)], (name, whole)
    assert {"hermes", "qwen_coder", "glm", "llama", "harmony", "gemma4", "deepseek"} <= set(families)
    assert families.total() >= 40


def test_an_unknown_family_and_one_that_the_template_cannot_write_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        CallReader(tiny_tokenizer(), "hermess")
    with pytest.raises(ConfigError, match="use 'hermes'"):
        CallReader(tiny_tokenizer(), "glm")


def test_a_reply_without_tools_is_its_text(readers):
    reply = read(readers["hermes"], " It is <tool_call> 7.\n<|im_end|>", [])
    assert (reply.content, reply.calls) == (" It is <tool_call> 7.\n", ())
