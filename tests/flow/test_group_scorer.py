"""Finished groups get the rewards of models: who is asked about which sample, and which groups are left to train on."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tandem.api.batch import pack
from tandem.api.failures import DataFailure, RewardFailure, UserCodeFailed
from tandem.api.team import Team
from tandem.api.workflow import Group, Sample, Trajectory
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.conductor import Conductor
from tandem.flow.plan import plan_run
from tandem.flow.scoring import ModelGroupScorer, ModelReader, ScoreRole
from tandem.flow.writing import Judged, WritingRole
from tandem.rewards.reward import Reward, Sum
from tests.tiny import CHATML, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = [{"role": "user", "content": "3 + 4?"}]


class Hand(Conductor):
    """Models whose verdicts a test writes; keeps what they are shown."""

    def __init__(self, verdict):
        self.verdict, self.shown = verdict, []

    def call(self, stage, work, shown):
        self.shown.append(shown)
        return self.verdict(shown)

    def prepare(self, name):
        pass


def scorer(reward, verdict, *keys, min_group_size=None):
    """A scorer of this reward, and the hand that stands for its models."""
    items = ["train_dataset.path=addition", "actor.path=smollm2-135m", f"reward={reward}", *keys]
    plan, team = plan_run(load_config(TrainConfig, None, items).config), Team.alone()
    reader = ModelReader(TOKENIZER, same_tokens=True, max_length=64, actor=TOKENIZER)
    writes = [one for one in plan.staged if hasattr(one.score, "reward")]
    roles = {one.name: ScoreRole(one, None, reader, len(TOKENIZER), timeout_s=1.0) for one in plan.staged}
    roles |= {one.name: WritingRole(one, None, team) for one in writes}
    hand = Hand(verdict)
    reward = Reward(plan.reward, {spec: Sum(terms, {}, batch=True) for spec, terms in plan.sums.items()})
    return ModelGroupScorer(plan, roles, reward, hand, team, min_group_size), hand


def said(text, form=1.0, **fields):
    """A sample with this reply, whose form is right or not."""
    ids = torch.tensor(TOKENIZER("3 + 4?")["input_ids"] + TOKENIZER(text)["input_ids"])
    own = torch.arange(len(ids)) >= len(TOKENIZER("3 + 4?")["input_ids"])
    one = Trajectory(ids, own, torch.zeros(len(ids)), torch.where(own, 0, -1))
    given = {"rewards": {"format": form}, "raw_rewards": {"format": form}, "words": {"other": "w"}}
    return Sample(
        (one,), form, completion_text=text, messages=(*CHAT, {"role": "assistant", "content": text}), **given | fields
    )


def lengths(groups):
    return [
        [Judged(float(len(one.completion_text)), f"of {one.completion_text}") for one in some.samples] for some in groups
    ]


def texts(shown):
    return [[one.completion_text for one in group.samples] for group in shown]


def test_a_term_that_compares_sees_the_whole_group_where_it_counts_for_one():
    score, hand = scorer("format + rank(model=folder, gate='format > 0.5')", lengths)
    own = replace(said("own"), reward=9.0, own_reward=True)
    groups = [Group((said("a"), own, said("bbb", form=0.0))), Group((said("c", form=0.0), said("d", form=0.5)))]
    first, second = score(groups)
    assert [texts(one) for one in hand.shown] == [[["a", "bbb"]]]
    assert [one.reward for one in first.samples] == [2.0, 9.0, 0.0] and first.samples[1] is own
    assert [one.reward for one in second.samples] == [0.0, 0.5]
    assert first.samples[0].words == {"other": "w", "rank": "of a"}
    score(groups, training=False)
    assert len(hand.shown) == 1, "in evaluation nothing is compared"


def test_a_judge_of_single_samples_sees_those_for_which_it_counts():
    recipes = "{by: source, recipes: {a: [format, {name: judge, model: folder, gate: 'format > 0.5'}], b: format}}"
    score, hand = scorer(recipes, lengths)
    sums = {spec: "judge" in spec for spec in score.plan.sums}
    rows = {judged: {"tandem.reward": spec} for spec, judged in sums.items()}
    groups = [Group((said("aa"), said("bbb", form=0.0)), data=rows[True]), Group((said("c"),), data=rows[False])]
    for training in (True, False):
        first, second = score(groups, training=training)
        assert [texts(one) for one in hand.shown] == [[["aa"]]] * len(hand.shown)
        assert [one.reward for one in first.samples] == [3.0, 0.0] and second.samples[0].reward == 1.0
    assert len(hand.shown) == 2


BAD = RewardFailure("judge_unreadable", "no verdict")
BASE = {"greedy": True, "in_loss": False, "in_statistics": False}


@pytest.mark.parametrize(
    ("samples", "failures", "least", "left"),
    [
        ([said("a"), said("b"), said("bad")], (), None, 2),
        ([said("a"), said("b"), said("bad")], (), 3, None),
        ([said("a"), said("bad")], (), None, 1),
        ([said("a"), said("bad")], ("late",), None, None),  # of three, one is left
        ([said("a"), said("b"), said("bad")], ("late", "late"), None, None),
        ([said("a"), said("b"), said("bad")], ("late",), 2, 2),
        ([said("a"), said("b"), said("bad", **BASE)], (), None, None),  # there is nothing to compare with
        ([said("a"), said("bad"), said("c", **BASE)], (), None, 2),
        ([said("a"), said("bad"), said("c", **BASE)], ("late",), None, None),  # the baseline makes no group
        ([said("a", in_loss=False), said("bad")], (), None, None),
        ([said("a"), said("b")], ("late",) * 9, None, 2),  # those failed in their episodes, where the group was allowed
    ],
)
def test_a_sample_without_a_verdict_leaves_its_group_which_stays_if_enough_do(samples, failures, least, left):
    def verdict(groups):
        return [[Judged(BAD if one.completion_text == "bad" else 1.0) for one in some.samples] for some in groups]

    score, _ = scorer("0*format + judge(model=folder)", verdict, min_group_size=least)
    (group,) = score([Group(tuple(samples), failures=failures)])
    fine = [one for one in samples if one.completion_text != "bad"]
    if left is not None:
        assert len(group.samples) == left and all(one.reward == 2.0 or one.greedy for one in group.samples)
        assert group.failures == (*failures, *["judge_unreadable"] * (len(samples) - len(fine)))
    else:
        assert isinstance(group, DataFailure) and group.reason == "judge_unreadable"
        assert group.failed_samples == (*failures, "judge_unreadable")
        assert group.num_left == sum(not one.greedy for one in fine)


def test_values_of_steps_are_earned_in_order_by_the_tokens_that_end_them():
    reply, silent, other = "three trees\n\n7", "", "so\n\nthe answer\n\n4"
    score, hand = scorer(
        r"0*format + model(path=folder, steps='\n\n', aggregate=none)",
        lambda batch: torch.arange(1.0, 1 + int(batch["step_end"].sum())),
        "algorithm=ppo",
    )
    samples = [said(reply), said(silent), said(other)]
    (group,) = score([Group(tuple(samples))])
    assert group.failures == ("steps_not_placed",), "without a token there is nothing that could earn"
    rewards = [one.trajectories[0].token_rewards for one in group.samples]
    assert [found[found != 0].tolist() for found in rewards] == [[1.0, 2.0], [3.0, 4.0, 5.0]]
    assert all(found[-1] != 0 for found in rewards)
    (batch,) = hand.shown
    ends = (batch["step_end"].nonzero().flatten() + 1).tolist()
    read = [TOKENIZER.decode(batch["input_ids"][:end]) for end in ends]
    assert read[0].rstrip().endswith("three trees") and read[-1].rstrip().endswith("4")


def test_a_text_is_read_up_to_the_models_length_and_scored_from_its_second_token():
    ids = TOKENIZER("three trees and more")["input_ids"]
    reader = ModelReader(TOKENIZER, same_tokens=False, max_length=len(ids))
    assert reader.text("three trees and more") == {
        "input_ids": ids,
        "loss_mask": [False] + [True] * (len(ids) - 1),
        "temperature": 1.0,
    }
    for text, reason in (("three trees and more.", "too_long"), ("", "empty_text")):
        with pytest.raises(DataFailure) as failure:
            reader.text(text)
        assert failure.value.reason == reason


def test_an_empty_reply_is_a_step_that_ends_with_the_last_token():
    reader = ModelReader(TOKENIZER, same_tokens=False, max_length=64)
    read = reader.steps(said(" \n"), {}, "\n\n")
    assert read["step_end"] == [False] * (len(read["input_ids"]) - 1) + [True]
    assert TOKENIZER.decode(read["input_ids"]).count("<|im_start|>assistant") == 1
    assert any(read["loss_mask"]), "silence is judged too"


def test_what_is_read_is_the_last_trajectory_or_the_row_with_its_tools_and_the_reply():
    tokenizer = tiny_tokenizer("{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}" + CHATML)
    reader = ModelReader(tokenizer, same_tokens=True, max_length=64, actor=tokenizer)
    tools = [{"type": "function", "function": {"name": "abacus", "parameters": {"type": "object", "properties": {}}}}]
    row, sample = {"messages": CHAT, "tools": tools}, replace(said("seven"), messages=())
    asked = "<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(reader.conversation(sample, row)["input_ids"]).startswith(f"abacus{asked}seven")
    assert tokenizer.decode(reader.steps(sample, row, "\n\n")["input_ids"]).startswith(f"{asked}seven")
    first, last = (said(text).trajectories[0] for text in ("one", "two"))
    read = reader.trajectory(replace(sample, trajectories=(first, last)))
    assert read["input_ids"] is last.input_ids and read["rollout_logprobs"] is last.rollout_logprobs
    with pytest.raises(DataFailure, match="nor its row has messages"):
        reader.conversation(sample, {})


def test_a_marker_replaces_the_separator_and_a_step_is_earned_where_its_text_ends():
    reader = ModelReader(TOKENIZER, same_tokens=True, max_length=64, actor=TOKENIZER)
    sample = said("three trees\n\nseven")
    marked = reader.steps(sample, {}, "\n\n", marker="<|endoftext|>", place=True)
    assert "three trees<|endoftext|>seven<|endoftext|>" in TOKENIZER.decode(marked["input_ids"])
    ids = sample.trajectories[0].input_ids
    assert [TOKENIZER.decode(ids[: at + 1]) for at in marked["step_tokens"]] == [
        "3 + 4?three trees",
        "3 + 4?three trees\n\nseven",
    ]


def role_of(score, *, is_file=False, timeout_s=1.0):
    """A role of this score, whose model has 10 tokens."""
    planned = SimpleNamespace(name="mine", term=SimpleNamespace(name="mine.py:Mine", is_file=is_file), score=score)
    return ScoreRole(planned, None, ModelReader(TOKENIZER, same_tokens=True, max_length=8), 10, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": [0, 9]}, None),
        ({"input_ids": [-1, 9]}, "a token that the model does not have; it has 10"),
        ({"input_ids": [0, 10]}, "a token that the model does not have; it has 10"),
        ({"input_ids": [], "loss_mask": []}, "one length above 0; it gave 0 and 0"),
        ({"input_ids": [1]}, "one length above 0; it gave 1 and 2"),
        ({"step_end": [True, True]}, "as many step_tokens"),
    ],
)
def test_a_users_score_that_reads_what_no_model_can_is_named(fields, words):
    made = {
        "input_ids": [1, 2],
        "loss_mask": [False, True],
        "temperature": 1.0,
        "step_end": [False, True],
        "step_tokens": [1],
    }
    role = role_of(SimpleNamespace(read=lambda sample, row, reader: made | fields, per_step=True))
    if words is None:
        assert role.read(said("a"), {}) == made | fields
        return
    with pytest.raises(UserCodeFailed, match=rf"reward 'mine' \(mine.py:Mine\): read .*{words}"):
        role.read(said("a"), {})


def test_a_users_score_has_the_time_of_all_its_samples_and_gives_a_value_for_each():
    batch = [{"input_ids": [1, 2], "loss_mask": [False, True]}]
    values = []

    def score(batch, model):
        time.sleep(0.1)
        return torch.tensor(values)

    role = role_of(SimpleNamespace(score=score, per_step=False), is_file=True, timeout_s=0.05)
    values = [0.5] * 40
    assert role.score(pack(batch * 40)).tolist() == values
    with pytest.raises(UserCodeFailed, match=r"took longer than 0\.05 s"):
        role.score(pack(batch))
    with pytest.raises(UserCodeFailed, match=r"one score for each sequence, \[39\]; it gave \[40\]"):
        role.score(pack(batch * 39))
