"""What is served is what the engine makes in process: tokens, log-probabilities, versions."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from tandem.api.failures import DataFailure, ServerFailed, WrongWorkflow
from tandem.api.requests import NoiseKey, StopReason
from tandem.config.errors import ConfigError
from tandem.engines.inference.remote.tandem_server import TandemServer
from tests.serve.served import ADMIN, CONTEXT, Served, one_by_one, request_of

PROMPTS = [tuple(random.Random(i).randrange(3, 300) for _ in range(4 + 3 * i)) for i in range(4)]


@pytest.fixture(scope="module")
def remote(served):
    server = TandemServer.attach(served.url, run="r", admin_token=ADMIN)
    yield server
    server.close()


@pytest.mark.parametrize(
    "sampling",
    [
        {"greedy": True},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.8, "top_k": 20},
        {"min_new_tokens": 6, "stop_token_ids": tuple(range(3, 200))},
        {"first_token_temperature": 3.0},
        {"stop": ("e", "th")},
        {"max_new_tokens": 100_000, "stop_token_ids": tuple(range(3, 60))},
    ],
    ids=lambda sampling: "+".join(sampling),
)
def test_served_equals_in_process(remote, local, sampling):
    requests = [request_of(ids, NoiseKey(7, 1, i, 2), **sampling) for i, ids in enumerate(PROMPTS)]

    for there, here in zip(one_by_one(remote, requests), one_by_one(local, requests), strict=True):
        assert (there.input_ids, there.output_ids) == (here.input_ids, here.output_ids)
        assert there.logprobs == pytest.approx(here.logprobs, abs=1e-6)
        assert (there.versions, there.stop_reason) == (here.versions, here.stop_reason)
        assert (there.temperature, there.untrained_tokens) == (here.temperature, here.untrained_tokens)


def test_many_at_once_get_their_own_answers(remote, local):
    requests = [request_of(PROMPTS[i % 4], NoiseKey(3, sample=i), temperature=0.7) for i in range(24)]

    async def ask(engine):
        return await asyncio.gather(*(engine.agenerate(request) for request in requests))

    for there, here in zip(asyncio.run(ask(remote)), asyncio.run(ask(local)), strict=True):
        assert there.output_ids == here.output_ids
        assert there.logprobs == pytest.approx(here.logprobs, abs=1e-4)


@pytest.mark.parametrize("field", [{"media": (-7, 0, 0)}, {"model": "judge"}])
def test_what_no_engine_can_do_yet_is_refused_here_and_there(remote, local, field):
    for engine in (remote, local):
        with pytest.raises(WrongWorkflow, match=f"LLMRequest.{next(iter(field))} is set"):
            one_by_one(engine, [replace(request_of(PROMPTS[0]), **field)])


def test_without_a_noise_key_two_requests_differ(remote):
    first, second = one_by_one(remote, [request_of(PROMPTS[0], max_new_tokens=30, min_new_tokens=30)] * 2)

    assert first.output_ids != second.output_ids


def test_a_prompt_that_does_not_fit_is_a_data_failure_with_its_reason(remote):
    with pytest.raises(DataFailure, match="no room in the context") as failure:
        one_by_one(remote, [request_of([5] * CONTEXT)])

    assert failure.value.reason == "prompt_too_long"


def test_a_prompt_beyond_the_vocabulary_is_a_data_failure(remote):
    with pytest.raises(DataFailure, match=r"input_ids\[…\] must be at most") as failure:
        one_by_one(remote, [request_of([5, 100_000])])

    assert failure.value.reason == "refused_by_server"


def test_a_deadline_ends_the_request_with_what_it_has(remote):
    (response,) = one_by_one(remote, [request_of(PROMPTS[0], max_new_tokens=2)])
    assert response.stop_reason == StopReason.LENGTH
    remote.pause()
    late = request_of(PROMPTS[0], deadline_s=0.05, max_new_tokens=2)
    (response,) = one_by_one(remote, [late])
    remote.resume()

    assert response.stop_reason == StopReason.CANCELLED and response.output_ids == ()


def test_statistics_count_what_was_generated(remote):
    before = remote.statistics()["generated_tokens"]
    one_by_one(remote, [request_of(PROMPTS[0], max_new_tokens=5, min_new_tokens=5)])

    assert remote.statistics()["generated_tokens"] == before + 5


def test_capabilities_are_the_engines_without_shared_memory(remote, local):
    assert remote.capabilities == local.capabilities - {"adapter"}  # no folder was allowed, so no disk either


def test_another_run_is_refused_until_the_first_gives_the_server_back(served, remote):
    with pytest.raises(ServerFailed, match="belongs to run 'r'") as refused:
        TandemServer.attach(served.url, run="other", admin_token=ADMIN)

    assert refused.value.status == 409


def test_a_server_of_another_precision_is_refused_before_it_is_taken(folder):
    with Served(folder) as served:
        with pytest.raises(ConfigError, match=r"computes in float32.* is bfloat16; start it with --dtype bfloat16"):
            TandemServer.attach(served.url, run="r", dtype=torch.bfloat16, admin_token=ADMIN)
        assert served.json("GET", "/health")["run"] is None
        TandemServer.attach(served.url, run="r", dtype=torch.float32, admin_token=ADMIN).close()


def test_a_request_of_another_run_is_refused(served, remote):
    answer = served.json("POST", "/generate", {"input_ids": [5], "run": "other"}, status=409)

    assert answer["error"]["code"] == "other_run"


def test_a_wrong_admin_token_does_not_attach(served):
    with pytest.raises(ServerFailed, match="needs the server's admin token") as refused:
        TandemServer.attach(served.url, run="r", admin_token="x" * 20)

    assert refused.value.status == 401
