"""Only the assistant's tokens are learnt, token by token those of generation, with and without generation marks."""

import pytest

from tandem.api.failures import DataFailure
from tandem.api.requests import LLMResponse, StopReason
from tandem.data.encoding import ChatEncoder
from tandem.rollout.workflows import Chat
from tests.tiny import CHATML, tiny_tokenizer

MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thinking is shown in the last message alone: earlier turns are rewritten.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
UPSIDE_DOWN = "{% for message in messages|reverse %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


def says(*texts, system=None):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system else messages


def encoder(template=CHATML, max_length=500, **options):
    return ChatEncoder(tiny_tokenizer(template), max_length=max_length, **options)


def shown(chat, encoded):
    """Text with what is learnt in brackets."""
    pieces, last = [], False
    for token, learnt in zip(encoded.ids, encoded.mask, strict=True):
        pieces.append(("⟦" if learnt and not last else "⟧" if last and not learnt else "") + chat.tokenizer.decode([token]))
        last = learnt
    return "".join(pieces) + ("⟧" if last else "")


CONVERSATION = says("2 + 2?", "The sum is 4.", "And 3 + 3?", "6", "Thanks", "Of course!", system="Answer.")


def test_every_reply_up_to_its_end_of_turn_is_learnt_and_nothing_else():
    chat = encoder()
    (found,) = chat.conversation(says("2 + 2?", "4", "3 + 3?", "6"))
    assert shown(chat, found) == (
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n"
        "<|im_start|>user\n3 + 3?<|im_end|>\n<|im_start|>assistant\n⟦6<|im_end|>⟧\n"
    )


@pytest.mark.parametrize(
    "messages", [CONVERSATION, says("a", "b"), says("The sum", "of the two\n\n numbers ", "is", " seven")]
)
def test_marks_and_their_absence_give_the_same_tokens_and_mask(messages):
    assert encoder(MARKED).conversation(messages) == encoder(CHATML).conversation(messages)


def test_tokens_are_those_of_the_whole_rendered_conversation():
    chat = encoder()
    (found,) = chat.conversation(CONVERSATION)
    whole = chat.tokenizer.apply_chat_template(CONVERSATION, tokenize=True, return_dict=True)["input_ids"]
    assert found.ids == list(whole)


@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_tokens_and_mask_are_those_of_a_chat_that_was_generated(template):
    """Supervised learning trains on what a rollout would have kept of the same words."""
    tokenizer = tiny_tokenizer(template)
    messages = says("2 + 2?", "<think>easy</think>4", "And 3 + 3?", "<think>hm</think>6")
    chat = Chat(tokenizer, messages[:1])
    for i in (1, 3):
        reply = tuple(tokenizer(messages[i]["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"])
        chat.add(response(chat.input_ids, reply))
        if i == 1:
            chat.say(messages[2]["content"])
    trajectories = chat.sample(0.0).trajectories
    found = ChatEncoder(tokenizer, max_length=500).conversation(messages)
    assert len(found) == len(trajectories) == (1 if template == CHATML else 2)
    for encoded, trajectory in zip(found, trajectories, strict=True):
        size = len(trajectory.input_ids)
        assert encoded.ids[:size] == trajectory.input_ids.tolist()
        assert encoded.mask[:size] == trajectory.loss_mask.tolist()
        assert not any(encoded.mask[size:])


def response(input_ids, reply):
    count = len(reply)
    return LLMResponse(
        input_ids=input_ids,
        output_ids=reply,
        logprobs=(0.0,) * count,
        versions=(0,) * count,
        stop_reason=StopReason.STOP,
        temperature=1.0,
    )


def test_a_template_that_rewrites_history_gives_each_reply_its_own_context():
    chat = encoder(FORGETFUL)
    first, second = chat.conversation(says("2 + 2?", "<think>easy</think>4", "3 + 3?", "<think>hm</think>6"))
    assert shown(chat, first).endswith("assistant\n⟦<think>easy</think>4<|im_end|>⟧\n")
    assert shown(chat, second) == (
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3 + 3?<|im_end|>\n<|im_start|>assistant\n⟦<think>hm</think>6<|im_end|>⟧\n"
    )


def test_marks_of_a_template_that_rewrites_history_are_not_believed():
    marked = FORGETFUL.replace("{{ message['content'] }}", "{% generation %}{{ message['content'] }}{% endgeneration %}")
    messages = says("2 + 2?", "<think>easy</think>4", "3 + 3?", "<think>hm</think>6")
    assert encoder(marked).conversation(messages) == encoder(FORGETFUL).conversation(messages)


def test_without_special_tokens_the_whole_reply_is_learnt():
    chat = encoder(PLAIN)
    (found,) = chat.conversation(says("2 + 2?", "4"))
    assert shown(chat, found) == "user: 2 + 2?\n\nassistant: ⟦4\n\n⟧"


def test_a_reply_with_special_tokens_of_its_own_is_learnt_up_to_its_last_one():
    chat = encoder()
    (found,) = chat.conversation(says("2 + 2?", "<|im_start|>easy<|im_end|>4"))
    assert shown(chat, found).endswith("assistant\n⟦<|im_start|>easy<|im_end|>4<|im_end|>⟧\n")


def test_turns_before_the_completion_are_context():
    chat = encoder()
    found = chat.completion(says("2 + 2?", "4", "3 + 3?"), says("", "6")[1:])
    assert shown(chat, found).count("⟦") == 1
    assert "⟦6<|im_end|>⟧" in shown(chat, found)


def test_a_system_prompt_stands_before_conversations_that_have_none():
    chat = encoder(system_prompt="Be brief.")
    (without,), (own,) = chat.conversation(says("a", "b")), chat.conversation(says("a", "b", system="Sing."))
    assert shown(chat, without).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na")
    assert shown(chat, own).startswith("<|im_start|>system\nSing.<|im_end|>\n<|im_start|>user\na")
    assert shown(chat, without).endswith("⟦b<|im_end|>⟧\n")


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_replies_before_the_first_to_learn_are_context_beside_a_system_prompt_too(template):
    chat, messages = encoder(template, system_prompt="Be brief."), says("a", "b", "c", "d")
    (found,), (own,) = chat.conversation(messages, 2), chat.conversation(says("a", "b", "c", "d", system="Be brief."), 3)
    assert shown(chat, found).count("⟦") == 1 and shown(chat, found).endswith("⟦d<|im_end|>⟧\n")
    assert (own.ids, own.mask) == (found.ids, found.mask)


def test_a_sequence_may_be_as_long_as_max_length_and_no_longer():
    (found,) = encoder().conversation(says("2 + 2?", "4"))
    size = len(found.ids)
    assert len(encoder(max_length=size).conversation(says("2 + 2?", "4"))[0].ids) == size
    prompt = found.mask.index(True)
    for most, reason in ((size - 1, "too_long"), (prompt + 1, "too_long"), (prompt, "prompt_too_long")):
        with pytest.raises(DataFailure) as failure:
            encoder(max_length=most).conversation(says("2 + 2?", "4"))
        assert failure.value.reason == reason


def test_an_empty_system_prompt_is_one_as_in_generation():
    (found,) = encoder(system_prompt="").conversation(says("a", "b"))
    chat = Chat(tiny_tokenizer(), says("a"), system_prompt="")
    assert tuple(found.ids[: found.mask.index(True)]) == chat.prompt_ids
    assert chat.prompt.startswith("<|im_start|>system\n<|im_end|>\n")


def test_steps_end_at_their_own_last_token():
    chat = encoder()
    found, ends = chat.steps(says("2 + 2?"), ["Two and two", "are four."], "\n")
    assert [chat.tokenizer.decode(found.ids[: end + 1]).rsplit("\n", 1)[-1] for end in ends] == ["Two and two", "are four."]
    assert all(found.mask[end] for end in ends)


@pytest.mark.parametrize(
    ("messages", "template", "reason"),
    [
        (says("2 + 2?"), CHATML, "no_answer"),
        (says("2 + 2?", ""), CHATML, "empty_completion"),
        (says("2 + 2?", " \n"), MARKED, "empty_completion"),
        (says("2 + 2?", "4" * 600), CHATML, "too_long"),
        (says("2" * 600, "4"), CHATML, "prompt_too_long"),
        (says("2 + 2?", "4"), UPSIDE_DOWN, "template_rewrites"),
        (says("2 + 2?", "4", system="Sing."), STRICT, "template_refuses"),
        ([{"role": "user", "content": [{"type": "image"}]}, says("", "4")[1]], CHATML, "template_refuses"),
    ],
)
def test_what_cannot_be_learnt_says_why(messages, template, reason):
    with pytest.raises(DataFailure) as failure:
        encoder(template).conversation(messages)
    assert failure.value.reason == reason
