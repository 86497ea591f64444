"""The machine for which a plan is made, this one or one from the table of devices: its memory, and the memory that a process
uses before it loads a model."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from tandem.api.lazy_torch import torch
from tandem.config.devices import usable_cores
from tandem.config.errors import ConfigError, nearest_names
from tandem.models.hardware import Hardware, fast_bfloat16
from tandem.state.machine import GIB
from tandem.state.machine import machine as described

CONTEXT_GIB, SLACK = 0.6, 0.2
"""Assumed GiB of a CUDA context with its libraries; assumed share of memory lost to fragmentation, see `Machine.slack`."""

PROCESS_GIB, WORKER_GIB = 0.57, 0.06
"""Resident GiB of processes on a CPU, measured once with torch 2.13: of a trainer or engine (0.44 GiB after the first step
of a tiny model, and freed memory that the heap keeps during a run), and of a reward worker."""


@dataclass(frozen=True, kw_only=True)
class Machine(Hardware):
    """``count`` devices of one kind."""

    name: str
    count: int = 1
    """Number of GPUs; 1 for a CPU, whose number of cores is ``threads``."""

    process_gib: float = 0.0
    """GiB of one process before it loads a model: interpreter and libraries; on a GPU, its CUDA context."""

    worker_gib: float = 0.0
    """GiB of host memory of one reward worker."""

    slack: float = 0.0
    """GPU memory lost to fragmentation, as a share of the memory that a phase allocates and frees. An assumption."""

    threads: int = 1
    sources: tuple[str, ...] = ()
    """The sources of the figures."""

    @property
    def words(self) -> str:
        """The name of the machine, with the number of its GPUs."""
        return self.name if self.cpu else f"{self.name} × {self.count}"


def gpus(name: str, memory_gib: float, count: int, sources: tuple[str, ...] = ()) -> Machine:
    """Returns a machine with ``count`` GPUs of this memory."""
    taken = {"process_gib": CONTEXT_GIB, "slack": SLACK}
    return Machine(name=name, kind="gpu", memory_gib=memory_gib, count=count, threads=16 * count, sources=sources, **taken)


def this_machine(*, device: str = "auto", threads: int | None = None) -> Machine:
    """Returns the machine of this process, or of all machines with ranks of the run. ``device``: `auto`, `cpu`, `cuda`,
    or one GPU, as `choose_device` returns it; ``threads``: the run's."""
    if device != "cpu" and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties("cuda" if device == "auto" else device)
        machines = int(os.environ.get("WORLD_SIZE", 1)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        count = torch.cuda.device_count() * max(1, machines)
        return gpus(gpu.name, gpu.total_memory / GIB, count, ("what torch reports",))
    cores = threads or usable_cores()
    return Machine(
        name=f"{described()['cpu'] or platform.machine()}, {cores} thread{'' if cores == 1 else 's'}",
        kind="cpu",
        memory_gib=host_memory() / GIB,
        fast_bfloat16=fast_bfloat16("cpu"),
        process_gib=PROCESS_GIB,
        worker_gib=WORKER_GIB,
        threads=cores,
        sources=("what the system reports; processes as measured once, see docs/planning.md",),
    )


def host_memory() -> int:
    """Returns the bytes of memory that processes here may use: all of the machine's, or the container's limit."""
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


ACCELERATORS = "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md"
"""Source of the peaks without sparsity, except for consumer cards."""

UPGRADE = "https://github.com/stas00/ml-engineering/blob/master/insights/when-to-upgrade-gpus/README.md"
"""Source of the memory of H200 and B200."""

LOCKWOOD = "https://glennklockwood.com/garden/processors/"
"""Source of the memory of A100 and H100, which quotes NVIDIA's data sheets."""

H100_SHEET = "https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html"
H100_HBM2E = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
"""The machines in its tables have 96 GB. Their peak is unknown; the plan assumes that of other H100s."""

H200_MLPERF = (
    "https://github.com/mlcommons/inference_results_v4.1/blob/main/closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json"
)
L40S_SHEET = "https://www.mullet.se/product.html?product_id=355414"
RTX_4090 = "https://gist.github.com/mikasenghaas/d63ded03f1f0417b1677627119bacc0d"
RTX_FLOAT32 = "https://huggingface.co/datasets/ohdoking/gpu_spec"


@dataclass(frozen=True)
class Device:
    """A row of the table of devices."""

    memory_gb: float
    """Memory that the vendor advertises, in GB: 80 for an 80-GB card. Only docs/planning.md shows it."""

    memory_gib: float
    """Memory that torch reports (`total_memory`), used for plans: the smallest value observed, see docs/planning.md."""

    bfloat16_tflops: float
    """Peak with float32 accumulation, without sparsity; the peak to which MFU refers."""

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
"""Name → device. A peak that the data sheet gives with sparsity is halved."""


def device(name: str, count: int = 1) -> Machine:
    """Returns a machine with ``count`` devices of this name in the table.

    Raises:
        ConfigError: the table has no such device; the message has the nearest name.
    """
    key = name.lower().replace(" ", "").replace("_", "-").removeprefix("nvidia-")
    if key not in DEVICES:
        raise ConfigError(
            f"--device {name} is not in the table; {nearest_names(key, DEVICES)}. Leave it out for this machine"
        )
    row = DEVICES[key]
    return gpus(key, row.memory_gib, count, row.sources)
