"""Memory that was freed is kept for the next step instead of being given back to the system.

Every step of training and decoding allocates the same large tensors. The C library's default maps each of them anew, and the
kernel clears every page again when it is first touched: 5 to 15 % of a step on two cores. What that costs is in
docs/planning.md. What sleeps between stages is the exception: see `mapped_blocks`.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from typing import Any

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""glibc's numbers of the parameters of ``mallopt``."""

_USUAL = (1 << 30, 32 << 20)
"""An older glibc takes no threshold above 32 MiB; larger tensors are mapped anew there."""

_SMALL = 64 << 10
_lock = threading.Lock()
_open_blocks = 0  # of `mapped_blocks`


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
        mapped = bool(_open_blocks) or any(mallopt(_MMAP_THRESHOLD, most) for most in _USUAL)
        return bool(mapped and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1) and mallopt(_TOP_PAD, 64 << 20))


def give_back() -> None:
    """Gives the pages of the heap that nobody uses back to the system."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def mapped_blocks() -> Iterator[None]:
    """A block in which each larger tensor is mapped by itself, so that its memory goes back to the system when it is freed:
    for weights that sleep. Freed inside the heap it would leave a hole, which the next tensor need not fit into."""
    global _open_blocks
    mallopt = _function("mallopt")
    with _lock:
        _open_blocks += 1
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, _SMALL)
    try:
        yield
    finally:
        with _lock:
            _open_blocks -= 1
            if mallopt is not None and not _open_blocks:
                any(mallopt(_MMAP_THRESHOLD, most) for most in _USUAL)
