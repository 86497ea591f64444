"""Prompts of megabytes: what cannot fit is refused unread, and nobody else waits for what can."""

import json
import random
import threading
import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tandem.engines.inference.serve.text import fewest_tokens
from tests.serve.served import Served
from tests.tiny import tiny_model_folder, tiny_tokenizer

MIB = 2**20


def byte_fallback_tokenizer():
    """As Llama 2's: characters, and a byte at a time where a character is unknown."""
    letters = {f"<0x{byte:02X}>": byte for byte in range(256)}
    letters |= {piece: 256 + i for i, piece in enumerate(["▁", "a", "b", "▁a", "▁ab", "ab"])}
    tokenizer = Tokenizer(models.BPE(letters, [("▁", "a"), ("a", "b"), ("▁", "ab")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def tokenizer_with(normalizer=None, added=None):
    tokenizer = tiny_tokenizer()
    if normalizer is not None:
        tokenizer.backend_tokenizer.normalizer = normalizer
    if added is not None:
        tokenizer.add_tokens([added])
    return tokenizer


def tokenizer_without(text):
    """One whose vocabulary lacks the bytes of a text, which it drops."""
    tokenizer = tiny_tokenizer()
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    lacking = {letter for byte, letter in bytes_to_unicode().items() if byte in text.encode()}
    model = description["model"]
    model["vocab"] = {piece: number for piece, number in model["vocab"].items() if not lacking & set(piece)}
    model["merges"] = [pair for pair in model["merges"] if not lacking & set("".join(pair))]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(description)))


COUNTABLE = {
    "bytes": tiny_tokenizer(),
    "composed": tokenizer_with(normalizers.NFC()),
    "swallows": tokenizer_with(added=AddedToken("<|user|>", lstrip=True, rstrip=True)),
    "without some bytes": tokenizer_without("é漢字\n"),
    "long token": tokenizer_with(added=AddedToken("=" * 40)),
    "byte fallback": byte_fallback_tokenizer(),
}


def texts(count=300):
    chooser = random.Random(0)
    pieces = [
        "a",
        "ab",
        "the ",
        "total",
        "7",
        " ",
        "\n" * 30,
        " " * 50,
        "e\u0301",
        "\u1fef",
        "漢字",
        "👩‍👩‍👧",
        "=" * 40,
        "<|user|>",
        "<|im_end|>",
    ]
    return ["".join(chooser.choices(pieces, k=chooser.randrange(40))) for _ in range(count)]


@pytest.mark.parametrize("name", COUNTABLE)
def test_no_text_has_fewer_tokens_than_is_said_of_it(name):
    tokenizer = COUNTABLE[name]
    least = fewest_tokens(tokenizer)
    for text in texts():
        assert least(text) <= len(tokenizer(text)["input_ids"]), text
    assert least("ab" * MIB) > 10_000  # and something is said


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "normalizer", normalizers.NFKC()),
        lambda t: setattr(t, "normalizer", normalizers.Replace("the ", "")),
        lambda t: setattr(t, "normalizer", normalizers.Replace("▁", " ")),  # three bytes become one
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda t: setattr(t, "model", models.WordLevel({"x": 0, "[UNK]": 1}, unk_token="[UNK]")),
    ],
)
def test_nothing_is_said_where_characters_may_vanish(change):
    tokenizer = tiny_tokenizer()
    change(tokenizer.backend_tokenizer)
    assert fewest_tokens(tokenizer)("ab" * MIB) == 0


def chat(content):
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 2}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_cannot_fit_is_refused_without_being_tokenised(served, path):
    huge = "a " * (4 * MIB - 1000)
    body = chat(huge) if "chat" in path else {"model": "tiny", "prompt": huge}
    error = served.json("POST", path, body, status=400)["error"]
    assert error["code"] == "prompt_too_long" and "at least" in error["message"]


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory):
    """A model with a tokenizer of whose texts nothing is known beforehand."""
    folder = tiny_model_folder(tmp_path_factory.mktemp("slow"))
    tokenizer_with(normalizers.NFKC()).save_pretrained(folder)
    return folder


def post_in_thread(served, body, answers):
    def post():
        answers.append((*served.request("POST", "/v1/chat/completions", body, timeout=120), time.monotonic()))

    thread = threading.Thread(target=post)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.invariant
def test_a_short_prompt_does_not_wait_for_long_ones(slow_folder):
    with Served(slow_folder) as served:
        served.json("POST", "/v1/chat/completions", chat("hi"))  # what is loaded on demand is there
        answers = []
        threads = [post_in_thread(served, chat("a b " * MIB), answers) for _ in range(3)]
        while served.service.tokenizers.num_long < 3:
            time.sleep(0.01)
        served.json("POST", "/v1/chat/completions", chat("hi"), timeout=120)
        done = time.monotonic()
        for thread in threads:
            thread.join(120)

    assert [status for status, _, _ in answers] == [400] * 3
    assert all(b"prompt_too_long" in raw for _, raw, _ in answers)
    assert sum(at > done for _, _, at in answers) >= 2


@pytest.mark.slow
@pytest.mark.invariant
def test_one_long_prompt_too_many_is_told_to_come_again(slow_folder):
    with Served(slow_folder, max_long_prompts=1) as served:
        answers = []
        thread = post_in_thread(served, chat("a b " * MIB), answers)
        while not served.service.tokenizers.num_long:
            time.sleep(0.01)
        error = served.json("POST", "/v1/chat/completions", chat("a b " * 10_000), status=503)["error"]
        served.json("POST", "/v1/chat/completions", chat("hi"))
        thread.join(120)
    assert error["code"] == "full" and answers[0][0] == 400
