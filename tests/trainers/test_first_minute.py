"""The first minute of a command: what it says before anything is loaded, and what it refuses then."""

import logging
import subprocess
import sys

import pytest
from PIL import Image

from tandem.config.errors import ConfigError
from tandem.evaluation.reward_check import RewardCall
from tandem.rewards.build import build_sum
from tandem.rewards.reward import Reward, read_sum
from tandem.trainers.start import judge_calls, try_rewards

ROW = {"messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2", "question": "1 + 1?"}
FUNCTIONS = """
def raises(completion, answer):
    return float(answer) + None
def picky(completion, answer):
    return 1 / len(completion)
def flat(completion, answer):
    return 0.5
def right(completion, answer):
    return answer in completion
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path / "mine.py"


def tried(spec, row=ROW):
    reward = build_sum(spec, read_sum(spec), timeout_s=10.0, workers=1)
    try:
        try_rewards(Reward(spec, {spec: reward}), [row])
    finally:
        reward.close()


def test_a_reward_that_always_fails_is_refused_with_its_line(file):
    with pytest.raises(ConfigError, match=r"for every answer.*TypeError.*\(mine\.py:3 in raises: return float"):
        tried(f"{file}:raises")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("picky", "with an empty answer, and such samples are dropped"),
        ("flat", "gives 0.5 to an empty, a wrong"),
        ("right", ""),
    ],
)
def test_a_reward_that_says_nothing_or_fails_on_some_is_told(file, name, words, caplog):
    with caplog.at_level(logging.WARNING):
        tried(f"{file}:{name}")
    assert words in caplog.text and bool(words) == bool(caplog.text)


def test_a_reward_that_asks_for_tokens_is_not_tried(file, caplog):
    file.write_text("def last(completion_ids):\n    return completion_ids[-1] / 0\n")
    tried(f"{file}:last")
    assert not caplog.text


@pytest.mark.parametrize(
    ("signature", "returned"),
    [("completions, **kwargs", "[]"), ("prompts, completions, **kwargs", "[1, 2]"), ("solution_str, ground_truth", "None")],
)
def test_a_reward_for_trl_or_verl_that_always_fails_is_refused_too(file, signature, returned):
    file.write_text(f"def wrong({signature}):\n    return {returned}\n")
    with pytest.raises(ConfigError, match=r"for every answer.*reward_wrong_type"):
        tried(f"{file}:wrong")


def test_without_an_expected_answer_a_constant_is_no_sign(file, caplog):
    tried(f"{file}:flat", {**ROW, "answer": ""})
    assert "alike" not in caplog.text


def test_a_reward_that_is_too_slow_every_time_is_told_and_not_refused(caplog):
    judge_calls("slow", [RewardCall(0, what, 15.0, failed="reward_timeout", words="too slow") for what in ("a", "b")])
    assert "with a, b, and such samples are dropped: too slow" in caplog.text


@pytest.mark.parametrize("command", ["plan", "serve", "chat", "generate", "serve-reward", "verify-weights", "train"])
def test_the_help_of_a_command_imports_no_torch(command):
    code = f"import sys; from tandem.cli.main import main; main([{command!r}, '--help'])"
    check = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); exec({code!r})"
    shown = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "False"


def test_a_reward_is_tried_on_a_row_that_shows_a_picture(file):
    (file.parent / "asks.py").write_text(
        "def words(prompt, completion):\n    assert prompt == 'Colour?'\n    return len(completion)"
    )
    shown = [{"type": "image", "image": Image.new("RGB", (8, 8))}, {"type": "text", "text": "Colour?"}]
    tried(f"{file.parent / 'asks.py'}:words", {**ROW, "messages": [{"role": "user", "content": shown}]})
