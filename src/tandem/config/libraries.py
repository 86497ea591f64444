"""Settings that torch and the libraries below it read from the environment, once.

`import tandem` sets it, so every process of a run has it, unless the user did. How threads wait and how memory
of GPUs grows is read when torch is imported, so `import tandem` comes before `import torch`; the sizes of caches are read at
the first computation.
"""

import os
import sys
from collections.abc import Container, MutableMapping
from typing import NamedTuple


class Setting(NamedTuple):
    """A variable, and the other variables with which a user may have decided the same."""

    value: str
    also: tuple[str, ...] = ()


WAITING = {"GOMP_SPINCOUNT": Setting("10000", also=("OMP_WAIT_POLICY",))}
"""A thread of OpenMP looks this often whether the others are done before it sleeps. The library's own 300,000 (3 ms) is a
whole time slice: where another process has the core of one thread, all others use up theirs with looking."""

CACHES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": Setting("64", also=("DNNL_PRIMITIVE_CACHE_CAPACITY",)),
    "LRU_CACHE_CAPACITY": Setting("64"),
}
"""The numbers of compiled matrix products that oneDNN and, in each thread, torch's layer above it keep. One is compiled
for each shape, takes about 0.5 MiB and lies between the tensors of a step in the heap; micro-batches and prompts have ever
new lengths. Their own 1,024 hold more than a step uses again."""

MEMORY = {
    "PYTORCH_ALLOC_CONF": Setting("expandable_segments:True", also=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"))
}
"""Torch's blocks on a GPU grow in place. Otherwise micro-batches of ever new lengths leave holes that the
next one does not fit into, until memory runs out. vLLM cannot sleep with this setting, so servers do not get it
(`of_others`)."""

SETTINGS = WAITING | CACHES | MEMORY

torch_came_first = False
"""True if torch was imported before `set_up` chose how threads wait, so that the choice has no effect."""


def set_up(environment: MutableMapping[str, str] = os.environ, modules: Container[str] = sys.modules) -> None:
    """Sets what the user has not."""
    global torch_came_first
    for name, setting in SETTINGS.items():
        if not any(other in environment for other in (name, *setting.also)):
            environment[name] = setting.value
            torch_came_first |= name in WAITING and "torch" in modules


def of_others(environment: MutableMapping[str, str]) -> dict[str, str]:
    """The environment for a program that is not ours: without what `set_up` has set."""
    return {name: value for name, value in environment.items() if name not in SETTINGS or SETTINGS[name].value != value}
