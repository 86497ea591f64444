"""The fleet's own cost: the real router and pool over stand-ins for servers that answer by a model of their service time.

    python benchmarks/fleet_simulation.py [--servers 512] [--concurrent 50000] [--seconds 30] [--answer-at-once 1000]

Two measurements, each on one event loop and one core:

- *scale*: ``--concurrent`` requests are under way all the time, in groups of eight, each for ``--seconds`` (log-normal, as
  measured completions are, and longer the more a server has to do). CPU share of one core, arrival rate, evenness of work
  over servers (Jain's index) and the share of requests that went where their group is.
- *cost*: ``--answer-at-once`` callers ask servers that answer at once, again and again: milliseconds of CPU a request, the
  stand-in's own subtracted.
"""

import argparse
import asyncio
import itertools
import json
import random
import resource
import time
from collections import Counter

from tandem.api.engines import InferenceEngine
from tandem.api.requests import LLMRequest, LLMResponse, StopReason
from tandem.api.weights import WeightVersion
from tandem.config.fleet import FleetConfig
from tandem.config.rollout import GenerationConfig
from tandem.engines.inference.fleet.members import ServerOrigin
from tandem.engines.inference.fleet.pool import Fleet

GROUP = 8
SAMPLING = GenerationConfig(max_new_tokens=1024)
PROMPT = tuple(range(200))
ONE = (7,)


class StandIn(InferenceEngine):
    """A server that answers after a time: none, or drawn for each request and stretched by what runs beside it."""

    version = WeightVersion(0)
    capabilities = frozenset()

    def __init__(self, seconds: float, comfortable: int):
        self._seconds, self._comfortable, self.running, self.served = seconds, comfortable, 0, 0
        self.groups: Counter[str] = Counter()

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """One token, late."""
        if self._seconds and request.gconfig is SAMPLING:
            self.running += 1
            self.served += 1
            self.groups[request.affinity or ""] += 1
            stretch = max(1.0, self.running / self._comfortable)
            try:
                await asyncio.sleep(self._seconds * random.lognormvariate(-0.125, 0.5) * stretch)
            finally:
                self.running -= 1
        return LLMResponse(request.input_ids, ONE, (-0.5,), (0,), StopReason.STOP)

    def statistics(self) -> dict[str, float]:
        """It is always at work."""
        return {"generated_tokens": time.monotonic(), "running": float(self.running)}

    def prepare_weights(self, update) -> None:
        """Nothing is held."""

    def commit_weights(self, version) -> dict[str, float]:
        """Nothing is held."""
        return {"pause_s": 0.0, "recompute_s": 0.0}

    def discard_weights(self) -> None:
        """Nothing is held."""

    def pause(self) -> None:
        """Not asked for here."""

    def resume(self) -> None:
        """Not asked for here."""

    def sleep(self, parts) -> None:
        """Not asked for here."""

    def wake(self, parts) -> None:
        """Not asked for here."""

    def close(self) -> None:
        """Nothing is held."""


def cpu_s() -> float:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def fleet_of(stand_ins: list[StandIn]) -> Fleet:
    """The real fleet over them, all healthy."""
    servers = [ServerOrigin(f"s{i}", lambda one=one: one, owned=True, holds=0) for i, one in enumerate(stand_ins)]
    fleet = Fleet.start(servers, FleetConfig(), capabilities=frozenset(), version=WeightVersion(0))
    while len(fleet.roster.router) < len(servers):
        time.sleep(0.05)
    return fleet


class Load:
    """Requests in groups of consecutive ones, each followed by the next at once."""

    def __init__(self, fleet: Fleet):
        self._fleet, self.done, self._number = fleet, 0, itertools.count()

    async def run(self) -> None:
        """One request after another."""
        while True:
            affinity = f"group {next(self._number) // GROUP}"
            await self._fleet.agenerate(LLMRequest(PROMPT, SAMPLING, affinity=affinity))
            self.done += 1


async def scale(servers: int, concurrent: int, seconds: float) -> dict[str, object]:
    """The first part: so many requests at once on so many servers. Measured for as long as requests take on average, and
    begun half as long after they all have come in."""
    stand_ins = [StandIn(seconds, concurrent // servers + 1) for _ in range(servers)]
    fleet = fleet_of(stand_ins)
    load, tasks = Load(fleet), []
    ramp = max(1, concurrent // 200)
    for number in range(concurrent):
        tasks.append(asyncio.ensure_future(load.run()))
        if number % ramp == 0:
            await asyncio.sleep(seconds / 200)
    await asyncio.sleep(seconds / 2)
    before, cpu, began, served = load.done, cpu_s(), time.monotonic(), [one.served for one in stand_ins]
    await asyncio.sleep(seconds)
    passed, used, done = time.monotonic() - began, cpu_s() - cpu, load.done - before
    shares = [one.served - was for one, was in zip(stand_ins, served, strict=True)]
    work = list(fleet.roster.router.work().values())
    figures = {
        "servers": servers,
        "concurrent": fleet.roster.requests(),
        "cpu_share": round(used / passed, 3),
        "arrivals_per_s": round(done / passed, 1),
        "cpu_ms_per_request": round(1000 * used / max(1, done), 3),
        "jain_work": round(sum(work) ** 2 / (len(work) * sum(w * w for w in work)), 4),
        "served_least_mean_most": [min(shares), round(sum(shares) / len(shares), 1), max(shares)],
        "affinity_kept": round(kept(stand_ins), 4),
        "moved": fleet.roster.counts["moved"],
        "memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    fleet.close()
    return figures


def kept(stand_ins: list[StandIn]) -> float:
    """Share of requests that went to the server of most of their group."""
    most: Counter[str] = Counter()
    for one in stand_ins:
        for group, count in one.groups.items():
            most[group] = max(most[group], count)
    return sum(most.values()) / max(1, sum(one.served for one in stand_ins))


async def cost(concurrent: int, rounds: int = 20) -> dict[str, object]:
    """Processor milliseconds of a request through the fleet, without those of a server's stand-in."""
    stand_ins = [StandIn(0.0, 1) for _ in range(8)]
    fleet = fleet_of(stand_ins)

    async def caller(one, number: int) -> None:
        for turn in range(rounds):
            await one.agenerate(LLMRequest(PROMPT, SAMPLING, affinity=f"{number // GROUP}/{turn}"))

    found = []
    for one in (stand_ins[0], fleet):
        cpu = cpu_s()
        await asyncio.gather(*(caller(one, number) for number in range(concurrent)))
        found.append(1000 * (cpu_s() - cpu) / (concurrent * rounds))
    fleet.close()
    own = found[1] - found[0]
    return {"concurrent": concurrent, "cpu_ms_per_request": round(own, 4), "reached": own <= 0.2}


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=512)
    parser.add_argument("--concurrent", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--answer-at-once", type=int, default=1000)
    arguments = parser.parse_args()
    random.seed(0)
    costs = asyncio.run(cost(arguments.answer_at_once))
    scales = asyncio.run(scale(arguments.servers, arguments.concurrent, arguments.seconds))
    print(json.dumps({"cost": costs, "scale": scales}))


if __name__ == "__main__":
    main()
