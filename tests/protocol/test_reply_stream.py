"""A reply that is read while it is written says what it says when it is read at once, however it is cut into pieces."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.api.requests import StopReason
from tandem.protocol.tool_calls import CallReader, ReplyStream
from tests.protocol.templates import TEMPLATES
from tests.tiny import tiny_tokenizer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "?", "parameters": PARAMETERS}}
CALL = {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
READERS = {family: CallReader(tiny_tokenizer(template)) for family, template in TEMPLATES.items()}
QUESTION = [{"role": "user", "content": "?"}]


def written(reader):
    """A call as the template writes it."""
    called = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    before = reader.render(QUESTION)
    return reader.render(called)[len(before) :].partition("<|im_end|>")[0]


def pieces_of(draw, text):
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("family", READERS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_pieces_of_a_reply_are_the_whole_reply(family, data):
    reader = READERS[family]
    opening, closing = reader.family.thinking
    words = st.sampled_from(["Well. ", "a < b, {c} ", "", "\n\n", '{"a": 1}', "<|im_end|>", "[x] <", opening[:4]])
    call = st.sampled_from(["", written(reader), written(reader)[:-3], written(reader) * 2])
    tools = data.draw(st.sampled_from([(), (WEATHER,)]))
    prompt = data.draw(st.sampled_from(["", opening]))
    opened = ["", f"{opening}\nHm.\n{closing}\n", f"Hm. {closing} It is 7.", f"{opening} H<|im_end|>m."]
    thinking = data.draw(st.sampled_from(opened if not prompt else [f" Hm. {closing}", "Hm<|im_end|>", "Hm."]))
    text = thinking + data.draw(words) + data.draw(call) + data.draw(words)
    reason = data.draw(st.sampled_from([StopReason.STOP, StopReason.LENGTH]))

    whole = ReplyStream(reader, tools, prompt).finish(text, reason)
    stream = ReplyStream(reader, tools, prompt)
    *before, last = pieces_of(data.draw, text)
    parts = [*(stream.add(piece) for piece in before), stream.finish(last, reason)]

    assert "".join(part.content for part in parts) == whole.content
    assert "".join(part.reasoning for part in parts) == whole.reasoning
    assert parts[-1].calls == whole.calls and not any(part.calls for part in parts[:-1])


def test_words_come_at_once_and_the_beginning_of_a_mark_waits():
    stream = ReplyStream(READERS["hermes"], (WEATHER,), "")
    pieces = {"It is": "It is", " <to": "", "ast>": " <toast>", " <tool": "", "_call>": "", "{": ""}
    assert [stream.add(piece).content for piece in pieces] == [*pieces.values()]
