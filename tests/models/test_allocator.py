"""Freed memory is kept."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from tandem.models.allocator import keep_freed_memory
def step():
    a = torch.ones(8 << 20)  # 32 MiB
    return float((a + a)[0])
def faults():
    for _ in range(20):  # until the heap has found its shape
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), keep_freed_memory(), faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc's allocator can be told")
def test_steps_touch_no_fresh_pages_once_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    default, told, kept = done.stdout.split()
    if told == "False":
        pytest.skip("the allocator of this process is not glibc's")
    assert int(kept) < int(default) / 10


RUNS = """
import torch
from tandem.models.allocator import keep_freed_memory

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS:")).split()[1]) >> 10

def run(sizes):
    told = keep_freed_memory()
    at_start = resident()
    held = [torch.ones(size << 18) for size in sizes]  # MiB each
    small = torch.ones(1000)  # above them in the heap, so that its top is not free
    del held
    return told, at_start, resident(), small

told, first, kept, _a = run([8] * 40)
_, second, _, _b = run([9] * 40)
print(told, first, kept, second)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc's allocator can be told")
def test_a_run_begins_without_what_an_earlier_one_in_its_process_has_kept():
    done = subprocess.run([sys.executable, "-c", RUNS], capture_output=True, text=True, check=True, timeout=120)
    told, *sizes = done.stdout.split()
    if told == "False":
        pytest.skip("the allocator of this process is not glibc's")
    first, kept, second = map(int, sizes)
    assert kept > first + 300  # MiB: it was kept
    assert second < first + 30
