"""`tandem trajectories`: what it shows, and in which order; hostile text steers no terminal."""

import json
from dataclasses import replace

import pytest
import torch

from tandem.api.workflow import Dropped
from tandem.cli.main import main
from tandem.cli.trajectories import shown_text
from tests.tracking.test_recorder import MESSAGES, group, record, sample


@pytest.fixture
def run(tmp_path):
    rewards = (0.25, 1.0, 0.5)
    record(tmp_path, 3, [group(0, *(sample(reward, messages=MESSAGES, words={"style": "nice"}) for reward in rewards))])
    dropped = [Dropped("deadline", "deadline: too late", group(5, sample(0.1)))]
    record(tmp_path, 12, [group(1, *map(sample, rewards)), group(2, sample(0.75))], dropped=dropped)
    return tmp_path


def said(capsys, *words):
    assert main(["trajectories", *map(str, words)]) == 0
    return capsys.readouterr().out


def rows(capsys, *words):
    return [json.loads(line) for line in said(capsys, *words, "--json").splitlines()]


def test_the_newest_step_is_shown_in_the_order_of_the_batch(run, capsys):
    assert {row["step"] for row in rows(capsys, run)} == {12}
    text = said(capsys, run)
    assert text.count("== step 12") == 4 and "2 steps are recorded, 3 to 12." in text
    assert "Recorded prompts that were dropped: 1 deadline (--dropped shows them)." in text


def test_samples_are_sorted_filtered_and_limited(run, capsys):
    assert [row["reward"] for row in rows(capsys, run, "--sort", "reward")] == [1.0, 0.75, 0.5, 0.25]
    assert [row["reward"] for row in rows(capsys, run, "--sort", "right", "--reverse", "--limit", 2)] == [0.25, 0.5]
    assert sorted(row["reward"] for row in rows(capsys, run, "--min-reward", 0.5, "--max-reward", 0.8)) == [0.5, 0.75]
    assert [row["group"] for row in rows(capsys, run, "--sample", 3)] == [2]
    assert len(rows(capsys, run, "--step", "all")) == 7 and {row["step"] for row in rows(capsys, run, "--step", 3)} == {3}
    (dropped,) = rows(capsys, run, "--dropped")
    assert (dropped["dropped"], dropped["why"], dropped["sample_id"]) == ("deadline", "deadline: too late", None)


def test_the_text_has_all_turns_calls_judges_and_parts_of_the_reward(run, capsys):
    text = said(capsys, run, "--step", 3, "--sort", "reward", "--limit", 1)
    assert "reward 1 (right 1)" in text and "-- style: nice" in text and "-- expected answer: 7" in text
    assert text.count("-- assistant") == 2 and '"name": "add", "arguments": {"a": 3, "b": 4}' in text and "-- tool" in text


def test_each_conversation_of_an_agent_and_how_each_trajectory_ended_is_shown(tmp_path, capsys):
    title = ({"role": "user", "content": "A title?"}, {"role": "assistant", "content": "Sums"})
    record(tmp_path, 1, [group(0, sample(1.0, messages=MESSAGES, conversations=(title, MESSAGES)))])
    text = said(capsys, tmp_path)
    assert "2 trajectories ended by length (2)" in text and "-- conversation 1 of 2\n-- user\nA title?\n" in text
    assert text.index("Sums") < text.index("-- conversation 2 of 2\n-- user\n3 + 4")
    assert [one[0]["content"] for one in rows(capsys, tmp_path)[0]["conversations"]] == ["A title?", "3 + 4 = ü"]


def test_an_image_stands_between_the_words_by_its_number(tmp_path, capsys):
    image = {"type": "image", "medium": {"kind": "image", "number": "-7", "size": [20, 16]}}
    shown = {"role": "user", "content": [{"type": "text", "text": "Is "}, image, {"type": "text", "text": " red?"}]}
    record(tmp_path, 1, [group(0, sample(1.0, messages=(shown, {"role": "assistant", "content": "No"})))])
    assert "-- user\nIs [image -7] red?\n-- assistant" in said(capsys, tmp_path)


def test_what_a_part_was_before_its_options_and_what_steps_earned_is_shown(tmp_path, capsys):
    one = sample(0.5)
    earned = tuple(
        replace(t, token_rewards=torch.where(t.loss_mask, 0.125, torch.zeros(len(t.input_ids)))) for t in one.trajectories
    )
    record(tmp_path, 1, [group(0, replace(one, raw_rewards={"right": 3.5}, trajectories=earned))])
    assert rows(capsys, tmp_path)[0]["raw_rewards"] == {"right": 3.5}
    text = said(capsys, tmp_path, "--tokens")
    assert "-- before weights and options: right 3.5" in text and "    rewards" in text and "     0.125" in text


def test_tokens_have_their_figures_also_for_scripts(run, capsys):
    (row,) = rows(capsys, run, "--sample", 1, "--tokens")
    for one in row["trajectories"]:
        assert len(one["tokens"]) == len(one["input_ids"]) == len(one["advantages"]) == len(one["rollout_logprobs"])
        assert one["loss_mask"][0] is False and one["accuracy"] is None  # not known
    text = said(capsys, run, "--sample", 1, "--tokens")
    assert "-- tokens of trajectory 2" in text and "advantages" in text and "rollout" in text


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--step", "4"], "no record of step 4; it has 2 steps from 3 to 12"),
        (["--step", "four"], "--step is a number, `last` or `all`"),
        (["--sort", "size"], "--sort size: there is no such value; choose one of reward"),
    ],
)
def test_a_wrong_word_says_what_there_is(run, capsys, words, remedy):
    assert main(["trajectories", str(run), *words]) == 2
    assert remedy in capsys.readouterr().err


def test_what_a_model_wrote_steers_no_terminal(tmp_path, capsys):
    hostile = "a\x1b[2J\x9b31m\u202eb\x00\r\nc\t\ud800é中😀"
    assert shown_text(hostile) == "a\\u001b[2J\\u009b31m\\u202eb\\u0000\\u000d\nc\té中😀".replace("é", "\\ud800é")
    record(
        tmp_path, 1, [group(0, sample(1.0, messages=({"role": "user\x1b", "content": hostile},), words={"\x1b": "\x9b"}))]
    )
    for words in ([tmp_path], [tmp_path, "--json"]):
        assert not set("\x1b\x9b\u202e\x00\r") & set(said(capsys, *words))
