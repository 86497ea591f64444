"""A machine as the plan sees it: how much memory it has, and what a process takes of it before it holds a model."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tandem.api.lazy_torch import torch
from tandem.config.cores import usable_cores
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
