"""Asynchronous against synchronous training: tiny model, environment whose waiting has a long tail.

    python benchmarks/asynchrony.py [--steps 15] [--eta 4]

Reach: at least 2× in steps per second, and 85 % of the ideal. Both runs train the same real (tiny, random) model on the
same rows with the same code, and differ in η alone. The engine lives in its own process. After its answer each episode
waits, as for a tool, by a Pareto draw that depends on the row. The ideal comes from phases that are measured: a step
cannot be shorter than its training and publishing, nor than its episodes' time over the (η + 1)·B slots of the gate (an
episode counted as its mean sample, which is less than its slowest, so the ideal is not made easy):

    ideal_s = max(train_s + update_s, B · mean(sample_s) / ((η + 1) · B))

The phases of training are those of the asynchronous run: on few cores generating and training share them, and that is not
the executor's doing; ``speedup_if_alone`` has the ideal with the synchronous run's phases instead.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tandem.api.workflow import RewardFn, RewardResult  # noqa: E402
from tandem.config.experiment import TrainConfig  # noqa: E402
from tandem.config.load import load_config  # noqa: E402
from tandem.engines.inference.build import build_inference_engine  # noqa: E402
from tandem.engines.train.engine import SpreadEngine  # noqa: E402
from tandem.models.tokenizer import load_tokenizer  # noqa: E402
from tandem.roles.actor import Actor  # noqa: E402
from tandem.rollout.executor import Rollout  # noqa: E402
from tandem.rollout.workflows import Repeated, RLVRWorkflow  # noqa: E402
from tandem.weights.publisher import WeightPublisher  # noqa: E402
from tests.tiny import tiny_model_folder  # noqa: E402


class Digits(RewardFn):
    """Share of digits in the answer: some spread, nothing to compute."""

    async def __call__(self, *, completion, **_) -> RewardResult:
        """Implements `RewardFn.__call__`."""
        return RewardResult(sum(letter.isdigit() for letter in completion) / max(1, len(completion)))


class WaitsLong(RLVRWorkflow):
    """An answer, and then the environment takes its time."""

    durations: list[float]

    async def arun_episode(self, engine, data):
        """Implements `RolloutWorkflow.arun_episode`."""
        began = time.perf_counter()
        sample = await super().arun_episode(engine, data)
        draw = random.Random(f"{data['tandem.index']}").paretovariate(1.1)
        await asyncio.sleep(min(0.03 * draw, 0.8))
        self.durations.append(time.perf_counter() - began)
        return sample


def rows():
    """Endless sums."""
    for index in itertools.count():
        messages = [{"role": "user", "content": f"{index % 10} + {index % 7} ="}]
        yield {"messages": messages, "answer": None, "tandem.epoch": 0, "tandem.index": index, "tandem.source": "sums"}


def measure(folder: Path, eta: int, steps: int) -> dict[str, float]:
    """Medians over the steps after a warm-up of η + 2."""
    overrides = [
        f"actor.path={folder}",
        "actor.dtype=float32",
        "rollout.dtype=float32",
        "rollout.batch_size=8",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=16",
        "threads=1",
        "placement=decoupled",
        *(["async_training=true", f"rollout.max_head_offpolicyness={eta}"] if eta else []),
    ]
    config = load_config(TrainConfig, ROOT / "examples" / "addition_grpo.yaml", overrides).config
    torch.set_num_threads(1)
    with ExitStack() as stack:
        engine = build_inference_engine(
            config.rollout, folder=folder, placement="decoupled", threads=1, device="cpu", deterministic=False
        )
        stack.callback(engine.close)
        trainer = SpreadEngine(config.actor, total_steps=steps + eta + 2, device="cpu")
        actor = Actor(trainer, config.algorithm, config.actor, max_head_offpolicyness=eta, seed=0)
        publisher = WeightPublisher(trainer, engine, run="asynchrony", dtype=torch.float32)
        stack.callback(publisher.close)
        one = WaitsLong(Digits(), config.gconfig, load_tokenizer(folder))
        one.durations = []
        rollout = stack.enter_context(Rollout(engine, config.rollout, max_head_offpolicyness=eta))
        loader, workflow = rows(), Repeated(one, config.gconfig.n_samples)
        times, expired = [], []
        for _ in range(steps + eta + 2):
            marks = [time.perf_counter()]
            batch = rollout.prepare_batch(loader, workflow)
            marks.append(time.perf_counter())
            actor.ppo_update(actor.compute_advantages(actor.compute_proximal(batch)))
            publisher.publish()
            marks.append(time.perf_counter())
            rollout.end_step()
            times.append([marks[1] - marks[0], marks[2] - marks[1]])
            expired.append(rollout.metrics()["expired"])
    waited, trained = zip(*times[eta + 2 :], strict=True)
    return {
        "step_s": statistics.mean(waited) + statistics.mean(trained),
        "wait_s": statistics.mean(waited),
        "train_s": statistics.mean(trained),
        "sample_s": statistics.mean(one.durations),
        "expired": statistics.mean(expired),
    }


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--eta", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_model_folder(Path(scratch))
        synchronous = measure(folder, 0, arguments.steps)
        asynchronous = measure(folder, arguments.eta, arguments.steps)
    ideal = max(asynchronous["train_s"], asynchronous["sample_s"] / (arguments.eta + 1))
    alone = max(synchronous["train_s"], synchronous["sample_s"] / (arguments.eta + 1))
    speedup = synchronous["step_s"] / asynchronous["step_s"]
    result = {
        "speedup": speedup,
        "share_of_ideal": ideal / asynchronous["step_s"],
        "speedup_if_alone": synchronous["step_s"] / alone,
        "reached": speedup >= 2 and ideal / asynchronous["step_s"] >= 0.85,
        "synchronous": synchronous,
        "asynchronous": asynchronous,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
