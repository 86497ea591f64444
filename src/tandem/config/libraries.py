"""Environment variables that torch and its libraries read once, and Tandem's cache folder.

`import tandem` sets the variables in every process of a run, unless the user has set them. Torch reads those for waiting
threads and for GPU memory when it is imported, so `import tandem` must come before `import torch`. The sizes of caches are
read at the first computation.
"""

import os
import sys
from collections.abc import Container, MutableMapping
from pathlib import Path
from typing import NamedTuple


class Setting(NamedTuple):
    """The value of a variable, and the names of other variables by which a user may have made the same choice."""

    value: str
    also: tuple[str, ...] = ()


WAITING = {"GOMP_SPINCOUNT": Setting("10000", also=("OMP_WAIT_POLICY",))}
"""Number of times that an OpenMP thread checks for the others before it sleeps. The library's default of 300,000 (3 ms) is a
whole time slice: if another process occupies one thread's core, all other threads waste theirs by checking."""

CACHES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": Setting("64", also=("DNNL_PRIMITIVE_CACHE_CAPACITY",)),
    "LRU_CACHE_CAPACITY": Setting("64"),
}
"""Cache sizes of oneDNN and, in each thread, of torch's layer above it: the number of compiled matrix products. Each shape
is compiled once and takes about 0.5 MiB, between the tensors in the heap, and micro-batches and prompts have many different
lengths. The libraries' default of 1,024 keeps more than a step uses again."""

MEMORY = {
    "PYTORCH_ALLOC_CONF": Setting("expandable_segments:True", also=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"))
}
"""Lets torch's memory blocks on a GPU grow in place. Otherwise micro-batches of different lengths fragment the memory until
it runs out. vLLM cannot sleep with this setting, so servers do not get it (`of_others`)."""

SETTINGS = WAITING | CACHES | MEMORY

torch_came_first = False
"""True if torch was imported before `set_up` set `WAITING`, so that this setting has no effect."""


def set_up(environment: MutableMapping[str, str] = os.environ, modules: Container[str] = sys.modules) -> None:
    """Sets the variables that the user has not set."""
    global torch_came_first
    for name, setting in SETTINGS.items():
        if not any(other in environment for other in (name, *setting.also)):
            environment[name] = setting.value
            torch_came_first |= name in WAITING and "torch" in modules


def of_others(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Returns the environment for other programs, without the variables that `set_up` has set."""
    return {name: value for name, value in environment.items() if name not in SETTINGS or SETTINGS[name].value != value}


def cache_folder() -> Path:
    """Returns Tandem's cache folder: ``$TANDEM_CACHE``, else ``tandem`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(os.environ.get("TANDEM_CACHE") or f"{base}/tandem"))


def media_folder() -> Path:
    """Returns the folder of the media store: ``$TANDEM_MEDIA``, else ``media`` in the cache folder."""
    return Path(os.path.expanduser(os.environ.get("TANDEM_MEDIA") or cache_folder() / "media"))
