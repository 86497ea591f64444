"""What an episode adds to its requests."""

import asyncio
import math
from dataclasses import replace

import pytest

from tandem.api.failures import DataFailure, WrongWorkflow
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey, StopReason
from tandem.config.rollout import GenerationConfig
from tandem.rollout.episode_engine import EpisodeEngine
from tests.rollout.clockwork import ClockworkEngine


def ask(*requests, deadline_s=None, sample=0):
    async def all_of_them():
        inner = ClockworkEngine()
        engine = EpisodeEngine(inner, NoiseKey(1, 2, 3), deadline_s=deadline_s).for_sample(sample)
        for request in requests:
            await engine.agenerate(request)
        return inner.requests

    return asyncio.run(all_of_them())


def test_a_chat_that_appends_keeps_its_trajectory_and_any_other_request_starts_one():
    request = LLMRequest((1, 2), GenerationConfig())
    longer = replace(request, input_ids=(1, 2, 7, 8, 5))  # the answer is (7, 8)
    seen = ask(request, longer, request, sample=4)
    assert [r.noise_key for r in seen] == [NoiseKey(1, 2, 3, 4, trajectory, 0) for trajectory in (0, 0, 1)]
    assert {r.affinity for r in seen} == {"2/3"}


def test_what_a_request_says_itself_is_kept():
    own = LLMRequest((1,), GenerationConfig(), noise_key=NoiseKey(9), affinity="mine", deadline_s=5.0)
    assert ask(own, deadline_s=1.0) == [own]
    (filled,) = ask(replace(own, deadline_s=None), deadline_s=1.0)
    assert 0 < filled.deadline_s <= 1


def test_an_episode_that_is_not_trained_on_needs_no_log_probabilities():
    async def one(**options):
        inner = ClockworkEngine()
        await EpisodeEngine(inner, NoiseKey(1), **options).for_sample(0).agenerate(LLMRequest((1,), GenerationConfig()))
        return inner.requests[0].needs_logprobs

    assert asyncio.run(one()) and not asyncio.run(one(needs_logprobs=False))


def test_a_request_that_the_deadline_cut_is_a_failure_and_not_a_short_answer():
    class Cuts:
        async def agenerate(self, request):
            return LLMResponse(request.input_ids, (), (), (), StopReason.CANCELLED)

    engine = EpisodeEngine(Cuts(), NoiseKey(0), deadline_s=0.0)
    with pytest.raises(DataFailure, match="deadline"):
        asyncio.run(engine.agenerate(LLMRequest((1,), GenerationConfig())))


def test_of_a_server_that_tells_no_times_the_whole_is_measured():
    class Sleeps:
        async def agenerate(self, request):
            await asyncio.sleep(0.02)
            return LLMResponse(request.input_ids, (), (), (), StopReason.STOP)

    response = asyncio.run(EpisodeEngine(Sleeps(), NoiseKey(0)).agenerate(LLMRequest((1,), GenerationConfig())))
    assert response.timing.total_s >= 0.02 and math.isnan(response.timing.queued_s)


def test_in_a_whole_group_only_a_request_that_continues_what_was_judged_is_refused():
    async def go_on(tokens, **options):
        engine = EpisodeEngine(ClockworkEngine(), NoiseKey(1), **options)
        await engine.for_sample(0).agenerate(LLMRequest((1, 2), GenerationConfig()))
        engine.has_read((1, 2, 7, 8), ["helpful"])
        await engine.for_sample(1).agenerate(LLMRequest(tokens, GenerationConfig()))

    asyncio.run(go_on((1, 2), as_one=True))  # the next sample of the group
    with pytest.raises(WrongWorkflow, match="helpful of the reward is added only when the episode has ended"):
        asyncio.run(go_on((1, 2, 7, 8, 5), as_one=True))
