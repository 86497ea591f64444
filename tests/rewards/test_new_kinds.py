"""A reward of a new kind is one file of the user's, and its values are added where all others are."""

import asyncio
from contextlib import closing
from dataclasses import replace

import torch

from tandem.api.workflow import Sample, Trajectory
from tandem.config.experiment import TrainConfig
from tandem.config.services import SERVICES, Service, register
from tandem.flow.services import make_reward
from tandem.rewards.reward import Scored, read_sum

SOURCE = """
from tandem import FrozenModel, GroupReward, RewardFn, RewardResult, Score


class Words(RewardFn):
    async def __call__(self, *, completion, **rest):
        return RewardResult(float(len(completion.split())))


class Shortest(GroupReward):
    async def compare(self, samples, row):
        least = min(len(sample.completion_text) for sample in samples)
        return [float(len(sample.completion_text) == least) for sample in samples]


class Sure(Score):
    def __init__(self, path):
        self.model = FrozenModel(path)

    def score(self, batch, model):
        return model.forward(batch).logprobs[batch["cu_seqlens"][1:] - 1]
"""

NONE = torch.zeros(2)


async def sample_of(reward, text):
    """The sample as its episode leaves it."""
    given = {"prompt": "", "completion": text, "prompt_ids": (1,), "completion_ids": (1,), "row": {}}
    result = await reward(**given)
    one = Trajectory(NONE.long(), NONE.bool(), NONE, NONE.long())
    return Sample((one,), result.value, result.rewards, completion_text=text, raw_rewards=result.raw_rewards)


def test_terms_of_every_kind_come_from_one_file_and_are_added_as_their_values_come(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    mine = f"{tmp_path}/mine.py"
    spec = f"2*{mine}:Words + 0.5*{mine}:Shortest + 0.25*{mine}:Sure(path=folder, clip=[-1, 1], gate='Words > 1')"
    with closing(make_reward(TrainConfig(reward=spec))) as reward:

        async def in_episodes():
            samples = [await sample_of(reward, text) for text in ("one", "one two")]
            return [one.reward for one in samples], await reward.compare(samples, {})

        at_once, grouped = asyncio.run(in_episodes())
        scored = [Scored(one, 0, spec, values={"Sure": [value]}) for one, value in zip(grouped, (9.0, -3.0), strict=True)]
        whole = reward.add(scored)
    assert at_once == [2.0, 4.0] and [one.reward for one in grouped] == [2.5, 4.0]
    assert [one.reward for one in whole] == [2.5, 3.75]
    assert [one.rewards for one in whole] == [
        {"Words": 2.0, "Shortest": 0.5, "Sure": 0.0},
        {"Words": 4.0, "Shortest": 0.0, "Sure": -0.25},
    ]
    assert [one.metrics["gate/Sure"] for one in whole] == [0.0, 1.0]


def test_a_registered_score_is_a_term_that_asks_for_its_model(tmp_path, monkeypatch):
    (tmp_path / "a_kind_of_score.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    register(Service("reward", "sure", "a_kind_of_score:Sure", needs_model=True))
    try:
        now, late = read_sum("math + 0.5*sure(path=folder)")
        assert (late.label, late.weight, late.score.model.path, late.is_late) == ("sure", 0.5, "folder", True)
        assert now.score is None and not now.is_late and not replace(late, awaited=True).is_late
    finally:
        del SERVICES["reward"]["sure"]
