"""Text in pieces is the text as a whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engines.inference.serve.text import TextStream
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def pieces(ids, cuts):
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    return [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.text(max_size=30), st.lists(st.integers(0, 60), max_size=8))
def test_pieces_join_to_the_text(words, cuts):
    ids = TOKENIZER(words, add_special_tokens=False)["input_ids"]
    stream = TextStream(TOKENIZER)
    *first, last = pieces(ids, cuts)

    assert "".join([*(stream.add(piece) for piece in first), stream.finish(last, stopped=False)]) == words


def test_half_a_character_waits_for_the_rest():
    ids = TOKENIZER("a😀b", add_special_tokens=False)["input_ids"]
    stream = TextStream(TOKENIZER)

    said = [stream.add([token]) for token in ids]
    assert "".join(said) == "a😀b" and "" in said and not any("�" in piece for piece in said)


def test_bytes_that_are_no_text_do_not_wait_for_ever():
    broken = TOKENIZER("😀", add_special_tokens=False)["input_ids"][:1]
    stream = TextStream(TOKENIZER)

    assert any("�" in stream.add(broken) for _ in range(20))


@pytest.mark.parametrize("stop", [["lo w"], ["xx", "o wo"], ["hello world!"]])
def test_the_beginning_of_a_stop_string_is_held_back(stop):
    ids = TOKENIZER("hello world!", add_special_tokens=False)["input_ids"]
    stream = TextStream(TOKENIZER, stop)
    before = "hello world!"[: min(i for s in stop if (i := "hello world!".find(s)) >= 0)]

    said = ""
    for count in range(1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:count])
        if any(s in text for s in stop):  # where the engine ends
            said += stream.finish(ids[count - 1 : count], stopped=True)
            break
        said += stream.add(ids[count - 1 : count])
        assert before.startswith(said)
    assert said == before


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_a_stop_string_that_did_not_end_the_answer_is_text(size):
    """`min_tokens` forbade it; however the pieces fall, only the one at the end is cut."""
    ids = TOKENIZER("a stop b stop", add_special_tokens=False)["input_ids"]
    stream = TextStream(TOKENIZER, ["stop"])

    said = "".join(stream.add(ids[i : i + size]) for i in range(0, len(ids) - size, size))
    rest = ids[len(range(0, max(0, len(ids) - size), size)) * size :]
    assert said + stream.finish(rest, stopped=True) == "a stop b "


def test_what_only_looked_like_a_stop_string_is_said_at_the_end():
    ids = TOKENIZER("hello", add_special_tokens=False)["input_ids"]
    stream = TextStream(TOKENIZER, ["lox"])

    assert stream.add(ids) == "hel" and stream.finish([], stopped=False) == "lo"
