"""Speeds: training as a share of what the device multiplies, generation, and the pause for new weights."""

import asyncio
import json
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig

from scripts.gpu_check import cuda_only
from scripts.gpu_check.equalities import batch_of, nll
from scripts.gpu_check.place import DTYPES, Line, Place
from tandem.api.engines import InferenceEngine
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.generation import GenerationConfig
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.inference.core import EngineCore
from tandem.models.architecture import Architecture
from tandem.planning.devices import DEVICES
from tandem.weights.publisher import WeightPublisher

BESIDE = Path(__file__).with_name("beside_vllm.py")


def peaks(place: Place) -> dict[str, float]:
    """FLOP/s of a large matrix product here, by dtype."""
    size, found = place.of(8192, 256), {}
    for name, dtype in DTYPES.items():
        a, b = (torch.randn(size, size, device=place.device).to(dtype) for _ in range(2))
        found[name] = 2.0 * size**3 / place.seconds(lambda a=a, b=b: a @ b, place.of(20, 3))
    return found


def sheet_peak(place: Place, dtype: str) -> float | None:
    """FLOP/s of the data sheet; None for a device that is not in the table."""
    name = str(cuda_only.described(place.device).get("gpu", "")).lower()
    row = next((device for key, device in DEVICES.items() if key in name), None)
    return None if row is None else (row.bfloat16_tflops if dtype == "bf16" else row.float32_tflops) * 1e12


def training(place: Place) -> Iterator[Line]:
    """Tokens a second of an optimizer step, and the share of the peak that this is (MFU, arXiv:2204.02311 with causal
    attention): 6 FLOP a parameter and token, and 6 · layers · width · length of attention."""
    measured = peaks(place)
    config = Architecture.from_config(AutoConfig.from_pretrained(place.model))
    width = config.num_heads * config.head_dim
    for length, count in ((1024, 64), (4096, 16)) if not place.quick else ((32, 4),):
        for dtype in DTYPES:
            trainer = place.trainer(dtype, max_tokens=place.of(16384, 64))
            batch = batch_of(place, place.prompts([length] * count, seed=4))
            cuda_only.peak_gib(place.device)
            seconds = place.seconds(lambda trainer=trainer, batch=batch: trainer.train_batch(batch, nll), place.of(5, 1))
            parameters = sum(tensor.numel() for _, tensor in trainer.weights())
            rate = length * count / seconds
            flops = rate * (6.0 * parameters + 6.0 * config.num_layers * width * length)
            shares = [f"{flops / measured[dtype]:.1%} of the product measured here ({measured[dtype] / 1e12:.3g} TFLOP/s)"]
            sheet = sheet_peak(place, dtype)
            shares += [f"{flops / sheet:.1%} of the data sheet's {sheet / 1e12:g}"] if sheet else []
            peak = cuda_only.peak_gib(place.device)
            memory = "" if peak is None else f", {peak:.1f} GiB at most"
            what = f"training, {dtype}, {count} × {length} tokens"
            yield Line(what, f"{rate:,.0f} tokens/s, MFU {', '.join(shares)}{memory}")
            del trainer, batch
            cuda_only.free(place.device)


def generation(place: Place) -> Iterator[Line]:
    """Tokens a second of the embedded engine, prompts of 64 tokens included, all of one length."""
    new = place.of(256, 8)
    sizes = (2,) if place.quick else (1, 32, 128, 512)
    for dtype in DTYPES:
        settings = EmbeddedEngineConfig(kv_cache_gib=0.05 if place.quick else 16.0, max_running=max(sizes))
        core = EngineCore(place.model, settings, DTYPES[dtype], place.device, WeightVersion(0))
        gconfig = GenerationConfig(max_new_tokens=new, min_new_tokens=new)
        number = 0
        for count in sizes:

            def generate(count: int = count, core: EngineCore = core, gconfig: GenerationConfig = gconfig) -> None:
                nonlocal number
                for prompt in place.prompts([64] * count, seed=number):
                    number += 1
                    core.add(number, LLMRequest(prompt, gconfig, NoiseKey(number)))
                while core.has_work:
                    core.step()

            seconds = place.seconds(generate, place.of(3, 1))
            yield Line(f"generation, {dtype}, {count} at once", f"{count * new / seconds:,.0f} tokens/s")
        del core
        cuda_only.free(place.device)


def beside_vllm(place: Place) -> Iterator[Line]:
    """The same by vLLM alone on the device, if it is installed."""
    if place.vllm_python is None:
        yield Line("generation by vLLM, bf16", "not run: vLLM is not installed (--vllm-python)")
        return
    sizes = (2,) if place.quick else (1, 32, 128, 512)
    new = place.of(256, 8)
    command = [place.vllm_python, str(BESIDE), str(place.model), "bfloat16", str(new), *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    for size, rate in json.loads(done.stdout.strip().splitlines()[-1]).items():
        yield Line(f"generation by vLLM, bf16, {size} at once", f"{rate:,.0f} tokens/s")


def memory(place: Place) -> Iterator[Line]:
    """The most that tensors take while an engine generates beside a trainer, and while that trains; `updates` says it of a
    delivery."""
    trainer = place.trainer("bf16")
    settings = EmbeddedEngineConfig(kv_cache_gib=0.05 if place.quick else 8.0, max_running=64)
    core = EngineCore(place.model, settings, DTYPES["bf16"], place.device, WeightVersion(0))
    new, count, length = place.of(256, 8), place.of(64, 2), place.of(1024, 32)
    gconfig = GenerationConfig(max_new_tokens=new, min_new_tokens=new)

    def generate() -> None:
        for number, prompt in enumerate(place.prompts([64] * count, seed=7)):
            core.add(number, LLMRequest(prompt, gconfig, NoiseKey(number)))
        while core.has_work:
            core.step()

    batch = batch_of(place, place.prompts([length] * count, seed=8))
    phases = {"generate": generate, "train": lambda: trainer.train_batch(batch, nll)}
    for name, phase in phases.items():
        phase()
        cuda_only.peak_gib(place.device)
        phase()
        peak = cuda_only.peak_gib(place.device)
        yield Line(
            f"memory, {name}, engine beside trainer", "not known on a CPU" if peak is None else f"{peak:.2f} GiB at most"
        )


def updates(place: Place) -> Iterator[Line]:
    """Times an update of the weights while requests run."""
    running = place.of(64, 2)
    trainer = place.trainer("bf16")
    for placement in ("colocate", "decoupled"):
        rollout = RolloutConfig(
            dtype="bfloat16", engine=EmbeddedEngineConfig(kv_cache_gib=0.05 if place.quick else 8.0, max_running=64)
        )
        engine = build_inference_engine(
            rollout, folder=place.model, placement=placement, threads=1, device=place.device, deterministic=False
        )
        publisher = WeightPublisher(trainer, engine, run="gpu-check", dtype=torch.bfloat16)
        cuda_only.peak_gib(place.device)
        try:
            rows = asyncio.run(published(engine, publisher, place, running, place.of(5, 1)))
        finally:
            publisher.close()
            engine.close()
        peak = cuda_only.peak_gib(place.device)
        memory = "" if peak is None else f"; {peak:.2f} GiB at most"
        names = ("prepare_s", "pause_s", "recompute_s", "update_weights_s")
        told = ", ".join(f"{name} {statistics.median(row[name] for row in rows) * 1e3:.1f} ms" for name in names)
        yield Line(f"an update, {placement}, {running} running, {rows[0]['bytes'] / 1e6:.0f} MB", told + memory)


async def published(
    engine: InferenceEngine, publisher: WeightPublisher, place: Place, running: int, count: int
) -> list[dict[str, float]]:
    """Reports of ``count`` updates among running requests, after one for warmth."""
    gconfig = GenerationConfig(max_new_tokens=place.of(4096, 256), min_new_tokens=place.of(4096, 256))
    requests = [LLMRequest(p, gconfig, NoiseKey(0, sample=i)) for i, p in enumerate(place.prompts([64] * running, seed=5))]
    tasks = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
    rows = []
    for _ in range(count + 1):
        before = engine.statistics()["generated_tokens"]
        for _ in range(2000):  # at most 100 s for a few tokens of each
            if engine.statistics()["generated_tokens"] >= before + 2 * running or all(task.done() for task in tasks):
                break
            await asyncio.sleep(0.05)
        rows.append(await asyncio.to_thread(publisher.publish))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return rows[1:]
