"""Seconds of publishing weights to the embedded engine while requests run, in both placements; medians over several updates.

python benchmarks/weight_update.py                    # SmolLM2-135M in bfloat16: 270 MB
python benchmarks/weight_update.py --running 0        # an idle engine: no keys and values to recompute
python benchmarks/weight_update.py --lora-rank 16     # an adapter's delivery
python benchmarks/weight_update.py --channel disk     # through model folders; --channel collective: a gloo group
python benchmarks/weight_update.py --digest sha256    # with SHA-256 of every tensor on both sides

``cpu_s`` are seconds of cores that this process spent. ``extra`` is how far the trainer's memory rises above what it was
before an update, as a share of the weights.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tandem.api.engines import InferenceEngine
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.config.rollout import GenerationConfig, RolloutConfig
from tandem.config.train_engine import LoRAConfig, TrainEngineConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.train.engine import SpreadEngine
from tandem.models.allocator import keep_freed_memory
from tandem.models.catalog import resolve
from tandem.weights.channel import WeightChannel
from tandem.weights.collective import CollectiveChannel
from tandem.weights.disk import DiskChannel
from tandem.weights.publisher import WeightPublisher

CHANNELS: dict[str, Callable[[Path, Path], WeightChannel | None]] = {
    "auto": lambda scratch, model: None,
    "disk": lambda scratch, model: DiskChannel(scratch, model),
    "collective": lambda scratch, model: CollectiveChannel(1),
}


def resident(name: str) -> int:
    """Bytes of this process: ``VmRSS:`` now, ``VmHWM:`` the most since it was last set back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def publish(publisher: WeightPublisher) -> dict[str, float]:
    """One update, with ``cpu_s`` and ``extra``."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS:")
    began = time.process_time()
    report = publisher.publish()
    spent = time.process_time() - began
    return report | {"cpu_s": spent, "extra": (resident("VmHWM:") - before) / (report["weights/delivered_mib"] * 2**20)}


async def measure(engine: InferenceEngine, publisher: WeightPublisher, running: int, updates: int) -> list[dict[str, float]]:
    """Publishes ``updates`` times, one more at first for warmth, each time among ``running`` requests."""
    gconfig = GenerationConfig(max_new_tokens=1024, min_new_tokens=1024)
    prompts = [tuple(range(100 + i, 164 + i)) for i in range(running)]
    requests = [LLMRequest(p, gconfig, noise_key=NoiseKey(seed=0, sample=i)) for i, p in enumerate(prompts)]
    tasks = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
    rows = []
    for _ in range(updates + 1):
        before = engine.statistics()["generated_tokens"]
        while running and engine.statistics()["generated_tokens"] < before + 4 * running:
            await asyncio.sleep(0.05)
        rows.append(await asyncio.to_thread(publish, publisher))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return rows[1:]


def main() -> None:
    """Prints one JSON object a placement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--channel", default="auto", choices=CHANNELS)
    parser.add_argument("--lora-rank", type=int, help="train adapters of this rank (default: all weights)")
    parser.add_argument("--scratch", type=Path, help="folder for --channel disk (default: a temporary one)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    config = TrainEngineConfig(path=args.model, dtype=args.dtype, lora=LoRAConfig(rank=args.lora_rank))
    trainer = SpreadEngine(config, 1, args.device)
    for placement in ("colocate", "decoupled"):
        engine = build_inference_engine(
            RolloutConfig(dtype=args.dtype),
            folder=resolve(args.model),
            placement=placement,
            threads=args.threads,
            device=args.device,
            deterministic=False,
        )
        scratch = args.scratch or Path(tempfile.mkdtemp())
        channel = CHANNELS[args.channel](scratch / "weights", resolve(args.model))
        dtype = getattr(torch, args.dtype)
        publisher = WeightPublisher(trainer, engine, run="benchmark", dtype=dtype, channel=channel)
        rows = asyncio.run(measure(engine, publisher, args.running, args.updates))
        medians = {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
        shown = {"placement": placement, "channel": args.channel, "running": args.running}
        print(json.dumps(shown | medians), flush=True)
        publisher.close()
        engine.close()
        if args.scratch is None:
            scratch.rmdir()


if __name__ == "__main__":
    main()
