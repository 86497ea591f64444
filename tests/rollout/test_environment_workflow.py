"""A chat whose other speaker is an environment: what it reads, what each turn earns, and where the episode begins."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.api.failures import DataFailure
from tandem.api.requests import LLMResponse, NoiseKey, StopReason
from tandem.api.services import Services
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig
from tandem.rollout.environments.environment_workflow import EnvironmentWorkflow, earned_by_turn, reader
from tests.rollout.test_chat import FORGETFUL
from tests.tiny import tiny_tokenizer

WORLDS = Path(__file__).parent / "worlds.py"
GCONFIG = GenerationConfig(max_new_tokens=8)
ROW = {"messages": [{"role": "user", "content": "Play."}], "answer": "7", "tandem.epoch": 0, "tandem.index": 5}


class Script:
    """An engine that says what stands there, and keeps what it was asked."""

    def __init__(self, tokenizer, *says, key=None, full_after=None, reason=StopReason.STOP):
        self.tokenizer, self.says, self.requests, self.full_after = tokenizer, list(says), [], full_after
        self.reason = reason
        if key is not None:
            self.noise_key = key

    async def agenerate(self, request):
        if len(self.requests) == self.full_after:
            raise DataFailure("prompt_too_long", "no room")
        self.requests.append(request)
        ids = (*self.tokenizer(self.says.pop(0), add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id)
        return LLMResponse(request.input_ids, ids, (-0.5,) * len(ids), (0,) * len(ids), self.reason, 1.0)

    @property
    def read(self):
        """The text of the last request."""
        return self.tokenizer.decode(list(self.requests[-1].input_ids), skip_special_tokens=False)


@pytest.fixture
def play():
    """Plays one episode in a class of the file."""
    tokenizers = {}

    def run(world, *says, row=ROW, key=None, template=None, full_after=None, reason=StopReason.STOP, **knobs):
        tokenizer = tokenizers.setdefault(template, tiny_tokenizer(*[template] if template else []))
        script = Script(tokenizer, *says, key=key, full_after=full_after, reason=reason)
        with Services({"environment": f"{WORLDS}:{world}"}, tokenizer=tokenizer, gconfig=GCONFIG) as services:
            workflow = services.make("workflow=environment", EnvironmentWorkflow, knobs)
            return asyncio.run(workflow.arun_episode(script, row)), script

    return run


def test_observations_are_the_users_turns_and_replies_are_actions(play):
    sample, script = play("Count", "left", "right", "up", system_prompt="Be brief.")
    said = [(message["role"], message["content"]) for message in sample.messages]
    assert said == [
        ("system", "Be brief."),
        ("user", f"Play.\n\nBegin with {said[1][1][-2]}."),
        ("assistant", "left"),
        ("user", "You said left. 2 left."),
        ("assistant", "right"),
        ("user", "You said right. 1 left."),
        ("assistant", "up"),
    ]
    assert sample.reward == 3.0 and sample.accuracy == 1.0
    assert sample.metrics == {"turns": 3.0, "malformed_actions": 0.0, "cut_episodes": 0.0}
    assert script.read.endswith("1 left.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(("template", "count"), [(None, 1), (FORGETFUL, 3)])
def test_each_turn_earns_at_its_last_token_also_where_a_template_rewrites_history(play, template, count):
    says = ["<think>a</think>left"] * 3
    sample, _ = play("Count(step=0.25)", *says, template=template)
    assert len(sample.trajectories) == count
    for trajectory in sample.trajectories:
        ends = trajectory.loss_mask & ~torch.cat([trajectory.loss_mask[1:], torch.tensor([False])])
        assert torch.equal(trajectory.token_rewards, ends * 0.25)
    assert sum(int(t.token_rewards.count_nonzero()) for t in sample.trajectories) == 3
    assert sample.reward == 0.75


@pytest.mark.parametrize(("untrained", "earned"), [(0, [1.0, 1.0, 1.0]), (1, [0.0, 2.0, 1.0]), (2, [0.0, 1.0, 2.0])])
def test_a_turn_without_a_trained_token_leaves_its_reward_to_the_turns_before_it(play, untrained, earned, monkeypatch):
    says = Script.agenerate

    async def untrained_turn(script, request):
        response = await says(script, request)
        turn = len(script.requests) - 1
        return replace(response, untrained_tokens=len(response.output_ids)) if turn == untrained else response

    monkeypatch.setattr(Script, "agenerate", untrained_turn)
    sample, _ = play("Count(step=1.0)", "left", "right", "up")
    (trajectory,) = sample.trajectories
    ends = trajectory.loss_mask & ~torch.cat([trajectory.loss_mask[1:], torch.tensor([False])])
    assert [float(trajectory.token_rewards[0]), *trajectory.token_rewards[ends].tolist()] == earned
    assert float(trajectory.token_rewards.sum()) == sample.reward == 3.0


def test_the_sum_from_a_turn_on_is_its_discounted_return():
    rewards, discount = [1.0, 0.0, -2.0, 4.0], 0.5
    returns = [sum(r * discount**k for k, r in enumerate(rewards[t:])) for t in range(4)]
    earned = earned_by_turn(rewards, discount)
    assert list(itertools.accumulate(earned[::-1]))[::-1] == pytest.approx(returns)
    assert earned_by_turn(rewards, 1.0) == rewards


def test_a_text_that_is_no_action_is_told_and_costs_what_you_say(play):
    says = ("...", "nonsense", "go", "go", "go")
    sample, _ = play("Count", *says, action="last_word", malformed_reward=-0.5, turn_discount=0.5)
    told = [message["content"] for message in sample.messages if message["role"] == "user"]
    assert told[1:3] == ["Your reply has no word in it.", "No such move."]
    assert sample.metrics["malformed_actions"] == 2 / 5 and sample.metrics["turns"] == 5
    assert sample.reward == pytest.approx(-0.5 - 0.25 + 0.25 + 0.125 + 0.0625)
    ended, _ = play("Count", "...", action="last_word", on_malformed="end")
    assert ended.metrics["turns"] == 1 and ended.reward == 0


def test_an_episode_ends_by_a_step_that_is_over_or_cut_and_keeps_its_accuracy(play):
    told = [("on", 1.0, False, False, {"accuracy": 1.5}), ("on", 0.0, False, False, {}), ("cut", 2.0, False, True, None)]
    sample, _ = play("Says", "a", "b", "c", row=ROW | {"steps": [*told, ("never", 9.0, True, False, {})]})
    assert (sample.metrics["turns"], sample.metrics["cut_episodes"], sample.reward) == (3.0, 0.0, 3.0)
    assert sample.accuracy == 1.0, "within 0…1, and not forgotten by steps that do not know it"
    over = [("on", 1.0, False, False, {"accuracy": 1.0}), ("over", 0.0, True, False, {"accuracy": -1})]
    assert play("Says", "a", "b", row=ROW | {"steps": over})[0].accuracy == 0.0


def test_turns_are_limited_and_a_full_context_ends_the_episode(play):
    sample, _ = play("Count", "go", "go", max_turns=2)
    assert sample.metrics == {"turns": 2.0, "malformed_actions": 0.0, "cut_episodes": 1.0} and sample.accuracy is None
    sample, _ = play("Count", "go", "go", full_after=1)
    assert sample.metrics["turns"] == 1 and sample.metrics["cut_episodes"] == 1 and sample.reward == 1
    with pytest.raises(DataFailure, match="no room"):  # the row itself is too long
        play("Count", full_after=0)


def test_a_reply_that_was_cancelled_is_no_action(play):
    with pytest.raises(DataFailure, match="not what the policy would have said"):
        play("Count", "go", reason=StopReason.CANCELLED)


def test_members_of_a_group_begin_in_the_same_state_unless_it_is_said(play):
    with Services({"environment": f"{WORLDS}:Count"}, tokenizer=tiny_tokenizer(), gconfig=GCONFIG) as services:
        same, own = (
            services.make("workflow=environment", EnvironmentWorkflow, {"same_start": shared}) for shared in (True, False)
        )

    def seeds(workflow, *keys, row=ROW):
        return [workflow.seed_of(Script(None, key=NoiseKey(*key)), row) for key in keys]

    assert len(set(seeds(same, (1, 0, 5, 0), (1, 0, 5, 3), (1, 0, 5, 3, 2)))) == 1
    assert len(set(seeds(same, (1, 0, 5), (2, 0, 5), (1, 1, 5), (1, 0, 6)))) == 4
    assert seeds(same, (1,), (1, 0, 0, 1), row=ROW | {"seed": 12}) == [12, 12]
    for row in (ROW, ROW | {"seed": 12}):
        assert len(set(seeds(own, (1,), (1, 0, 0, 1), row=row))) == 2
    rows = [ROW | {"tandem.epoch": epoch, "tandem.index": index} for epoch, index in ((0, 5), (0, 5), (1, 5), (0, 6))]
    alone = [same.seed_of(Script(None), row) for row in rows]  # an engine without noise of its own
    assert alone[0] == alone[1] and len(set(alone)) == 3
    begun, _ = play("Async", "a", "b", key=NoiseKey(1), row=ROW | {"seed": 12})
    assert begun.messages[0]["content"] == "Play.\n\nrow 5, seed 12"


def test_a_world_of_gymnasium_plays_as_it_is(play):
    sample, _ = play("Gym", "go", row=ROW | {"seed": 4})
    assert sample.messages[0]["content"] == "Play.\n\n4 7" and sample.reward == 1


@pytest.mark.parametrize(
    ("reading", "pattern", "reply", "action"),
    [
        ("text", None, " go left \n", "go left"),
        ("last_word", None, "I go to the **left**.", "left"),
        ("last_line", None, "First\nthen left\n", "then left"),
        ("number", None, "between 3 and -12.", -12),
        ("number", None, "3 or 0.75", 0.75),
        ("regex", r"\[(\w+)\]", "[up] no, [down]!", "down"),
        ("regex", r"up|down", "up, then down!", "down"),
        ("regex", r"go(\d)?", "go", ""),
        ("json", None, 'so {"a": 1} or {"move": {"x": 2}} it is', {"move": {"x": 2}}),
    ],
)
def test_an_action_is_read_from_a_reply(reading, pattern, reply, action):
    assert reader(reading, pattern)(reply) == action


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"max_turns": 0}, "max_turns must be more than 0"),
        ({"turn_discount": 1.5}, "turn_discount must lie in 0…1"),
        ({"action": "regex"}, "belong together"),
        ({"action": "regex", "pattern": "("}, "not a regular expression"),
    ],
)
def test_what_cannot_work_is_refused(play, knobs, words):
    with pytest.raises(ConfigError, match=words):
        play("Count", **knobs)


def test_the_deadlines_of_calls_follow_from_the_episodes():
    def limits(episode_timeout_s=600.0, **knobs):
        given = {"tokenizer": tiny_tokenizer(), "gconfig": GCONFIG, "episode_timeout_s": episode_timeout_s}
        with Services({"environment": f"{WORLDS}:Count"}, **given) as services:
            made = services.make("workflow=environment", EnvironmentWorkflow, knobs).pool.limits
            return made.reset_timeout_s, made.step_timeout_s, made.close_timeout_s

    assert limits() == (60.0, 30.0, 5.0) == limits(episode_timeout_s=7200.0)
    assert limits(episode_timeout_s=120.0) == (12.0, 6.0, 1.0)
    assert limits(episode_timeout_s=120.0, step_timeout_s=90.0)[1] == 90.0
    with pytest.raises(ConfigError, match=r"step_timeout_s must be above 0 and below rollout\.episode_timeout_s \(120\)"):
        limits(episode_timeout_s=120.0, step_timeout_s=150.0)
