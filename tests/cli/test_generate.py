"""`tandem generate` on a tiny random model."""

import io
import json
import sys

import pytest

from tandem.cli.main import main
from tests.tiny import tiny_model_folder
from tests.tiny_media import tiny_qwen_vl


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model")))


def generate(capsys, *argv, code=0):
    assert main(["generate", *argv, "--threads", "1", "--device", "cpu", "--dtype", "float32"]) == code
    return capsys.readouterr()


def test_answers_come_with_tokens_and_logprobs(model, capsys):
    shown = json.loads(generate(capsys, model, "1 + 2", "--n", "3", "--max-new-tokens", "5", "--json").out)

    assert len(shown["answers"]) == 3 and shown["prompt"] == "1 + 2" and shown["prompt_tokens"] > 0
    for answer in shown["answers"]:
        assert answer["tokens"] == len(answer["output_ids"]) == len(answer["logprobs"]) <= 5
        assert all(value <= 0 for value in answer["logprobs"])
        assert answer["stop_reason"] in ("stop", "length")


def test_a_seed_repeats_and_another_differs(model, capsys):
    def ids(seed):
        out = generate(capsys, model, "1 + 2", "--max-new-tokens", "8", "--seed", seed, "--json").out
        return json.loads(out)["answers"][0]["output_ids"]

    assert ids("1") == ids("1") != ids("2")


def test_the_chat_template_adds_tokens_and_raw_does_not(model, capsys):
    sizes = [
        json.loads(generate(capsys, model, "1 + 2", "--max-new-tokens", "1", "--json", *more).out)["prompt_tokens"]
        for more in (["--raw"], [], ["--system", "be brief"])
    ]

    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.parametrize("raw", [[], ["--raw"]])
def test_a_prompt_that_spells_the_place_of_an_image_is_refused(tmp_path, capsys, raw):
    said = generate(capsys, str(tiny_qwen_vl(tmp_path)), "What is <|image_pad|>?", *raw, code=2)
    assert "the prompt contains <|image_pad|>" in said.err and "tandem serve" in said.err


def test_text_goes_to_stdout_and_speed_to_stderr(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 + 2\n"))
    said = generate(capsys, model, "-", "--n", "2", "--max-new-tokens", "4", "--greedy")

    first, second = said.out.split("--- 2\n")
    assert first == "--- 1\n" + second  # greedy: both the same
    assert "tok/s" in said.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--n", "0"], "--n must be at least 1"),
        (["--top-p", "1.5"], "--top-p"),
        (["--raw", "--system", "x"], "--system needs the chat template"),
    ],
)
def test_values_that_cannot_be_are_refused(model, capsys, argv, message):
    assert message in generate(capsys, model, "x", *argv, code=2).err


def test_a_model_without_chat_template_says_so(tmp_path, capsys):
    folder = tiny_model_folder(tmp_path, chat_template=None)

    assert "chat template" in generate(capsys, str(folder), "x", code=2).err


def test_a_model_that_is_not_there_says_so(tmp_path, capsys):
    assert generate(capsys, str(tmp_path / "nothing"), "x", code=2).err.startswith("error: ")


def test_a_prompt_that_is_no_text_is_refused(model, capsys):
    said = generate(capsys, model, "a\udcff", code=2)
    assert said.err == "error: the prompt is not UTF-8 text: '\\udcff' at index 1\n"
