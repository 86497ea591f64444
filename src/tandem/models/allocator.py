"""Configures the C library to keep freed memory for the next step instead of returning it to the system.

Every step of training and decoding allocates the same large tensors. By default the C library maps each of them anew, and
the kernel clears every page when it is first touched: 5 to 15 % of a step on two cores. docs/planning.md says how much
memory keeping costs. The exceptions are the weights of sleeping models (`mapped_blocks`), and large tensors of a run with a
memory limit (`return_freed_memory`).

Torch likewise keeps freed GPU memory, which other processes, such as a server on the same GPU, then cannot use. `give_back`
releases it before such a process needs memory.
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
"""glibc's numbers for the parameters of ``mallopt``."""

_ARENAS = 2
"""Number of heaps of the process. By default glibc gives each thread its own heap, up to eight per core, and memory freed by
the engine's thread cannot be reused by the training thread."""

_USUAL = (1 << 30, 32 << 20)
"""Mapping thresholds in bytes, tried in order: an older glibc accepts at most 32 MiB, and maps larger tensors anew."""

_SMALL = 64 << 10
_KEPT_PAD, _LITTLE_PAD = 64 << 20, 1 << 20
"""Bytes that a heap requests from the system beyond its present need: without a memory limit, and with a limit."""

_lock = threading.Lock()
_open_blocks = 0  # number of `mapped_blocks` contexts that are open
_returned: int | None = None
"""Freed blocks of at least this many bytes are returned to the system; None: all are kept."""


def _function(name: str) -> Any:
    """Returns a function of the C library; None if the library lacks it (macOS, musl, another preloaded allocator)."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def keep_freed_memory() -> bool:
    """Makes this process's C library keep freed memory; returns False if it is not glibc.

    First returns the memory of an earlier run in this process to the system: several gigabytes in blocks of sizes that the
    next run could not use.
    """
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    give_back()
    with _lock:
        mallopt(_ARENA_MAX, _ARENAS)
        return bool(_choose(mallopt) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))


def return_freed_memory(limit: int | None) -> None:
    """Makes freed large blocks return to the system, for a run with a memory limit of ``limit`` bytes. None: keeps them.

    Blocks of at least ``limit / 256`` bytes (between 64 KiB and 32 MiB) are mapped separately. Freed inside a heap they
    would leave holes, different ones in each thread's heap, into which the next tensor may not fit: such a run took up to a
    quarter more memory than planned. Smaller blocks are kept, because clearing their pages again would cost a fifth of the
    training step.
    """
    global _returned
    mallopt = _function("mallopt")
    with _lock:
        before, _returned = _returned, None if limit is None else min(max(limit // 256, _SMALL), _USUAL[1])
        if _returned != before and mallopt is not None:
            _choose(mallopt)


def _choose(mallopt: Any) -> bool:
    """Sets the size from which a block is mapped separately, and the size by which a heap grows; False if glibc refuses."""
    thresholds = _USUAL if _returned is None else (_returned,)
    threshold = any(mallopt(_MMAP_THRESHOLD, most) for most in ((_SMALL,) if _open_blocks else thresholds))
    return bool(threshold and mallopt(_TOP_PAD, _KEPT_PAD if _returned is None else _LITTLE_PAD))


def trim_heap() -> None:
    """Returns unused pages of the heap to the system."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def give_back() -> None:
    """Trims the heap, and releases the unused GPU memory that torch keeps, so that other processes can use it."""
    trim_heap()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a block that a kernel still reads is not released
        gc.collect()  # frees tensors in reference cycles, such as those of a caught error
        torch.cuda.empty_cache()


def free_bytes() -> int:
    """Returns the bytes of this rank's GPU that no process uses; 0 without a GPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else 0


def check_room(num_bytes: int, whose: str, remedy: str) -> None:
    """Checks that ``num_bytes`` of this rank's GPU are free. ``whose``: what needs them, for the message; ``remedy``:
    advice.

    Raises:
        NoRoom: too few are free; the message says how many are missing, and which processes use the memory.
    """
    if num_bytes <= free_bytes():
        return
    free, total = torch.cuda.mem_get_info()
    reserved, tensors = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    needed, missing, idle, held, used, others = (
        f"{size / 2**30:.4g} GiB" for size in (num_bytes, num_bytes - free, free, reserved, tensors, total - free - reserved)
    )
    raise NoRoom(
        f"GPU {torch.cuda.current_device()} has no room for {whose}: {needed} are needed and {idle} are free, so {missing} "
        f"are missing. This process holds {held} ({used} of it tensors), other processes and CUDA {others}. {remedy}"
    )


@contextlib.contextmanager
def mapped_blocks() -> Iterator[None]:
    """A context in which each tensor above 64 KiB is mapped separately, so that its memory returns to the system when it is
    freed. For weights of sleeping models: freed inside the heap, they would leave holes into which other tensors may not
    fit."""
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
