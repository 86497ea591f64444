"""Asynchronous against synchronous training when environments are slow: several turns, waits with a long tail, simulated.

    python benchmarks/slow_environments.py [--steps 20] [--scale 0.01] [--repeats 3]

Reach: at least 2.5× in steps per second at a staleness of at most 2, with at most 10 % of the trained tokens expired.
`on_expiry=mask` takes the finished episodes and leaves expired tokens out of the loss; `wait` waits for a straggler before
it expires. The reach is judged by the worst of the repeats, and by either of the two.

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
from tandem.api.workflow import RolloutWorkflow, Sample
from tandem.config.rollout import GenerationConfig, RolloutConfig
from tandem.rollout.executor import Rollout
from tandem.rollout.workflows import Repeated, Tokens
from tests.rollout.clockwork import ClockworkEngine, prompts

TURNS, BATCH, SAMPLES = 3, 8, 8
GENERATE_S, TRAIN_S = 2.0, 20.0
CELLS = ((0, "mask"), (1, "mask"), (2, "mask"), (1, "wait"), (2, "wait"))  # staleness at most, rollout.on_expiry


def wait_s(index: int, sample: int, turn: int) -> float:
    """Returns how long the environment takes: the same in every run."""
    return min(60.0, max(1.0, 4.0 * math.exp(random.Random(f"{index}/{sample}/{turn}").gauss(0.0, 1.0))))


class Slow(RolloutWorkflow):
    """Three turns in a slow environment."""

    def __init__(self, scale: float):
        self.scale = scale

    async def arun_episode(self, engine, data):
        """Implements `RolloutWorkflow.arun_episode`."""
        tokens = Tokens([1, data["tandem.index"]])
        for turn in range(TURNS):
            tokens.add_response(await engine.agenerate(LLMRequest(tuple(tokens.ids), GenerationConfig())))
            await asyncio.sleep(self.scale * wait_s(data["tandem.index"], engine.noise_key.sample, turn))
            tokens.add_context([2])
        return Sample((tokens.trajectory(),), reward=1.0)


def measure(eta: int, on_expiry: str, steps: int, scale: float) -> dict:
    """Seconds of a step (unscaled) after a warm-up, expired share, groups, and how many of them were trained twice."""
    engine, seen, expired = ClockworkEngine(lambda request: scale * GENERATE_S), [], []
    rows = ({"tandem.epoch": 0, "tandem.index": index} for index in itertools.count())
    config = RolloutConfig(batch_size=BATCH, on_expiry=on_expiry)
    with Rollout(engine, config, max_head_offpolicyness=eta) as rollout:
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
    twice = len(seen) - SAMPLES * len(set(seen))
    return {"step_s": step_s, "expired": sum(expired) / len(expired), "groups": len(seen) // SAMPLES, "trained_twice": twice}


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--scale", type=float, default=0.01)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    cells = {f"{eta} {on_expiry}": [] for eta, on_expiry in CELLS}
    for _ in range(arguments.repeats):
        for eta, on_expiry in CELLS:
            cells[f"{eta} {on_expiry}"].append(measure(eta, on_expiry, arguments.steps, arguments.scale))
    in_turns = [run["step_s"] for run in cells["0 mask"]]
    for name, runs in cells.items():
        speedups = [slow / run["step_s"] for slow, run in zip(in_turns, runs, strict=True)]
        reached = min(speedups) >= 2.5 and max(run["expired"] for run in runs) <= 0.1
        cells[name] = {"reached": reached, "speedup": speedups} | {key: [run[key] for run in runs] for key in runs[0]}
    print(json.dumps({"reached": any(cell["reached"] for cell in cells.values()), "cells": cells}, indent=1))


if __name__ == "__main__":
    main()
