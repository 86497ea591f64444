"""The rates of this machine, measured once in about half a minute and kept in the user's cache folder.

Measured with the functions that a run calls: `linear`, the engine's packed products and its attention, fused attention
forward and backward, a transformers norm and gate, a softmax over a vocabulary, passes over tensors that no cache holds,
SHA-256.
"""

import functools
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tandem.config.cores import usable_cores
from tandem.config.errors import TandemError
from tandem.engines.inference.attention import Kernel
from tandem.engines.inference.fused_weights import Linear, compute_dtype
from tandem.engines.inference.kernels import kernels
from tandem.engines.inference.kv_cache import KVCache
from tandem.engines.inference.row_attention import RowAttention, attends
from tandem.engines.train.asleep import READERS, keyed_sum, memory_of
from tandem.models.allocator import mapped_blocks
from tandem.models.catalog import cache_folder
from tandem.models.precision import fast_bfloat16, resolve_dtype
from tandem.models.shape import Dtype
from tandem.models.stored import read_whole
from tandem.planning.contention import Contention
from tandem.planning.devices import CONTEXT_GIB, SLACK
from tandem.planning.engine_step import LAYERS, decode_step
from tandem.planning.layers import decode_operations
from tandem.planning.link import between_processes
from tandem.planning.machine import Machine
from tandem.planning.threads import of_one_process
from tandem.state.machine import machine as described

ROWS = (1, 4, 16, 64, 256, 1024)
WIDTH = 1024
"""In and out of the measured products."""

LONG_ENOUGH_S = 0.12
"""Time of one measurement; its calls are repeated until then."""

HEAP_GIB, ENGINE_HEAP_GIB = 0.18, 0.28
"""Defaults of `Machine` on a CPU, where freed memory stays in the heap (`tandem.models.allocator`). From five runs on one
machine; benchmarks/plan.py fits them."""

MAX_TAKEN = 0.1
"""A calibration during which other processes took more of the time that its threads wanted is of no use."""

PROCESS = """
import tempfile
import torch, tandem.trainers.rl, tandem.trainers.sft, tandem.trainers.preference, tandem.tracking.plots
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.zeros(1, 256, dtype=torch.long)).logits.log_softmax(-1).sum().backward()
    optimizer.step()
"""
"""A trainer with next to no model, after its first step, for which torch's compiler and the model's code are loaded."""

DEEPSPEED = f"{PROCESS}\nimport deepspeed"
WORKER = "import tandem.rewards.worker, tandem.rewards.equality"
RESIDENT = "\nimport psutil; print(psutil.Process().memory_info().rss)"


class MachineBusy(TandemError):
    """Other processes computed while this machine was measured."""

    may_pass = True


def this_machine(
    *, device: str = "auto", threads: int | None = None, again: bool = False, max_taken: float = MAX_TAKEN
) -> Machine:
    """This machine, from the cache where it was measured before with the same processor, memory, threads and torch;
    ``again`` measures anew. ``device`` and ``threads`` are the run's.

    Raises:
        MachineBusy: while it was measured, other processes took more than ``max_taken`` of the time that its threads wanted.
            Nothing is kept then.
    """
    where = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    cores = threads or usable_cores()
    identity = _identity(where, cores)
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    file = cache_folder() / "plan" / f"{name}.json"
    found = None if again else read(file, identity)
    if found is not None:
        return found
    print("Measuring this machine once, about half a minute …", file=sys.stderr, flush=True)
    watch = Contention(cores)
    measured = measure(where, cores, identity)
    keep_undisturbed(file, measured, taken=watch.share(), max_taken=max_taken)
    return measured


def keep_undisturbed(file: Path, machine: Machine, *, taken: float, max_taken: float = MAX_TAKEN) -> None:
    """Keeps a calibration, during which others took this part of the time.

    Raises:
        MachineBusy: it is more than ``max_taken``.
    """
    if taken > max_taken:
        raise MachineBusy(
            f"this machine is busy: while it was measured, other processes took {taken:.0%} of the time that its threads "
            f"wanted (at most {max_taken:.0%} may be). Times planned from such figures would be wrong, so they are used for "
            "nothing and not kept. End what runs beside it, or wait, and give the same command again"
        )
    try:
        write(file, machine)
    except OSError as error:
        print(f"The measurement is not kept ({error}): set TANDEM_CACHE to a folder that can be written", file=sys.stderr)


def _identity(where: str, threads: int) -> dict[str, Any]:
    """The facts that the rates depend on."""
    return {
        **described(),
        "device": where,
        "threads": threads,
        "torch": torch.__version__,
        "kernels": [str(one) for one in (torch.bfloat16, torch.float32) if where == "cpu" and kernels(one) is not None],
        "measures": 8,  # counts up when what is measured changes
    }


def read(file: Path, identity: Mapping[str, Any]) -> Machine | None:
    """A kept calibration; None where there is none, it is damaged, or was made elsewhere."""
    try:
        found = Machine.from_json(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if dict(found.identity) == dict(identity) else None


def write(file: Path, machine: Machine) -> None:
    """Keeps it under its final name once it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(machine.to_json(), indent=1))
    partial.rename(file)


def kept_file(machine: Machine) -> Path:
    """The file in which `this_machine` keeps this calibration."""
    name = hashlib.sha256(json.dumps(dict(machine.identity), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "plan" / f"{name}.json"


def measure(where: str, threads: int, identity: Mapping[str, Any]) -> Machine:
    """All rates of one device, with so many threads where it is a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = _measured(torch.device(where), threads, identity)
    finally:
        torch.set_num_threads(before)
    return replace(found, sources=(f"measured on {time.strftime('%Y-%m-%d', time.gmtime())}, torch {torch.__version__}",))


def _measured(device: torch.device, threads: int, identity: Mapping[str, Any]) -> Machine:
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    plain: dict[Dtype, Table] = {}
    packed = dict(plain)
    for dtype in dtypes:
        plain[dtype], packed[dtype] = _products(resolve_dtype(dtype, device), device)
    fast = fast_bfloat16(device)
    usual = torch.bfloat16 if fast else torch.float32
    cuda = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else host_memory()
    return Machine(
        name=_name(identity, threads, cuda=cuda),
        kind="gpu" if cuda else "cpu",
        count=torch.cuda.device_count() if cuda else 1,
        memory_gib=memory / 2**30,
        fast_bfloat16=fast,
        matmul=plain,
        packed_matmul=packed,
        attention={dtype: _attention(resolve_dtype(dtype, device), device) for dtype in dtypes},
        decode_attention={dtype: _decode_attention(resolve_dtype(dtype, device), device) for dtype in dtypes},
        elementwise=_elementwise(usual, device),
        stream=_stream(device),
        softmax=_softmax(device),
        operation_s=_operation(device),
        engine_operation_s=decode_step(device) / decode_operations(LAYERS, shared=True),
        digest=_digest(),
        waking=math.inf if cuda else waking(),
        link=between_processes() if not cuda else 20e9 if torch.cuda.device_count() > 1 else math.inf,
        host_link=_host_link(device) if cuda else math.inf,
        host_stream=_stream(torch.device("cpu")) if cuda else math.inf,
        process_gib=CONTEXT_GIB if cuda else _resident(PROCESS),
        worker_gib=_resident(WORKER),
        slack=SLACK if cuda else 0.0,
        heap_gib=0.0 if cuda else HEAP_GIB,
        engine_heap_gib=0.0 if cuda else ENGINE_HEAP_GIB,
        deepspeed_gib=0.0 if cuda or find_spec("deepspeed") is None else max(0.0, _resident(DEEPSPEED) - _resident(PROCESS)),
        threads=threads,
        threading=1.0 if cuda else of_one_process(threads),
        overlaps=cuda,
        identity=identity,
    )


def _name(identity: Mapping[str, Any], threads: int, *, cuda: bool) -> str:
    if cuda:
        return f"{torch.cuda.get_device_name()} × {torch.cuda.device_count()}"
    return f"{identity['cpu']}, {threads} thread{'' if threads == 1 else 's'}"


def host_memory() -> int:
    """Bytes of memory that processes here may have: the machine's, or the container's limit."""
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Least time of a call, after one that warms up: what disturbs a call makes it longer and never shorter."""
    call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < LONG_ENOUGH_S:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def _random(*shape: int, dtype: torch.dtype, device: torch.device, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


Table = tuple[tuple[int, float], ...]


def _products(dtype: torch.dtype, device: torch.device) -> tuple[Table, Table]:
    """Rates of plain products, and of the engine's packed ones, which it makes in a dtype that the device is fast in."""
    weight = _random(WIDTH, WIDTH, dtype=dtype, device=device)
    laid_out = (
        Linear(weight) if compute_dtype(dtype, device) == dtype else functools.partial(functional.linear, weight=weight)
    )
    plain, packed = [], []
    with torch.inference_mode():
        for rows in ROWS:
            x = _random(rows, WIDTH, dtype=dtype, device=device)
            work = 2.0 * rows * WIDTH * WIDTH
            plain.append((rows, work / seconds_of(lambda x=x: functional.linear(x, weight), device)))
            packed.append((rows, work / seconds_of(lambda x=x: laid_out(x), device)))
    return tuple(plain), tuple(packed)


def _attention(dtype: torch.dtype, device: torch.device, length: int = 512, heads: int = 8, dim: int = 64) -> float:
    """FLOP/s of causal attention with grouped queries, forward and backward."""
    q = _random(1, heads, length, dim, dtype=dtype, device=device, grad=True)
    k, v = (_random(1, heads // 2, length, dim, dtype=dtype, device=device, grad=True) for _ in range(2))

    def call() -> None:
        functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()

    return 3.5 * 4 * (length * length / 2) * heads * dim / seconds_of(call, device)


def _decode_attention(dtype: torch.dtype, device: torch.device, rows: int = 32, length: int = 128) -> float:
    """Bytes/s of keys and values under the engine's attention of one new token a row, by the path that the engine takes."""
    kernel = Kernel(heads=8, kv_heads=4, head_dim=64, scale=0.125, softcap=None, dtype=dtype, device=device)
    compiled = kernels(dtype) if attends(kernel) else None
    if compiled is not None:
        cache = KVCache(1, 4, 64, dtype, device, 0.1)
        own = [cache.allocate("whole", cache.capacity_for(length)) for _ in range(rows)]
        own[0].slab.keys[0].normal_()
        own[0].slab.values[0].normal_()
        qkv, positions = _random(rows, 16 * 64, dtype=dtype, device=device), torch.full((rows,), length - 1)
        attend = RowAttention(compiled, kernel, own, [length] * rows, [None] * rows, [0] * rows)
        with torch.inference_mode():
            spent = seconds_of(lambda: attend(0, None, qkv, positions, None, None), device)
        return 2 * rows * 4 * length * 64 * dtype.itemsize / spent
    queries = _random(rows, 4, 2, 64, dtype=dtype, device=device)
    keys, values = (_random(rows, 4, length, 64, dtype=dtype, device=device) for _ in range(2))
    mask = torch.zeros(rows, 1, 1, length, dtype=dtype, device=device)
    with torch.inference_mode():
        spent = seconds_of(lambda: kernel.attend(queries, keys, values, mask), device)
    return 2 * keys.nbytes / spent


def _elementwise(dtype: torch.dtype, device: torch.device, tokens: int = 1024, width: int = 512) -> float:
    """Bytes/s of a norm and a gate, forward and backward, counted as `elementwise_bytes` counts them."""
    norm = LlamaRMSNorm(width).to(device, dtype)
    x = _random(tokens, width, dtype=dtype, device=device, grad=True)
    gate, up = (_random(tokens, 3 * width, dtype=dtype, device=device, grad=True) for _ in range(2))

    def call() -> None:
        (norm(x).sum() + (functional.silu(gate) * up).sum()).backward()

    passes = (28 if dtype == torch.float32 else 36) * width + 5 * dtype.itemsize * 3 * width
    return 3.0 * passes * tokens / seconds_of(call, device)


def _stream(device: torch.device) -> float:
    """Bytes/s of adding one tensor to another, 64 MiB each."""
    a, b = (torch.zeros(16 << 20, device=device) for _ in range(2))
    return 3.0 * a.nbytes / seconds_of(lambda: a.add_(b), device)


def _softmax(device: torch.device) -> float:
    logits = torch.randn(256, 32768, device=device)
    return logits.numel() / seconds_of(lambda: torch.log_softmax(logits, -1), device)


def _operation(device: torch.device) -> float:
    """Seconds of one of the seven operations of a norm of a single short row."""
    norm, x = LlamaRMSNorm(8).to(device), torch.ones(1, 8, device=device)
    with torch.no_grad():
        return seconds_of(lambda: [norm(x) for _ in range(20)], device) / 140


def _digest() -> float:
    data = bytes(16 << 20)
    return len(data) / seconds_of(lambda: hashlib.sha256(data).digest(), torch.device("cpu"))


def waking(size: int = 4 << 20, count: int = 32) -> float:
    """Bytes/s of tensors that wake and sleep as those of an engine do (`tandem.engines.train.asleep`)."""
    storages = [torch.empty(0, dtype=torch.uint8).untyped_storage() for _ in range(count)]
    with tempfile.TemporaryFile() as file:
        file.write(bytes(size * count))
        file.flush()

        def read(number: int) -> torch.Tensor:
            storages[number].resize_(size)
            flat = torch.empty(0, dtype=torch.uint8).set_(storages[number])
            read_whole(file, memory_of(flat), number * size)
            return flat

        def call() -> None:
            with mapped_blocks(), ThreadPoolExecutor(READERS) as reader:
                for pending in [reader.submit(read, number) for number in range(count)]:
                    keyed_sum(pending.result())
            for storage in storages:
                storage.resize_(0)

        return size * count / seconds_of(call, torch.device("cpu"))


def _host_link(device: torch.device) -> float:
    there = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    return there.nbytes / seconds_of(lambda: there.to("cpu"), device)


def _resident(script: str) -> float:
    """GiB that a fresh interpreter holds after these lines."""
    command = [sys.executable, "-c", script + RESIDENT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return int(done.stdout.split()[-1]) / 2**30  # DeepSpeed says things first
