"""The GPUs that processes really get: the map of ranks and servers, and what a process with its environment sees."""

import os
import subprocess
import sys
from collections.abc import Iterator

import torch

from scripts.gpu_check import cuda_only
from scripts.gpu_check.place import Line, Place
from tandem.config.devices import DeviceMap, Seat, devices_of, visible
from tandem.config.rollout import RolloutConfig

NAMED = 'import os; print(os.environ["CUDA_VISIBLE_DEVICES"])'
SEEN = f"""
{NAMED}
import torch
for i in range(torch.cuda.device_count()):
    torch.ones(1, device=f"cuda:{{i}}")
    print(torch.cuda.get_device_properties(i).uuid)
"""
"""The GPUs that a server sees, by the names of the driver; each GPU is really used once."""


def maps(count: int) -> Iterator[tuple[str, DeviceMap]]:
    """The maps to try on so many GPUs: a server beside training, servers behind it, and one over two GPUs."""
    yield "vllm:d1, colocate, 1 rank", devices_of(RolloutConfig(backend="vllm:d1"), "colocate", ranks=1, devices=count)
    if count > 1:
        backend = f"tandem:d{count - 1}"
        yield (
            f"{backend}, decoupled, 1 rank",
            devices_of(RolloutConfig(backend=backend), "decoupled", ranks=1, devices=count),
        )
        pairs = f"vllm:d{count // 2}t2"
        yield (
            f"{pairs}, colocate, {count} ranks",
            devices_of(RolloutConfig(backend=pairs), "colocate", ranks=count, devices=count),
        )


def seen(seat: Seat, script: str) -> tuple[str, list[str]]:
    """``CUDA_VISIBLE_DEVICES`` in a process that is started as a server on this seat, and the GPUs that torch has there."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible(seat.devices, os.environ)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    named, *uuids = done.stdout.split()
    return named, uuids


def each_on_its_own(place: Place) -> Iterator[Line]:
    """Every server of some maps sees the GPUs of its seat and no other. On a CPU the map of two GPUs is pretended, and only
    the environment is compared."""
    here = cuda_only.uuids(place.device)
    for name, found in maps(len(here) or 2):
        wrong = []
        for seat in found.servers:
            named, uuids = seen(seat, SEEN if here else NAMED)
            expected = [here[device] for device in seat.devices] if here else []
            if named != visible(seat.devices, os.environ) or (here and uuids != expected):
                wrong.append(f"{seat.name} sees {named} {' '.join(uuids)}")
        what = f"{name}: servers on GPUs {', '.join('+'.join(map(str, seat.devices)) for seat in found.servers)}"
        yield Line(what, "; ".join(wrong) or "as the map says", "as the map says", not wrong)


def ranks_meet(place: Place) -> Iterator[Line]:
    """All GPUs of the machine add up one number by NCCL; on a CPU two processes by gloo."""
    here = cuda_only.uuids(place.device)
    count = len(here) or 2
    if len(here) == 1:
        yield Line("ranks meet over NCCL", "not run: there is one GPU")
        return
    torch.multiprocessing.start_processes(
        _rank,
        (count, bool(here), str(place.scratch / "meeting")),
        nprocs=count,
        start_method="spawn" if here else "fork",  # a process that has used CUDA cannot fork
    )
    yield Line(f"{count} ranks meet over {'NCCL' if here else 'gloo'}", "the sum is right", "the sum is right", True)


def _rank(rank: int, count: int, on_gpu: bool, meeting: str) -> None:
    """Raises where the sum is wrong, and the parent with it."""
    device = cuda_only.take(rank) if on_gpu else "cpu"
    torch.distributed.init_process_group(
        cuda_only.NCCL if on_gpu else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count
    )
    number = torch.full((1024,), rank + 1.0, device=device)
    torch.distributed.all_reduce(number)
    assert number.tolist() == [count * (count + 1) / 2] * 1024
    torch.distributed.destroy_process_group()
