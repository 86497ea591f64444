"""Engines behind vLLM's and SGLang's interfaces: what a completion is, whatever the server does."""

import asyncio
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tandem.api.failures import DataFailure, ServerFailed, WrongWorkflow
from tandem.api.requests import LLMRequest, NoiseKey, StopReason
from tandem.api.weights import WeightVersion
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tests.engines_inference.remote.clients import (
    KINDS,
    ask,
    attach,
    expected,
)
from tests.engines_inference.remote.wire import VllmStandIn


def test_a_completion_has_a_logprob_and_a_version_for_each_token(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        answer = ask(engine, temperature=0.5)
        engine.close()
    assert answer.output_ids == expected(server, (5, 6, 7), 8)
    assert answer.logprobs == tuple(server.logprob(token, 0.5) for token in answer.output_ids)
    assert answer.versions == (0,) * 8
    assert (answer.stop_reason, answer.temperature) == (StopReason.LENGTH, 0.5)


@pytest.mark.parametrize("field", [{"media": (-7, 0, 0)}, {"model": "judge"}])
def test_what_no_engine_can_do_yet_is_not_sent(kind, folder, field):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        before = len(server.requests)
        with pytest.raises(WrongWorkflow, match=f"LLMRequest.{next(iter(field))} is set"):
            asyncio.run(engine.agenerate(LLMRequest((5, 6, 7), GenerationConfig(), **field)))
        engine.close()
    assert len(server.requests) == before


def test_a_stop_token_ends_a_completion_and_stays_in_it(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        tokens = expected(server, (5, 6, 7), 8)
        answers = [ask(engine, stop_token_ids=(tokens[2],)), ask(engine, stop_token_ids=(tokens[7],))]
        engine.close()
    assert [len(answer.output_ids) for answer in answers] == [3, 8]
    assert {answer.stop_reason for answer in answers} == {StopReason.STOP}, "also where it is the last that may come"


def test_a_stop_string_ends_with_the_token_that_completes_it_on_every_server(kind, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        tokens = expected(server, (5, 6, 7), 8)
        text = tokenizer.decode(tokens[3:5])
        answer = ask(engine, stop=(text,))
        engine.close()
    assert text in tokenizer.decode(answer.output_ids) and text not in tokenizer.decode(answer.output_ids[:-1])
    assert answer.stop_reason == StopReason.STOP


def test_a_server_that_stops_at_a_token_of_its_own_is_asked_for_the_rest(folder):
    kind = KINDS["sglang"]
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        prompt = next((4, n) for n in range(3, 299) if 9 in expected(server, (4, n), 6)[:5])
        (answer,) = ask(engine, prompt, max_new_tokens=6)
        engine.close()
    assert answer.output_ids == expected(server, prompt, 6)
    assert len(server.requests[-2]["ids"]) == 2 < len(server.requests[-1]["ids"]), "it began with the prompt, and went on"


def test_at_its_deadline_a_request_ends_as_cancelled_with_what_it_has(kind, folder):
    with kind[1](folder, token_s=0.02) as server:
        engine = attach(kind, server, folder)
        began = time.monotonic()
        answer = ask(engine, max_new_tokens=50, deadline_s=0.2)
        took = time.monotonic() - began
        nothing = ask(engine, deadline_s=0.0)
        engine.close()
    assert answer.stop_reason == StopReason.CANCELLED and 0 < len(answer.output_ids) < 50
    assert answer.output_ids == expected(server, (5, 6, 7), len(answer.output_ids))
    assert took < 2.0 and len(server.aborted) == 1, "the server was told"
    assert (nothing.stop_reason, nothing.output_ids) == (StopReason.CANCELLED, ())


def test_what_a_server_cannot_sample_for_training_is_refused_at_start_and_request(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        narrow = [{"min_new_tokens": 2}]
        narrow += [{"top_p": 0.9}, {"top_k": 5}] if kind[0] is VllmServer else []
        for gconfig in narrow:
            ((key, value),) = gconfig.items()
            with pytest.raises(ConfigError, match=f"{engine.name}.*{key}={value}"):
                engine.check_generation(GenerationConfig(**gconfig))
            with pytest.raises(DataFailure, match=f"{key}={value}"):
                ask(engine, **gconfig)
        with pytest.raises(DataFailure) as failure:
            ask(engine, tuple(range(1, 65)))
        assert failure.value.reason == "prompt_too_long"
        with pytest.raises(ConfigError, match="was not started so that it can free its memory; start it"):
            engine.sleep(("weights",))
        engine.close()


def narrowed(kind):
    """A stand-in that gives the log-probabilities of the whole distribution as far as its maker can."""
    return {"extension": "tandem_vllm_worker.TandemWorker"} if kind[0] is VllmServer else {}


def test_top_p_and_top_k_keep_the_log_probabilities_of_the_whole_distribution(kind, folder):
    with kind[1](folder) as server:
        vars(server).update(narrowed(kind))
        engine = attach(kind, server, folder)
        for gconfig in ({"top_p": 0.9}, {"top_k": 5}):
            engine.check_generation(GenerationConfig(**gconfig))
            answer = ask(engine, **gconfig)
            assert answer.logprobs == tuple(server.logprob(token, 1.0) for token in answer.output_ids)
        engine.close()


def test_a_worker_whose_log_probabilities_stay_those_after_truncation_is_found_out(folder):
    kind = KINDS["vllm"]
    with kind[1](folder, spoils=("whole",)) as server:
        vars(server).update(narrowed(kind))
        engine = attach(kind, server, folder)
        with pytest.raises(ConfigError, match="after top-p and top-k"):
            engine.check_generation(GenerationConfig(top_p=0.9))
        engine.close()


@pytest.mark.parametrize("needs_logprobs", [True, False])
def test_stop_tokens_are_suppressed_for_a_minimum_of_tokens(kind, folder, needs_logprobs):
    with kind[1](folder) as server:
        vars(server).update(narrowed(kind) if needs_logprobs else {})
        engine = attach(kind, server, folder)
        prompt, stop = (5, 6, 7), expected(server, (5, 6, 7), 3)[1]
        request = LLMRequest(
            prompt,
            GenerationConfig(max_new_tokens=6, min_new_tokens=3, stop_token_ids=(stop,)),
            needs_logprobs=needs_logprobs,
        )
        if needs_logprobs and kind[0] is not VllmServer:
            with pytest.raises(DataFailure, match="min_new_tokens=3"):
                asyncio.run(engine.agenerate(request))
        else:
            answer = asyncio.run(engine.agenerate(request))
            assert len(answer.output_ids) >= 3 and stop not in answer.output_ids[:3]
            assert server.requests[-1]["minimum"] == 3
        engine.close()


def test_a_minimum_counts_over_the_pieces_of_a_completion(folder):
    kind = KINDS["vllm"]
    with kind[1](folder) as server:
        vars(server).update(narrowed(kind))
        engine = attach(kind, server, folder)
        ask(engine, first_token_temperature=4.0, min_new_tokens=3)
        engine.close()
    assert [request["minimum"] for request in server.requests[-2:]] == [1, 2]


def test_who_needs_no_log_probabilities_may_sample_as_the_server_can(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        gconfig = GenerationConfig(max_new_tokens=4, top_p=0.5, top_k=3, min_new_tokens=2)
        answer = asyncio.run(engine.agenerate(LLMRequest((5, 6), gconfig, needs_logprobs=False)))
        assert len(answer.output_ids) == 4
        engine.close()


def test_a_completion_ends_at_the_context_of_the_server(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        (answer,) = ask(engine, tuple(range(10, 70)), max_new_tokens=100)
        engine.close()
    assert len(answer.output_ids) == 4 and answer.truncated


def test_the_first_token_may_have_a_temperature_of_its_own(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        answer = ask(engine, first_token_temperature=4.0)
        engine.close()
    assert answer.output_ids == expected(server, (5, 6, 7), 8) and answer.untrained_tokens == 1
    assert [request["temperature"] for request in server.requests[-2:]] == [4.0, 1.0]
    assert answer.logprobs[0] == server.logprob(answer.output_ids[0], 4.0)


def test_greedy_logprobs_are_at_temperature_one_and_say_so(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        answer = ask(engine, greedy=True, temperature=0.3)
        engine.close()
    assert answer.temperature == 1.0
    assert answer.logprobs == tuple(server.logprob(token, 1.0) for token in answer.output_ids)


def test_seeds_come_from_the_noise_key(kind, folder):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        for sample, prompt in ((0, (5, 6)), (0, (5, 6)), (1, (5, 6)), (0, (5, 6, 7))):
            ask(engine, prompt, key=NoiseKey(seed=1, sample=sample))
        engine.close()
    first, same, other, later = (request["seed"] for request in server.requests[-4:])
    assert first == same != other
    assert all(-(2**63) <= seed < 2**63 for seed in (first, other))
    assert (later != first) == (kind[0] is VllmServer), "the next turn draws anew; the other server counts positions itself"


def test_vllm_on_a_cpu_gets_no_seeds_and_needs_our_worker(folder):
    with VllmStandIn(folder) as server:
        server.device = "cpu"
        with pytest.raises(ConfigError, match="--worker-extension-cls tandem_vllm_worker"):
            attach(KINDS["vllm"], server, folder)
        server.extension = "tandem_vllm_worker.TandemWorker"
        engine = attach(KINDS["vllm"], server, folder)
        ask(engine, key=NoiseKey(seed=1))
        engine.close()
    assert server.requests[-1]["seed"] is None


@pytest.mark.parametrize("garbage", [{}, [], {"choices": []}, {"choices": [{"token_ids": [1], "logprobs": None}]}, None, 7])
def test_what_is_no_completion_is_the_servers_fault(kind, folder, garbage):
    with kind[1](folder) as server:
        engine = attach(kind, server, folder)
        server.garbage = (
            garbage if garbage is not None else {"output_ids": [1, 2], "meta_info": {"output_token_logprobs": []}}
        )
        with pytest.raises(ServerFailed, match="no completion"):
            ask(engine)
        engine.close()


def test_a_cancelled_caller_frees_the_request(kind, folder):
    async def leave(engine):
        task = asyncio.ensure_future(engine.agenerate(LLMRequest((5,), GenerationConfig(max_new_tokens=600))))
        while not (await asyncio.to_thread(engine.statistics))["running"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return engine.statistics()["running"]

    with kind[1](folder, token_s=0.02) as server:
        engine = attach(kind, server, folder)
        assert asyncio.run(leave(engine)) == 0
        engine.close()


def test_attaching_to_nothing_says_so(kind, folder, tmp_path):
    with pytest.raises(ServerFailed, match="Connect"):
        kind[0].attach("http://127.0.0.1:9", folder=folder, dtype=torch.float32, version=WeightVersion(0))
    with pytest.raises(ConfigError, match="interpreter"):
        kind[0].start(
            folder,
            python=str(Path(tmp_path) / "python"),
            log_file=tmp_path / "log",
            dtype=torch.float32,
            version=WeightVersion(0),
        )
