"""The executor's own cost an episode, with an engine that answers at once. Reach: at most 0.2 ms at 10,000 episodes.

    python benchmarks/executor.py [--episodes 10000] [--repeats 5]

Measured from handing over all rows to having taken all groups, gate, ledger, tasks, deadlines, noise keys and the copy of
each row included. Packing the groups into a batch is timed beside it: it grows with samples and tokens, not with episodes.
"""

import argparse
import json
import statistics
import time

import torch

from tandem.api.requests import LLMRequest, LLMResponse, StopReason
from tandem.api.weights import WeightVersion
from tandem.api.workflow import RolloutWorkflow, Sample, Trajectory
from tandem.config.rollout import GenerationConfig, RolloutConfig
from tandem.rollout.executor import Rollout, collate

SAMPLING = GenerationConfig(n_samples=1, max_new_tokens=2)


class AtOnce:
    """The part of an engine that the executor uses."""

    version = WeightVersion(0)

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Two tokens, now."""
        return LLMResponse(request.input_ids, (7, 8), (-0.5, -0.5), (0, 0), StopReason.STOP)


class OneRequest(RolloutWorkflow):
    """One request; the sample is made beforehand, so that making tensors is not counted as the executor's."""

    def __init__(self) -> None:
        mask = torch.tensor([False, True, True])
        tokens = torch.tensor([1, 7, 8])
        self.sample = Sample((Trajectory(tokens, mask, torch.zeros(3), torch.where(mask, 0, -1)),), reward=1.0)

    async def arun_episode(self, engine, data) -> Sample:
        """Implements `RolloutWorkflow.arun_episode`."""
        await engine.agenerate(LLMRequest((1,), SAMPLING))
        return self.sample


def measure(episodes: int) -> tuple[float, float]:
    """Milliseconds an episode: (executor, packing)."""
    rows = [
        {"messages": [{"role": "user", "content": "3 + 4 ="}], "answer": "7", "tandem.epoch": 0, "tandem.index": i}
        for i in range(episodes)
    ]
    with Rollout(AtOnce(), RolloutConfig(batch_size=episodes)) as rollout:
        began = time.perf_counter()
        rollout.rollout_batch(rows, OneRequest())
        whole = time.perf_counter() - began
        began = time.perf_counter()
        collate(rollout.last_groups, version=0, max_head_offpolicyness=0)
        packing = time.perf_counter() - began
        rollout.end_step()
        assert rollout.metrics()["episodes/trained"] == episodes
    return 1000 * (whole - packing) / episodes, 1000 * packing / episodes


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    figures = [measure(arguments.episodes) for _ in range(arguments.repeats)]
    own, packing = (statistics.median(column) for column in zip(*figures, strict=True))
    result = {"episodes": arguments.episodes, "executor_ms_per_episode": own, "packing_ms_per_episode": packing}
    print(json.dumps(result | {"reached": own <= 0.2, "all_executor_ms": [round(a, 4) for a, _ in figures]}))


if __name__ == "__main__":
    main()
