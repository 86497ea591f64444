"""A model of 1.5B parameters: its training as a share of what the device multiplies, its decoding, the pause for new
weights, and the memory that goes from one process to another."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from scripts.gpu_check import cuda_only
from scripts.gpu_check.equalities import batch_of, compared_answers, nll
from scripts.gpu_check.place import Line, Place
from tandem.api.engines import InferenceEngine
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.inference.core import EngineCore
from tandem.models.allocator import give_back
from tandem.models.architecture import Architecture
from tandem.planning.machine import DEVICES
from tandem.weights.publisher import WeightPublisher

BESIDE = Path(__file__).with_name("beside_vllm.py")
ROWS = 4
"""Sequences of a training step, each a micro-batch."""

MARGIN = 4 << 30
"""Bytes of a GPU that neither process can have: contexts, and the holes of blocks that are in use."""

TAKE = "import sys, torch; torch.zeros(int(sys.argv[2]), dtype=torch.uint8, device=sys.argv[1])"


def memory_is_handed_back(place: Place) -> Iterator[Line]:
    """After a step another process takes all memory that the trainer's tensors leave: before the trainer gives back what
    torch keeps, and after."""
    length = place.of(5120, 24)
    trainer = place.trainer("bf16", model=place.large, max_tokens=length)
    trainer.train_batch(batch_of(place, place.prompts([length] * 2)), nll)
    (held, total), tensors = cuda_only.reserved(place.device), cuda_only.allocated(place.device) or 0
    wanted = total - tensors - MARGIN if place.device != "cpu" else 1 << 20
    command = [sys.executable, "-c", TAKE, place.device, str(wanted)]

    def taken() -> bool:
        return subprocess.run(command, env=cuda_only.environment(), capture_output=True, timeout=60).returncode == 0

    size = f"{wanted / 2**30:.1f} GiB"
    yield Line(f"another process has {size} before", f"{taken()}; torch holds {held / 2**30:.1f} GiB")
    give_back()
    found, held = taken(), cuda_only.reserved(place.device)[0]
    yield Line(f"another process has {size} after", f"{found}; torch holds {held / 2**30:.1f} GiB", "True", found)


def training_short(place: Place) -> Iterator[Line]:
    """A step of four samples of 5k tokens."""
    yield _training(place, "training_short", place.of(5120, 24))


def training_long(place: Place) -> Iterator[Line]:
    """A step of four samples of 16k tokens, whose activations fit in no 80 GB unless most of them are computed again."""
    options = {"gradient_checkpointing": True, "selective_checkpointing": True}
    yield _training(place, "training_long", place.of(16384, 40), **options)


def training_compiled(place: Place) -> Iterator[Line]:
    """The short step, compiled. On a CPU it would wait long for a compiler."""
    if place.device == "cpu":
        yield Line("a compiled step", "run on a GPU only")
    else:
        yield _training(place, "training_compiled", place.of(5120, 24), compile=True)


def _training(place: Place, name: str, length: int, **options: Any) -> Line:
    """Tokens a second of an optimizer step, and the share of the peak that this is (MFU, arXiv:2204.02311 with causal
    attention): 6 FLOP a parameter and token, and 6 · layers · width · length of attention. Writes the top kernels."""
    size = place.of(8192, 256)
    a, b = (torch.randn(size, size, device=place.device).bfloat16() for _ in range(2))
    measured = 2.0 * size**3 / place.seconds(lambda: a @ b, place.of(20, 3))
    trainer = place.trainer("bf16", model=place.large, max_tokens=length, **options)
    batch = batch_of(place, place.prompts([length] * ROWS, seed=4))
    seconds = place.seconds(lambda: trainer.train_batch(batch, nll), place.of(3, 1))
    peak = cuda_only.peak(place.device)
    with torch.profiler.profile(activities=cuda_only.activities(place.device)) as profile:
        trainer.train_batch(batch, nll)
        cuda_only.synchronize(place.device)
    times = cuda_only.kernel_times(place.device, profile)
    whole = sum(microseconds for microseconds, _ in times.values())
    top = sorted(times.items(), key=lambda item: -item[1][0])[:20]
    told = [f"{us / whole:6.1%} {us / 1e3:9.2f} ms {calls:6} calls  {kernel[:160]}" for kernel, (us, calls) in top]
    (place.out / f"{name}.txt").write_text("\n".join(told) + "\n", encoding="utf-8")
    config = Architecture.from_config(AutoConfig.from_pretrained(place.large))
    parameters = sum(tensor.numel() for _, tensor in trainer.weights())
    rate = length * ROWS / seconds
    flops = rate * (6.0 * parameters + 6.0 * config.num_layers * config.num_heads * config.head_dim * length)
    gpu = cuda_only.described(place.device).get("gpu", "").lower()
    peaks = [row.bfloat16_tflops * 1e12 for name, row in DEVICES.items() if name in gpu]
    sheet = f", {flops / peaks[0]:.1%} of the data sheet's" if peaks else ""
    mfu = f"MFU {flops / measured:.1%} of a product's {measured / 1e12:.3g} TFLOP/s here{sheet}"
    most = ", ".join(f"{kernel[:40]} {us / whole:.0%}" for kernel, (us, _) in top[:5])
    what = f"a step of {ROWS} × {length} tokens, {parameters / 1e6:,.1f}M parameters"
    return Line(what, f"{rate:,.0f} tokens/s, {mfu}{peak}; most time: {most}")


def decode(place: Place) -> Iterator[Line]:
    """Time of a decode step with all rows at about one length, the bytes that it must read a second, and the error of the
    log-probabilities against transformers', in bfloat16 both."""
    rows, new = place.of(128, 3), place.of(48, 8)
    exact, rounded = (place.reference(dtype, place.large) for dtype in ("fp32", "bf16"))
    weights = sum(parameter.nbytes for parameter in rounded.parameters())
    config = Architecture.from_config(exact.config)
    per_token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    gconfig = GenerationConfig(max_new_tokens=new, min_new_tokens=new)
    for length in (300, 1500, 4200) if not place.quick else (12, 40):
        settings = EmbeddedEngineConfig(kv_cache_gib=0.05 if place.quick else 20.0, max_running=rows)
        core = EngineCore(place.large, settings, torch.bfloat16, place.device, WeightVersion(0))
        for number, prompt in enumerate(place.prompts([length] * rows, seed=9)):
            core.add(number, LLMRequest(prompt, gconfig, NoiseKey(3, sample=number)))
        times, answers, before = [], dict[int, LLMResponse](), core.statistics()
        while core.has_work:
            began = time.perf_counter()
            answers.update(core.step())  # it waits for the tokens of the step before, so a step's time is right
            seconds, after = time.perf_counter() - began, core.statistics()
            drawn, prefilled = (after[name] - before[name] for name in ("generated_tokens", "prefill_tokens"))
            if drawn == rows and not prefilled:
                times.append(seconds)
            before = after
        seconds = statistics.median(times)
        rate = (weights + per_token * rows * (length + new / 2)) / seconds / 1e9
        told = f"{seconds * 1e3:.2f} ms, {rows / seconds:,.0f} tokens/s, {rate:,.0f} GB/s of weights and keys"
        yield Line(f"a decode step, {rows} rows at {length} tokens", told + cuda_only.peak(place.device))
        del core
        cuda_only.free(place.device)
        first = [answers[number] for number in range(min(rows, 4))]
        yield compared_answers(f"engine = transformers at {length} tokens, bf16", "bf16", first, exact, rounded)


def beside_vllm(place: Place) -> Iterator[Line]:
    """The same by vLLM alone on the device, if it is installed."""
    if place.vllm_python is None:
        yield Line("decoding by vLLM", "not run: vLLM is not installed (--vllm-python)")
        return
    rows, lengths = place.of(128, 3), (300, 1500, 4200) if not place.quick else (12, 40)
    command = [place.vllm_python, str(BESIDE), str(place.large), str(rows), *map(str, lengths)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    for length, seconds in json.loads(done.stdout.strip().splitlines()[-1]).items():
        told = f"{seconds * 1e3:.2f} ms, {rows / seconds:,.0f} tokens/s"
        yield Line(f"a decode step by vLLM, {rows} rows at {length} tokens", told)


def updates(place: Place) -> Iterator[Line]:
    """Times an update of the weights while requests run."""
    running = place.of(64, 2)
    trainer = place.trainer("bf16", model=place.large)
    for placement in ("colocate",) if place.quick else ("colocate", "decoupled"):
        rollout = RolloutConfig(
            dtype="bfloat16", engine=EmbeddedEngineConfig(kv_cache_gib=0.05 if place.quick else 8.0, max_running=64)
        )
        engine = build_inference_engine(
            rollout, folder=place.large, placement=placement, threads=1, device=place.device, deterministic=False
        )
        publisher = WeightPublisher(trainer, engine, run="gpu-check", dtype=torch.bfloat16)
        cuda_only.peak(place.device)
        try:
            rows = asyncio.run(published(engine, publisher, place, running, place.of(5, 1)))
        finally:
            publisher.close()
            engine.close()
        names = [f"time/{part}_s" for part in ("prepare", "pause", "recompute", "update_weights")]
        told = ", ".join(f"{name} {statistics.median(row[name] for row in rows) * 1e3:.1f} ms" for name in names)
        what = f"an update, {placement}, {running} running, {rows[0]['weights/delivered_mib']:.0f} MiB"
        yield Line(what, told + cuda_only.peak(place.device))


async def published(
    engine: InferenceEngine, publisher: WeightPublisher, place: Place, running: int, count: int
) -> list[dict[str, float]]:
    """Reports of ``count`` updates among running requests, after one for warmth."""
    gconfig = GenerationConfig(max_new_tokens=place.of(4096, 128), min_new_tokens=place.of(4096, 128))
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
