"""Memory that was freed is kept for the next step instead of being given back to the system.

Every step of training and decoding allocates the same large tensors. The C library's default maps each of them anew, and the
kernel clears every page again when it is first touched: 5 to 15 % of a step on two cores. What that costs is in
docs/planning.md. The exceptions are the weights of models that sleep (`mapped_blocks`), and large tensors of a run that
keeps to a limit (`return_freed_memory`).

Torch keeps what was freed on a GPU likewise. There it is in the way of other processes, such as a server on the same GPU: it
gets it before it needs it (`give_back`).
"""

import contextlib
import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from tandem.api.failures import NoRoom

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""glibc's numbers of the parameters of ``mallopt``."""

_ARENAS = 2
"""Heaps of the process. By default glibc gives each thread a heap of its own, up to eight a core, and what an engine's
thread has freed is of no use to the thread that trains."""

_USUAL = (1 << 30, 32 << 20)
"""An older glibc takes no threshold above 32 MiB; larger tensors are mapped anew there."""

_SMALL = 64 << 10
_KEPT_PAD, _LITTLE_PAD = 64 << 20, 1 << 20
"""Bytes that a heap takes from the system at a time, beyond what it needs."""

_lock = threading.Lock()
_open_blocks = 0  # of `mapped_blocks`
_returned: int | None = None
"""Blocks of so many bytes go back to the system; None: all are kept."""


def _function(name: str) -> Any:
    """A function of the C library; None where it is not glibc (macOS, musl, a preloaded one)."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def keep_freed_memory() -> bool:
    """Tells this process's C library; False where it is not glibc.

    What an earlier run of the process has left is given back first: several gigabytes, which the next one, of other sizes,
    could not use.
    """
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    give_back()
    with _lock:
        mallopt(_ARENA_MAX, _ARENAS)
        return bool(_choose(mallopt) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))


def return_freed_memory(limit: int | None) -> None:
    """For a run whose models sleep so that it keeps to ``limit`` bytes: blocks of a 256th of it and more are mapped by
    themselves from now on, so that their memory goes back to the system when they are freed. None: as before.

    Freed inside a heap they would leave holes that the next tensor need not fit into, and each thread has holes of its own:
    such a run took up to a quarter more than was planned. Smaller blocks stay, because clearing their pages again would
    cost a fifth of the training step.
    """
    global _returned
    mallopt = _function("mallopt")
    with _lock:
        before, _returned = _returned, None if limit is None else min(max(limit // 256, _SMALL), _USUAL[1])
        if _returned != before and mallopt is not None:
            _choose(mallopt)


def _choose(mallopt: Any) -> bool:
    """Sets from how many bytes on a block is mapped by itself, and in which pieces a heap grows."""
    kept = _USUAL if _returned is None else (_returned,)
    threshold = any(mallopt(_MMAP_THRESHOLD, most) for most in ((_SMALL,) if _open_blocks else kept))
    return bool(threshold and mallopt(_TOP_PAD, _KEPT_PAD if _returned is None else _LITTLE_PAD))


def trim_heap() -> None:
    """Gives the pages of the heap that nobody uses back to the system."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def give_back() -> None:
    """Trims the heap, and on a GPU gives back the blocks that torch keeps, so that other processes can have them."""
    trim_heap()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a block that a kernel still reads is not given
        gc.collect()  # tensors in cycles, such as those of an error that was caught
        torch.cuda.empty_cache()


def free_bytes() -> int:
    """Bytes of this rank's GPU that no process has; 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else 0


def check_room(num_bytes: int, whose: str, remedy: str) -> None:
    """Passes if so many bytes of this rank's GPU are free. ``whose``: who takes them; ``remedy``: what to set.

    Raises:
        NoRoom: they are not; says how many are missing, and who has them.
    """
    if num_bytes <= free_bytes():
        return
    free, total = torch.cuda.mem_get_info()
    kept, tensors = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    needed, missing, there, own, used, others = (
        f"{size / 2**30:.4g} GiB" for size in (num_bytes, num_bytes - free, free, kept, tensors, total - free - kept)
    )
    raise NoRoom(
        f"GPU {torch.cuda.current_device()} has no room for {whose}: {needed} are needed and {there} are free, so {missing} "
        f"are missing. This process holds {own} ({used} of it tensors), other processes and CUDA {others}. {remedy}"
    )


@contextlib.contextmanager
def mapped_blocks() -> Iterator[None]:
    """A block in which each larger tensor is mapped by itself, so that its memory goes back to the system when it is freed:
    for weights that sleep. Freed inside the heap it would leave a hole, which the next tensor need not fit into."""
    global _open_blocks
    mallopt = _function("mallopt")
    with _lock:
        _open_blocks += 1
        if mallopt is not None:
            _choose(mallopt)
    try:
        yield
    finally:
        with _lock:
            _open_blocks -= 1
            if mallopt is not None:
                _choose(mallopt)
