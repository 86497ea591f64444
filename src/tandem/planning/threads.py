"""The gain of a second thread of one process, against a second process: threads wait for each other after each operation."""

import subprocess
import sys
from contextlib import ExitStack

TIMEOUT_S = 120.0

SCRIPT = """
import sys, time
import torch
from torch import nn
torch.set_num_threads(int(sys.argv[1]))
layers = nn.ModuleList(
    nn.Sequential(nn.LayerNorm(384), nn.Linear(384, 1024), nn.SiLU(), nn.Linear(1024, 384)) for _ in range(4)
)
x = torch.randn(512, 384)
def step():
    y = x
    for layer in layers:
        y = y + layer(y)
    y.square().mean().backward()
for _ in range(5):
    step()
print("ready", flush=True)
sys.stdin.readline()
began, count = time.perf_counter(), 0
while time.perf_counter() - began < 3:
    step()
    count += 1
print(count / (time.perf_counter() - began), flush=True)
"""
"""Layers of the size of a small model's, forward and backward, for three seconds; steps a second."""


def of_one_process(threads: int) -> float:
    """Speed of one process with all threads, as a share of that of as many processes with a thread each, at once; at most 1.

    Raises:
        subprocess.SubprocessError: they end with an error, or take longer than `TIMEOUT_S`.
    """
    if threads == 1:
        return 1.0
    return min(1.0, _steps_per_s(1, threads) / _steps_per_s(threads, 1))


def _steps_per_s(processes: int, threads: int) -> float:
    """Steps a second of all processes together."""
    with ExitStack() as stack:
        command = [sys.executable, "-c", SCRIPT, str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running = []
        for _ in range(processes):
            one = stack.enter_context(subprocess.Popen(command, **pipes))
            stack.callback(one.kill)
            running.append(one)
        for one in running:
            if one.stdout.readline() != "ready\n":
                raise subprocess.SubprocessError("a process that was to be timed ended before it began")
        for one in running:
            one.stdin.write("\n")
            one.stdin.flush()
        return sum(float(one.communicate(timeout=TIMEOUT_S)[0]) for one in running)
