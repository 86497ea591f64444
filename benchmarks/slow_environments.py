"""Asynchronous against synchronous training when environments are slow: several turns, waits with a long tail, simulated.

    python benchmarks/slow_environments.py [--steps 20] [--scale 0.01]

Reach: at least 2.5× in steps per second at a staleness of at most 2, with at most 10 % of the trained tokens expired.

Everything but the executor is a clock: an engine that answers after a moment, an environment that takes a log-normal time
for each of three turns (median 4 s, σ = 1, at least 1 s and at most 60 s), a training step that takes 20 s; all of it times
``--scale``. So the figures are those of the executor's scheduling, whatever the machine is busy with.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tandem.api.requests import LLMRequest
from tandem.api.samples import Sample
from tandem.api.workflow import RolloutWorkflow
from tandem.config.generation import GenerationConfig
from tandem.config.rollout import RolloutConfig
from tandem.rollout.chat import Tokens
from tandem.rollout.executor import Rollout
from tandem.rollout.workflows import Repeated
from tests.rollout.clockwork import ClockworkEngine, prompts

TURNS, BATCH, SAMPLES = 3, 8, 8
GENERATE_S, TRAIN_S = 2.0, 20.0


def wait_s(index: int, sample: int, turn: int) -> float:
    """Returns how long the environment takes: the same in every run."""
    return min(60.0, max(1.0, 4.0 * math.exp(random.Random(f"{index}/{sample}/{turn}").gauss(0.0, 1.0))))


class Slow(RolloutWorkflow):
    """Three turns in a slow environment."""

    def __init__(self, scale: float):
        self.scale = scale

    async def arun_episode(self, engine, data):
        """See `RolloutWorkflow`."""
        tokens = Tokens([1, data["index"]])
        for turn in range(TURNS):
            tokens.add_response(await engine.agenerate(LLMRequest(tuple(tokens.ids), GenerationConfig())))
            await asyncio.sleep(self.scale * wait_s(data["index"], engine.noise_key.sample, turn))
            tokens.add_context([2])
        return Sample((tokens.trajectory(),), reward=1.0)


def measure(eta: int, steps: int, scale: float) -> dict:
    """Seconds of a step (unscaled) after a warm-up, expired share, and the prompts that were trained."""
    engine, seen, expired = ClockworkEngine(lambda request: scale * GENERATE_S), [], []
    rows = ({"epoch": 0, "index": index} for index in itertools.count())
    with Rollout(engine, RolloutConfig(batch_size=BATCH), max_head_offpolicyness=eta) as rollout:
        for step in range(steps + eta + 2):
            if step == eta + 2:
                began = time.perf_counter()
            batch = rollout.prepare_batch(rows, Repeated(Slow(scale), SAMPLES))
            time.sleep(scale * TRAIN_S)
            engine.number += 1
            rollout.end_step()
            seen += prompts(batch)
            expired.append(rollout.metrics()["expired"])
        step_s = (time.perf_counter() - began) / steps / scale
    return {"step_s": step_s, "expired": sum(expired) / len(expired), "groups": len(seen) // SAMPLES, "prompts": seen}


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--scale", type=float, default=0.01)
    arguments = parser.parse_args()
    runs = {eta: measure(eta, arguments.steps, arguments.scale) for eta in (0, 1, 2)}
    for run in runs.values():
        run["trained_twice"] = len(run["prompts"]) - SAMPLES * len(set(run.pop("prompts")))
    speedup = runs[0]["step_s"] / runs[2]["step_s"]
    reached = speedup >= 2.5 and runs[2]["expired"] <= 0.1
    print(json.dumps({"speedup": speedup, "reached": reached, "by_staleness": runs}, indent=1))


if __name__ == "__main__":
    main()
