"""Several turns in a deterministic run: those of a turn reach the engine together, whoever dawdles between two turns."""

import asyncio
import random

import pytest
import torch

from tandem.api.failures import DataFailure
from tandem.api.requests import LLMRequest
from tandem.api.workflow import Group, RolloutWorkflow, Sample
from tandem.config.rollout import GenerationConfig, RolloutConfig
from tandem.rollout.executor import Rollout
from tandem.rollout.workflows import Repeated, Tokens
from tests.rollout.clockwork import ClockworkEngine, rows


class Watching(ClockworkEngine):
    """Notes how many requests it has whenever it goes on."""

    def __init__(self):
        super().__init__(lambda request: random.uniform(0.0, 0.004))
        self.seen, self.computing = [], 0

    async def agenerate(self, request):
        assert self.paused, "a request came while the engine was at work"
        return await super().agenerate(request)

    def resume(self):
        super().resume()
        self.seen.append(len(self.requests))


async def talk(engine, data, turns):
    tokens = Tokens([1, int(data["tandem.index"])])
    for turn in range(turns):
        tokens.add_response(await engine.agenerate(LLMRequest(tuple(tokens.ids), GenerationConfig())))
        await asyncio.sleep(random.uniform(0.0, 0.01))  # an environment, a tool, a reward
        if data.get("fails") == turn:
            raise DataFailure("enough")
    return Sample((tokens.trajectory(),), reward=1.0)


class Talks(RolloutWorkflow):
    """Sample i of row j has 1 + (i + j) % 3 turns."""

    async def arun_episode(self, engine, data):
        return await talk(engine, data, 1 + (engine.noise_key.sample + data["tandem.index"]) % 3)


class TalkTogether(RolloutWorkflow):
    makes_group = True

    async def arun_episode(self, engine, data):
        engines = [engine.for_sample(i) for i in range(3)]
        return Group(tuple(await asyncio.gather(*(talk(one, data, 1 + i) for i, one in enumerate(engines)))))


def test_the_requests_of_a_turn_reach_the_engine_together():
    engine = Watching()
    with Rollout(engine, RolloutConfig(batch_size=4), deterministic=True) as rollout:
        rollout.prepare_batch(iter(rows(4)), Repeated(Talks(), 3))
    assert engine.seen == [12, 12 + 8, 12 + 8 + 4]


def test_who_fails_between_two_turns_is_not_waited_for():
    engine = Watching()
    data = rows(4)
    data[1]["fails"] = 0
    with Rollout(engine, RolloutConfig(batch_size=3), deterministic=True) as rollout:
        rollout.prepare_batch(iter(data), Repeated(Talks(), 3))
    assert engine.seen[:3] == [9, 9 + 4, 9 + 4 + 2]


def test_a_workflow_of_whole_groups_goes_on_where_some_samples_have_ended():
    with Rollout(ClockworkEngine(lambda request: 0.002), RolloutConfig(batch_size=2), deterministic=True) as rollout:
        batch = rollout.prepare_batch(iter(rows(2)), TalkTogether())
    lengths = torch.diff(batch["cu_seqlens"]).tolist()
    assert lengths == [4, 6, 8, 4, 6, 8]


def test_an_engine_that_dies_between_two_turns_ends_the_wait():
    class Dies(Watching):
        def pause(self):
            if self.seen:
                self.dead = True
            super().pause()

    with (
        Rollout(Dies(), RolloutConfig(batch_size=1), deterministic=True) as rollout,
        pytest.raises(Exception, match="stopped"),
    ):
        rollout.prepare_batch(iter(rows(1)), Repeated(Talks(), 3))
