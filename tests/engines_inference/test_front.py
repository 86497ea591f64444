"""The embedded engine as its callers see it: the same sentences hold in the trainer's process and in one of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tandem.api.failures import DataFailure, EngineDied, WaitTimeout, WeightUpdateFailed
from tandem.api.requests import LLMRequest, NoiseKey, StopReason
from tandem.api.weights import WeightVersion
from tandem.config.errors import ConfigError
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.inference.check import engine_threads
from tandem.engines.inference.embedded import ChildStart, Link
from tandem.engines.inference.engine_calls import Callers
from tests.tiny import tiny_model_folder
from tests.zygote import gone

ROLLOUT = RolloutConfig(dtype="float32", engine=EmbeddedEngineConfig(max_running=8, kv_cache_gib=0.01, threads=1))
PLACEMENTS = ("colocate", "decoupled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def build(folder, placement, *, deterministic=False, rollout=ROLLOUT):
    return build_inference_engine(
        rollout, folder=folder, placement=placement, threads=1, device="cpu", deterministic=deterministic
    )


@pytest.fixture(scope="module", params=PLACEMENTS)
def engine(request, folder):
    engine = build(folder, request.param, deterministic=True)
    yield engine
    engine.close()


def ask(sample=0, *, prompt=(5, 17, 60), tokens=12, **rest):
    """A request that makes exactly ``tokens`` tokens."""
    gconfig = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens)
    return LLMRequest(tuple(prompt), gconfig, noise_key=NoiseKey(seed=3, sample=sample), **rest)


def generate(engine, requests):
    async def all_of_them():
        return await asyncio.gather(*(engine.agenerate(request) for request in requests))

    return asyncio.run(asyncio.wait_for(all_of_them(), 120))


def until(condition, timeout_s=60.0):
    """Waits until the condition holds; returns the seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it did not happen"
        time.sleep(0.01)
    return time.monotonic() - began


def children():
    """The processes below this one."""
    return set(psutil.Process().children(recursive=True))


def idle(engine):
    statistics = engine.statistics()
    return statistics["running"] == statistics["waiting"] == 0


async def under_way(engine):
    """Waits until a request runs."""
    while not engine.statistics()["running"]:
        await asyncio.sleep(0.001)


def test_many_requests_at_once_are_each_answered(engine):
    responses = generate(engine, [ask(i, prompt=(5, 6 + i % 3), tokens=1 + i % 7) for i in range(60)])

    assert [len(r.output_ids) for r in responses] == [1 + i % 7 for i in range(60)]
    assert all(len(r.output_ids) == len(r.logprobs) == len(r.versions) for r in responses)
    assert {v for r in responses for v in r.versions} == {engine.version.number}
    assert idle(engine)


def test_a_request_sampled_alone_and_among_others_is_the_same(engine):
    alone = generate(engine, [ask(7)])[0]
    among = generate(engine, [ask(i) for i in range(20)])[7]

    assert alone == replace(among, logprobs=alone.logprobs)
    assert alone.logprobs == pytest.approx(among.logprobs, abs=1e-5)


def test_two_event_loops_can_ask_at_the_same_time(engine):
    async def both():
        return await asyncio.gather(*(asyncio.to_thread(generate, engine, [ask(i) for i in range(4)]) for _ in range(2)))

    first, second = asyncio.run(both())
    assert [r.output_ids for r in first] == [r.output_ids for r in second]


def test_a_prompt_longer_than_the_context_fails_as_data_and_hurts_nobody(engine):
    async def one_too_long():
        return await asyncio.gather(
            engine.agenerate(ask(prompt=range(3, 203), tokens=5)),
            engine.agenerate(ask(prompt=[5] * 600)),
            return_exceptions=True,
        )

    good, bad = asyncio.run(one_too_long())
    assert len(good.output_ids) == 5
    assert isinstance(bad, DataFailure) and bad.reason == "prompt_too_long"


def test_a_cancelled_caller_frees_its_request(engine):
    async def give_up():
        tasks = [asyncio.ensure_future(engine.agenerate(ask(i, tokens=400))) for i in range(12)]
        await under_way(engine)
        for task in tasks[1:]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(give_up())
    assert len(results[0].output_ids) == 400
    assert all(isinstance(result, asyncio.CancelledError) for result in results[1:])
    until(lambda: idle(engine))


def test_a_deadline_ends_a_request_with_what_it_has(engine):
    response = generate(engine, [ask(tokens=480, deadline_s=0.1)])[0]

    assert response.stop_reason == StopReason.CANCELLED
    assert len(response.output_ids) == len(response.logprobs) < 480
    assert idle(engine)


def test_a_deadline_passes_also_while_paused(engine):
    engine.pause()
    try:
        response = generate(engine, [ask(deadline_s=0.1)])[0]
    finally:
        engine.resume()

    assert (response.stop_reason, response.output_ids) == (StopReason.CANCELLED, ())


def test_paused_nothing_is_computed_and_requests_wait(engine):
    async def during_a_pause():
        task = asyncio.ensure_future(engine.agenerate(ask(tokens=300)))
        await under_way(engine)
        engine.pause()
        before = engine.statistics()["generated_tokens"]
        later = [asyncio.ensure_future(engine.agenerate(ask(i))) for i in range(5)]
        await asyncio.sleep(0.2)
        paused = engine.statistics()
        assert paused["generated_tokens"] == before
        assert paused["waiting"] == 5
        assert not task.done()
        engine.resume()
        return await asyncio.gather(task, *later)

    interrupted, *_ = asyncio.run(during_a_pause())
    assert interrupted == generate(engine, [ask(tokens=300)])[0]


def test_a_wave_released_at_once_does_not_depend_on_the_order_of_arrival(engine):
    async def wave(requests):
        engine.pause()
        tasks = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
        while engine.statistics()["waiting"] < len(tasks):
            await asyncio.sleep(0.01)
        engine.resume()
        return await asyncio.gather(*tasks)

    requests = [ask(i, prompt=range(5, 9 + i)) for i in range(20)]
    forth, back = asyncio.run(wave(requests)), asyncio.run(wave(requests[::-1]))[::-1]
    assert forth == back  # to the bit, log-probabilities included


def test_sleep_is_refused_while_requests_run_and_gives_the_cache_back_after(engine):
    async def sleep_too_early():
        task = asyncio.ensure_future(engine.agenerate(ask(tokens=300)))
        await under_way(engine)
        with pytest.raises(RuntimeError, match="under way"):
            engine.sleep(("kv_cache",))
        return await task

    asyncio.run(sleep_too_early())
    before = generate(engine, [ask()])
    engine.sleep(("kv_cache",))
    engine.wake(("kv_cache",))
    assert generate(engine, [ask()]) == before


def test_it_makes_the_same_tokens_wherever_it_lives(engine, folder):
    requests = [ask(i, prompt=range(5, 10 + i)) for i in range(10)]
    here = build(folder, "colocate")
    one, other = generate(here, requests), generate(engine, requests)
    here.close()

    assert [r.output_ids for r in one] == [r.output_ids for r in other]
    for mine, its in zip(one, other, strict=True):
        assert mine.logprobs == pytest.approx(its.logprobs, abs=1e-5)


@pytest.mark.parametrize("placement", ["colocate", pytest.param("decoupled", marks=pytest.mark.slow)])
def test_closing_fails_whoever_waits_and_all_who_come_later_and_can_be_repeated(folder, placement):
    async def close_under_way():
        engine = build(folder, placement)
        tasks = [asyncio.ensure_future(engine.agenerate(ask(i, tokens=480))) for i in range(20)]
        await under_way(engine)
        engine.close()
        engine.close()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        with pytest.raises(EngineDied, match="closed"):
            await engine.agenerate(ask())
        with pytest.raises(EngineDied, match="closed"):
            engine.pause()
        return results

    before = children()
    results = asyncio.run(close_under_way())
    assert all(isinstance(result, EngineDied) for result in results)
    assert children() == before


def test_what_the_engines_thread_raises_reaches_every_caller(folder):
    engine = build(folder, "colocate")

    async def poison():
        tasks = [asyncio.ensure_future(engine.agenerate(ask(i, tokens=400))) for i in range(3)]
        bad = asyncio.ensure_future(engine.agenerate(ask(prompt=(10**6,))))  # no such token
        return await asyncio.gather(*tasks, bad, return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(poison(), 120))
    if isinstance(results[-1], DataFailure):  # refused at the door: nobody else is hurt
        assert all(len(result.output_ids) == 400 for result in results[:-1])
    else:
        assert all(isinstance(result, EngineDied) and result.__cause__ is not None for result in results)
        with pytest.raises(EngineDied):
            engine.statistics()
    engine.close()


@pytest.mark.parametrize("placement", ["colocate", pytest.param("decoupled", marks=pytest.mark.slow)])
def test_a_folder_without_a_model_is_an_error_at_the_start(tmp_path, placement):
    with pytest.raises((EngineDied, OSError, ValueError)) as caught:
        build(tmp_path, placement)
    assert str(tmp_path) in str(caught.value)


def test_threads_follow_the_placement_unless_configured():
    one = replace(ROLLOUT, engine=EmbeddedEngineConfig())
    assert [engine_threads(one, placement=p, threads=5) for p in PLACEMENTS] == [5, 2]
    assert [engine_threads(ROLLOUT, placement=p, threads=5) for p in PLACEMENTS] == [1, 1]


def test_an_unknown_backend_is_refused(folder):
    with pytest.raises(ConfigError, match=r"rollout\.backend=warp: 'warp' is not an inference backend.*embedded"):
        build(folder, "colocate", rollout=replace(ROLLOUT, backend="warp"))


@pytest.mark.slow
@pytest.mark.invariant
class TestProcess:
    """What only an engine in a process of its own must withstand."""

    def test_a_killed_process_fails_every_request_within_seconds(self, folder):
        async def kill():
            engine = build(folder, "decoupled")
            tasks = [asyncio.ensure_future(engine.agenerate(ask(i, tokens=480))) for i in range(20)]
            await under_way(engine)
            os.kill(engine.pid, signal.SIGKILL)
            began = time.monotonic()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            passed = time.monotonic() - began
            with pytest.raises(EngineDied):
                await engine.agenerate(ask())
            with pytest.raises(EngineDied, match="SIGKILL"):
                engine.statistics()
            engine.close()
            return results, passed

        results, passed = asyncio.run(kill())
        died = [result for result in results if isinstance(result, EngineDied)]
        assert died and all("killed by SIGKILL" in str(result) for result in died)
        assert passed < 10.0

    def test_ctrl_c_is_not_its_business(self, folder):
        engine = build(folder, "decoupled")
        os.kill(engine.pid, signal.SIGINT)
        assert os.getsid(engine.pid) != os.getsid(0)
        assert len(generate(engine, [ask()])[0].output_ids) == 12
        engine.close()
        assert not psutil.pid_exists(engine.pid)

    def test_one_that_ends_at_its_start_or_is_too_slow_is_told_apart(self, folder, tmp_path, monkeypatch):
        start, others = ChildStart(folder, ROLLOUT.engine, torch.float32, "cpu", WeightVersion(0), 1, False), children()
        with pytest.raises(WaitTimeout, match=r"had not loaded its model within 0\.01 s"):
            Link.start(start, Callers(), 0.01)
        (tmp_path / "tandem.py").write_text("raise SystemExit('not the real one')")
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # its module search path: this one stands before Tandem
        with pytest.raises(EngineDied, match=r"at its start its process \d+ ended with exit status 1; see its output above"):
            Link.start(start, Callers(), 60)
        assert children() == others

    @pytest.mark.slow
    def test_a_stopped_process_is_killed_on_close_and_a_call_to_it_ends_at_its_deadline(self, folder):
        start = ChildStart(folder, ROLLOUT.engine, torch.float32, "cpu", WeightVersion(0), 1, False)
        link = Link.start(start, Callers(), 60)
        os.kill(link.pid, signal.SIGSTOP)
        with pytest.raises(WaitTimeout, match=r"did not answer statistics within 0\.3 s"):
            link.call("statistics", timeout_s=0.3)
        link.close()
        assert not psutil.pid_exists(link.pid)

    @pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
    def test_it_ends_with_its_parent_and_nothing_is_left(self, folder, tmp_path, how):
        script = tmp_path / "parent.py"
        script.write_text(PARENT)
        before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
        root = Path(__file__).parents[2]
        with subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        ) as parent:
            line = parent.stdout.readline().split()
            assert line, parent.stderr.read()
            child, orphan = psutil.Process(int(line[0])), int(line[1])
            assert child.is_running() and psutil.Process(parent.pid) in child.parents()
            parent.send_signal(how)
            parent.wait(30)
            until(lambda: gone(child), 60)
            if how == signal.SIGKILL:  # else its parent took it along
                os.kill(orphan, signal.SIGKILL)
            complaints = parent.stderr.read()
        assert "resource_tracker" not in complaints
        assert "leaked" not in complaints
        if Path("/dev/shm").exists():
            assert {name for name in set(os.listdir("/dev/shm")) - before if "tandem" in name} == set()


PARENT = """
import asyncio, multiprocessing, sys, time
from pathlib import Path

from tests.engines_inference.test_front import ask, build


async def main():
    engine = build(Path(sys.argv[1]), "decoupled")
    # A forked child holds our end of the pipe open: its end alone would not tell the engine that we are gone.
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    fork.start()
    tasks = [asyncio.ensure_future(engine.agenerate(ask(i, tokens=400))) for i in range(4)]
    print(engine.pid, fork.pid, flush=True)
    while True:
        await asyncio.gather(*tasks)
        tasks = [asyncio.ensure_future(engine.agenerate(ask(i, tokens=400))) for i in range(4)]


if __name__ == "__main__":
    asyncio.run(main())
"""


def test_updates_need_to_be_prepared_before_they_are_committed(engine):
    with pytest.raises(WeightUpdateFailed, match="nothing is prepared"):
        engine.commit_weights(replace(engine.version, number=9))
    engine.discard_weights()
    assert engine.version.number == 0


def test_statistics_are_numbers(engine):
    statistics = engine.statistics()
    assert {"generated_tokens", "prefill_tokens", "busy_s", "running", "waiting"} <= set(statistics)
    assert Counter(type(value) for value in statistics.values()).keys() <= {int, float}
    assert torch.get_num_threads() >= 1
