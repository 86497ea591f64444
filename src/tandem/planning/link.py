"""The rate at which two processes of this machine exchange tensors over gloo, as ranks on a CPU do."""

import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_S = 120.0

SCRIPT = """
import datetime, os, sys, time
import torch, torch.distributed as dist
from tandem.models.allocator import keep_freed_memory
torch.set_num_threads(1)
keep_freed_memory()  # as ranks do: else each copy that gloo makes is mapped anew
child = os.fork()
rank = 1 if child == 0 else 0
try:
    meet = {"init_method": "file://" + sys.argv[1], "timeout": datetime.timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **meet)
    part, whole = torch.ones(1 << 21), torch.ones(1 << 22)
    def spent(call):
        call()
        times = []
        for _ in range(15):
            dist.barrier()
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return min(times)
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # newer torch warns of the second
    gather = spent(lambda: all_gather(whole, part))
    reduce = spent(lambda: dist.reduce_scatter_tensor(part, whole))
    dist.destroy_process_group()
finally:
    if rank == 1:
        os._exit(0)
os.waitpid(child, 0)
print(2 * part.nbytes / (gather + reduce))
"""
"""Both processes gather, and reduce to parts, 16 MiB: each receives a half of it."""


def between_processes() -> float:
    """Bytes/s that one of two ranks receives, over both collectives.

    Raises:
        subprocess.SubprocessError: they do not find each other, or take longer than `TIMEOUT_S`.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", SCRIPT, str(Path(folder) / "meeting")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return float(done.stdout)
