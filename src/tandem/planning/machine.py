"""A machine as the plan sees it, here or from the table of devices: how much memory it has, and what a process takes of it
before it holds a model."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tandem.api.lazy_torch import torch
from tandem.config.cores import usable_cores
from tandem.config.errors import ConfigError, nearest_names
from tandem.models.precision import fast_bfloat16
from tandem.state.machine import machine as described

CONTEXT_GIB, SLACK = 0.6, 0.2
"""A CUDA context with its libraries, and the caching allocator's holes, see `Machine.slack`. Assumed."""

PROCESS_GIB, WORKER_GIB = 0.57, 0.06
"""Resident memory of processes on a CPU, measured once with torch 2.13: a trainer or engine (0.44 GiB after the first step
of a tiny model, and what its heap keeps of freed memory in a run), and a reward worker."""


@dataclass(frozen=True)
class Machine:
    """One kind of device, ``count`` of them."""

    name: str
    kind: Literal["cpu", "gpu"]
    memory_gib: float
    """Memory of one device; on a CPU the memory that all processes share."""

    count: int = 1
    """GPUs; 1 where it is a CPU, whose cores are ``threads``."""

    fast_bfloat16: bool = True
    process_gib: float = 0.0
    """Memory of one process before it holds a model: interpreter and libraries; on a GPU its context there."""

    worker_gib: float = 0.0
    """Host memory of one reward worker."""

    slack: float = 0.0
    """Holes between what comes and goes in turns, as a share of it: a GPU's allocator takes them on top. Assumed."""

    threads: int = 1
    sources: tuple[str, ...] = ()
    """The sources of the figures."""


def gpus(name: str, memory_gib: float, count: int, sources: tuple[str, ...] = ()) -> Machine:
    """GPUs of which the memory is known."""
    return Machine(name, "gpu", memory_gib, count, process_gib=CONTEXT_GIB, slack=SLACK, threads=16 * count, sources=sources)


def this_machine(*, device: str = "auto", threads: int | None = None) -> Machine:
    """The machine that this process is on. ``device`` and ``threads`` are the run's."""
    if device != "cpu" and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
        return gpus(f"{name} × {count}", memory, count, ("what torch reports",))
    cores = threads or usable_cores()
    return Machine(
        f"{described()['cpu'] or platform.machine()}, {cores} thread{'' if cores == 1 else 's'}",
        "cpu",
        host_memory() / 2**30,
        fast_bfloat16=fast_bfloat16(torch.device("cpu")),
        process_gib=PROCESS_GIB,
        worker_gib=WORKER_GIB,
        threads=cores,
        sources=("what the system reports; processes as measured once, see docs/planning.md",),
    )


def host_memory() -> int:
    """Bytes of memory that processes here may have: the machine's, or the container's limit."""
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


ACCELERATORS = "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md"
"""Peaks without sparsity of all but the consumer cards."""

UPGRADE = "https://github.com/stas00/ml-engineering/blob/master/insights/when-to-upgrade-gpus/README.md"
"""Memory of H200 and B200."""

LOCKWOOD = "https://glennklockwood.com/garden/processors/"
"""Memory of A100 and H100, after NVIDIA's data sheets."""

H100_SHEET = "https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html"
H100_HBM2E = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
"""The machines of its tables have 96 GB; their peak is not known, and taken as the others'."""

H200_MLPERF = (
    "https://github.com/mlcommons/inference_results_v4.1/blob/main/closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json"
)
L40S_SHEET = "https://www.mullet.se/product.html?product_id=355414"
RTX_4090 = "https://gist.github.com/mikasenghaas/d63ded03f1f0417b1677627119bacc0d"
RTX_FLOAT32 = "https://huggingface.co/datasets/ohdoking/gpu_spec"


@dataclass(frozen=True)
class Device:
    """A line of the table."""

    memory_gb: float
    """Memory that the vendor advertises, in GB: 80 for an 80-GB card. Only the page on planning shows it."""

    memory_gib: float
    """Memory that torch reports (`total_memory`) and plans are made with: the least that was seen, see docs/planning.md."""

    bfloat16_tflops: float
    """Dense peak with float32 accumulation, without sparsity: what a share of the peak (MFU) is a share of."""

    float32_tflops: float
    sources: tuple[str, ...]


DEVICES: dict[str, Device] = {
    "a100": Device(80, 79.1, 312, 19.5, (LOCKWOOD + "A100", ACCELERATORS)),
    "a100-40gb": Device(40, 39.4, 312, 19.5, (LOCKWOOD + "A100", ACCELERATORS)),
    "h100": Device(80, 79.1, 989, 67, (H100_SHEET, LOCKWOOD + "h100", ACCELERATORS)),
    "h100-hbm2e": Device(96, 94.9, 989, 67, (H100_HBM2E, H100_SHEET, ACCELERATORS)),
    "h200": Device(141, 139.7, 989, 67, (UPGRADE, H200_MLPERF, ACCELERATORS)),
    "b200": Device(180, 178.3, 2250, 80, (UPGRADE,)),
    "l40s": Device(48, 44.3, 362, 91.6, (L40S_SHEET, ACCELERATORS)),
    "rtx4090": Device(24, 23.5, 165.2, 82.6, (RTX_4090, RTX_FLOAT32)),
}
"""Name → figures. The peaks of the data sheets are halved where they are given with sparsity."""


def device(name: str, count: int = 1) -> Machine:
    """``count`` devices of the table in one machine.

    Raises:
        ConfigError: no such device; tells the nearest name.
    """
    key = name.lower().replace(" ", "").replace("_", "-").removeprefix("nvidia-")
    if key not in DEVICES:
        raise ConfigError(
            f"--device {name} is not in the table; {nearest_names(key, DEVICES)}. Leave it out for this machine"
        )
    row = DEVICES[key]
    return gpus(f"{key} × {count}", row.memory_gib, count, row.sources)
