"""Fleets of real engines on a tiny model, and the ways to hurt them."""

import asyncio
import json
import threading
import time
from dataclasses import replace

import pytest

from tandem.api.failures import InfrastructureFailure
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.fleet import FleetConfig
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine, folder_update
from tandem.engines.inference.embedded import CAPABILITIES
from tandem.engines.inference.fleet.members import Rules, ServerOrigin
from tandem.engines.inference.fleet.pool import Fleet

ROLLOUT = RolloutConfig(dtype="float32", engine=EmbeddedEngineConfig(max_running=16, kv_cache_gib=0.02, threads=1))
CONFIG = FleetConfig(startup_timeout_s=120, drain_timeout_s=30)
RULES = Rules(probe_every_s=0.3, suspect_after_s=1.0, stall_timeout_s=3.0, request_timeout_s=60, empty_timeout_s=60)


LONG = 100
"""Tokens of a request during which something may happen."""


def engine(folder, placement="colocate"):
    """One embedded engine: in this process, or (decoupled) in one of its own."""
    return build_inference_engine(ROLLOUT, folder=folder, placement=placement, threads=1, device="cpu", deterministic=False)


def server(name, make, *, owned=True, holds=0):
    return ServerOrigin(name, make, owned=owned, holds=holds)


def fleet_of(servers, config=CONFIG, rules=RULES, *, journal=None, **rest):
    """A fleet whose engines may be of this process, which share no memory with anybody."""
    known = {"capabilities": CAPABILITIES, "version": WeightVersion(0)}
    return Fleet.start(servers, config, rules=rules, journal=journal, **known, **rest)


def ask(sample=0, *, tokens=12, prompt=(5, 17, 60), **rest):
    """A request that makes exactly ``tokens`` tokens."""
    gconfig = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens)
    return LLMRequest(tuple(prompt), gconfig, noise_key=NoiseKey(seed=3, sample=sample), **rest)


def generate(one, requests, timeout_s=120):
    async def all_of_them():
        return await asyncio.gather(*(one.agenerate(request) for request in requests))

    return asyncio.run(asyncio.wait_for(all_of_them(), timeout_s))


class Asking:
    """Requests that are under way in a thread: ``with Asking(fleet, requests) as asking: …; asking.answers()``.

    As in a run, its event loop goes on when the requests are answered, until the block ends.
    """

    def __init__(self, one, requests):
        self._one, self._requests = one, list(requests)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    async def _all(self):
        return await asyncio.gather(*(self._one.agenerate(request) for request in self._requests))

    def __enter__(self):
        self._thread.start()
        self._future = asyncio.run_coroutine_threadsafe(self._all(), self._loop)
        return self

    def __exit__(self, *_):
        try:
            self._future.exception(120)
        finally:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)
            self._loop.close()

    async def _end(self):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def answers(self):
        return self._future.result(120)


def until(condition, timeout_s=120.0):
    """Waits until it holds; returns the seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it did not happen"
        time.sleep(0.01)
    return time.monotonic() - began


def healthy(fleet):
    """Names of the servers that are given requests; a change is seen with its row in the journal, not before."""
    with fleet.roster.lock:
        return set(fleet.roster.router)


def running(fleet, name):
    """Requests under way at one server."""
    member = fleet.roster.members.get(name)
    return len(member.attempts) if member else 0


def update(folder, number):
    """The weights of a model folder as version ``number``."""
    return folder_update(folder, WeightVersion(number))


def publish(fleet, folder, number):
    """Prepares and commits; returns the report."""
    one = update(folder, number)
    fleet.prepare_weights(one)
    return fleet.commit_weights(one.version)


def rows(journal):
    """The fault table."""
    return [json.loads(line) for line in journal.read_text().splitlines()]


def passed(journal, name):
    """The states that a server went through, in order."""
    return [row["to"] for row in rows(journal) if row["server"] == name and row["from"] != row["to"]]


def same(one, other, tolerance=1e-4, but=0):
    """Whether two lists of responses are the same tokens with the same log-probabilities.

    ``but``: so many may differ. What runs beside a request moves its probabilities by 1e-6; among thousands of tokens one
    draw may fall on the other side of an edge of the cumulative distribution. So the first token that differs is the
    neighbour of the other one, and all before it are the same with the same log-probabilities.
    """
    differing = [i for i, (mine, its) in enumerate(zip(one, other, strict=True)) if mine.output_ids != its.output_ids]
    assert len(differing) <= but, differing
    for mine, its in zip(one, other, strict=True):
        tokens = list(zip(mine.output_ids, its.output_ids, strict=False))
        until = next((place for place, (a, b) in enumerate(tokens) if a != b), len(tokens))
        assert until == len(tokens) or abs(tokens[until][0] - tokens[until][1]) == 1, tokens[until]
        assert all(abs(a - b) <= tolerance for a, b in zip(mine.logprobs[:until], its.logprobs[:until], strict=True))
    return True


class Unwell:
    """A real engine that can be made to fail: everything that is not named here is the engine's own.

    ``fails``: requests are refused as a broken server would; ``holds``: answers are kept back until it is false again,
    and so are those to calls; ``refuses``: what `prepare_weights` and `commit_weights` raise.
    """

    def __init__(self, inner):
        self.inner, self.fails, self.holds, self.refuses = inner, False, False, {}
        self.asked = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def agenerate(self, request):
        self.asked += 1
        if self.fails:
            raise InfrastructureFailure("server", "503")
        response = await self.inner.agenerate(request)
        while self.holds:
            await asyncio.sleep(0.02)
        return response

    def statistics(self):
        while self.holds:
            time.sleep(0.02)
        return self.inner.statistics()

    def prepare_weights(self, one):
        if "prepare" in self.refuses:
            raise self.refuses["prepare"]
        self.inner.prepare_weights(one)

    def commit_weights(self, version):
        if "commit" in self.refuses:
            raise self.refuses["commit"]
        return self.inner.commit_weights(version)


def patient(**changes):
    """The configuration with other values."""
    return replace(CONFIG, **changes)


def ruled(**changes):
    """The limits with other values."""
    return replace(RULES, **changes)


def slowly(test):
    """A test that waits for seconds; CI runs it."""
    return pytest.mark.slow(pytest.mark.invariant(test))


def reference(folder, requests):
    one = engine(folder)
    try:
        return generate(one, requests)
    finally:
        one.close()
