"""Bodies of requests: what JSON is taken, what a schema lets through, and how answers of reward servers are read."""

import pytest

from tandem.protocol.bodies import Refusal, SchemaError, array, check_value, integer, text
from tandem.protocol.dialects import openai_chat
from tandem.protocol.reward_layouts import LAYOUTS, NotJudged
from tandem.protocol.server import parse

ANY = {"type": "object"}


def nested(depth):
    """A body with as many objects and lists around a number."""
    return b'{"a": ' + b"[" * (depth - 1) + b"1" + b"]" * (depth - 1) + b"}"


def test_a_body_is_json_of_whole_characters_up_to_a_depth():
    assert parse(nested(4), ANY, 4)["a"] == [[[1]]]
    refused = {
        nested(5): "at most 4 deep",
        nested(50_000): "at most 4 deep",
        b'{"a": NaN}': "NaN is no number",
        b'{"a": "\\ud800"}': "half a character",
        b'{"a": {"\\ud800": 1}}': "half a character",
        b'{"a": "\xff"}': "not JSON",
        b'{"a": 1': "not JSON",
        b"[]": "must be an object",
    }
    for body, words in refused.items():
        with pytest.raises(Refusal, match=words) as refusal:
            parse(body, ANY, 4)
        assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("schema", "fine", "wrong"),
    [
        (integer(1, 3), [1, 3, 2.0], [0, 4, 1.5, True, "1"]),
        ({"type": "number", "exclusiveMinimum": 0}, [1e-9], [0, float("nan"), False]),
        (text(2, 1), ["a", "ab"], ["", "abc", None, 1]),
        (array(integer(0, 9), 1, 3), [[0], [1, 9, 5], [2.0]], [[], [0] * 4, [5, 10, 5], [5, -1, 5], [1, True], [1, "a"]]),
        ({"enum": [1, "a", None]}, [1, "a", None], [True, 2, "b"]),
        ({"anyOf": [integer(0, 9), {"type": "null"}]}, [5, None], [10, "a"]),
        ({"type": "object", "additionalProperties": {"type": "boolean"}}, [{}, {"a": True}], [{"a": 1}, []]),
    ],
)
def test_a_schema_lets_through_what_it_says(schema, fine, wrong):
    for value in fine:
        assert check_value(value, schema) == value
    for value in wrong:
        with pytest.raises(SchemaError, match="must"):
            check_value(value, schema)


@pytest.mark.parametrize(
    ("layout", "answer", "chosen", "expected"),
    [
        ("tandem", {"results": [{"question": 1, "score": 2}, {"question": 0, "score": 1}]}, None, [1.0, 2.0]),
        (
            "tandem",
            {"results": [{"question": 1, "reason": "too_long", "message": "9"}, {"question": 0, "score": 1}]},
            None,
            [1.0, NotJudged("too_long", "9")],
        ),
        ("tandem", {"results": [{"question": 0, "score": 1}] * 2}, None, "two results"),
        ("tandem", {"results": [{"question": 0, "score": 1}]}, None, "1 of 2 questions have no result, the first is 1"),
        ("tandem", {"results": [{"question": 2, "score": 1}]}, None, "must be one of"),
        ("tandem", {"results": [{"question": True, "score": 1}]}, None, "must be one of"),
        ("tandem", {"results": [{"question": 0, "reason": "too long"}]}, None, "neither a score nor a reason"),
        ("tandem", {"results": [{"question": 0, "score": True}]}, None, "must be a number"),
        ("openrlhf", {"rewards": [1, [2]]}, None, [1.0, 2.0]),
        ("openrlhf", {"rewards": [1]}, None, "a list of 2 numbers, got 1"),
        ("openrlhf", {"rewards": [1, [2, 3]]}, None, "must be a number"),
        ("vllm", {"data": [{"index": 1, "probs": [0.2, 0.8]}, {"index": 0, "probs": [0.7, 0.3]}]}, 1, [0.3, 0.8]),
        ("vllm", {"data": [{"probs": [0.2]}, {"probs": [0.7]}]}, None, [0.2, 0.7]),
        ("vllm", {"data": [{"probs": [0.2, 0.8]}] * 2}, None, "class_label"),
        ("vllm", {"data": [{"probs": [0.2, 0.8]}] * 2}, 2, "class_label=2, and the server's model has 2 classes"),
        ("vllm", {"data": [{"index": 0, "probs": [0.2]}] * 2}, None, "each once"),
    ],
)
def test_verdicts_of_a_reward_server_belong_to_their_questions(layout, answer, chosen, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            LAYOUTS[layout].read(answer, 2, chosen)
    else:
        assert LAYOUTS[layout].read(answer, 2, chosen) == expected


def test_a_chat_is_read_by_its_latest_names():
    ids = {"role": "tool", "tool_call_id": "1", "content": "r"}
    calls = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": name}}]} for name in "fg"]
    turn = openai_chat.read(
        {"messages": [calls[0], ids, calls[1], ids], "max_tokens": 9, "max_completion_tokens": 5, "n": None}
    )
    assert [message.get("name") for message in turn.messages] == [None, "f", None, "g"]
    assert turn.max_tokens == 5 and turn.overridden == turn.ignored == ()
