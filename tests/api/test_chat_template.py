"""A template gets messages in the shape that it takes, and what it does with them is known before a run."""

import json

import pytest

from tandem.api.chat_template import render, template_of, with_arguments
from tandem.api.failures import DataFailure
from tandem.config.errors import ConfigError
from tandem.data.encoding import ChatEncoder
from tandem.models.tokenizer import check_chat_template, check_template_options, stop_ids
from tests.tiny import CHATML, tiny_config, tiny_model_folder, tiny_tokenizer

TRIMS = CHATML.replace("message['content']", "message['content'] | trim")
LOOPS = CHATML.replace(
    "+ message['content'] + '<|im_end|>\n' }}",
    "}}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}",
)
GEMMA = CHATML.replace("<|im_start|>", "<|endoftext|>").replace("<|im_end|>", "<|im_start|>")
BARE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
NO_SYSTEM = "{% for message in messages if message['role'] != 'system' %}" + CHATML.partition("%}")[2]
THINKS = CHATML + "{% if enable_thinking is defined and not enable_thinking %}{{ 'no thinking' }}{% endif %}"
OBJECTS = CHATML.replace("+ message['content']", "+ (message.tool_calls[0].function.arguments | tojson)")
TEXTS = CHATML.replace("+ message['content']", "+ message.tool_calls[0].function.arguments")


@pytest.mark.parametrize("template", [CHATML, TRIMS, LOOPS])
@pytest.mark.parametrize("content", ["Hi you", [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]])
def test_text_and_parts_are_the_same_prompt_for_every_template(template, content):
    text = render(tiny_tokenizer(template), [{"role": "user", "content": content}])
    assert text == "<|im_start|>user\nHi you<|im_end|>\n"


def test_a_part_that_is_no_text_is_refused_with_its_kind_and_message():
    chat = [{"role": "system", "content": "Look."}, {"role": "user", "content": [{"type": "image_url"}]}]
    with pytest.raises(DataFailure, match=r"message 2 \(user\) has a part of type 'image_url'"):
        render(tiny_tokenizer(LOOPS), chat)


@pytest.mark.parametrize("template", [OBJECTS, TEXTS])
@pytest.mark.parametrize("arguments", [{"city": "Rome"}, json.dumps({"city": "Rome"})])
def test_arguments_of_calls_reach_the_template_as_it_takes_them(template, arguments):
    template = "{% if messages[-1].tool_calls %}" + template.replace("in messages", "in messages[1:]") + "{% endif %}"
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '\n{"city": "Rome"}<|im_end|>' in render(tiny_tokenizer(template), chat)


@pytest.mark.parametrize(("template", "end"), [(CHATML, 2), (GEMMA, 1), (LOOPS, 2), (BARE, None)])
def test_the_special_token_behind_a_reply_is_the_end_of_a_turn(template, end):
    assert template_of(tiny_tokenizer(template)).end == end


@pytest.mark.parametrize(
    ("template", "own", "ids"), [(CHATML, 0, [0, 2]), (CHATML, 2, [2]), (BARE, 0, [0, 2]), (None, 0, [0])]
)
def test_the_end_of_a_turn_stops_completions_besides_the_models_own(tmp_path, template, own, ids):
    folder = tiny_model_folder(tmp_path, chat_template=template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": own}))
    assert stop_ids(folder, tiny_config()) == ids


def test_a_reply_without_end_is_learnt_with_the_end_of_a_text():
    tokenizer = tiny_tokenizer(BARE + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    (found,) = ChatEncoder(tokenizer, max_length=99, adds_end=True).conversation(chat)
    learnt = [token for token, mask in zip(found.ids, found.mask, strict=True) if mask]
    assert tokenizer.decode(learnt) == "yo<|im_end|>"
    assert tokenizer.decode(found.ids).endswith("yo<|im_end|>\n")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="could not learn to stop"):
        ChatEncoder(tokenizer, max_length=99, adds_end=True)


def checked(template, system_prompt=None, system=None, **options):
    row = {"messages": [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": "?"}]}
    check_template_options(tiny_tokenizer(template), [row], system_prompt, options)


@pytest.mark.parametrize(
    ("template", "options", "words"),
    [
        (THINKS, {"enable_thinknig": False}, r"enable_thinknig=False has no effect.* did you mean 'enable_thinking'"),
        (CHATML, {"enable_thinking": False}, "does not read it; this template has no options"),
        (NO_SYSTEM, {"system_prompt": "Sing."}, "system_prompt='Sing.' has no effect.* leaves system messages out"),
        (CHATML, {"system_prompt": "Sing.", "system": "Hm."}, "has its own system message"),
    ],
)
def test_an_option_without_effect_is_refused(template, options, words):
    with pytest.raises(ConfigError, match=words):
        checked(template, **options)


def test_an_option_that_the_template_reads_passes_even_with_its_default():
    checked(THINKS, enable_thinking=True, system_prompt="Sing.")


def test_a_key_of_a_side_that_the_template_does_not_read_is_refused():
    sides = {"chosen": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w"}}]}]}
    with pytest.raises(ConfigError, match="does not read the key 'tool_calls' of a message"):
        check_template_options(tiny_tokenizer(), [{"messages": [{"role": "user", "content": "?"}], **sides}], None, {})


def test_arguments_of_a_call_without_a_function_are_spelled_too():
    calls = [{"name": "w", "arguments": '{"city": "P"}'}]
    spelled = with_arguments({"role": "assistant", "content": "", "tool_calls": calls}, as_text=False)
    assert spelled["tool_calls"] == [{"name": "w", "arguments": {"city": "P"}}]


def test_a_template_that_cannot_be_parsed_is_named_at_the_start():
    with pytest.raises(ConfigError, match="chat template of this model cannot be read: Expected"):
        check_chat_template(tiny_tokenizer("{% for m in %}"))
