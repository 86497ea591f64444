"""Memory that was freed is kept for the next step instead of being given back to the system.

Every step of training and decoding allocates the same large tensors. The C library's default maps each of them anew, and the
kernel clears every page again when it is first touched: 5 to 15 % of a step on two cores. Costs about 0.1 GiB.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""glibc's numbers of the parameters of ``mallopt``."""


def keep_freed_memory() -> bool:
    """Tells this process's C library; False where it is not glibc (macOS, musl, a preloaded one)."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # An older glibc takes no threshold above 32 MiB; larger tensors are mapped anew there.
    mapped = mallopt(_MMAP_THRESHOLD, 1 << 30) or mallopt(_MMAP_THRESHOLD, 32 << 20)
    return bool(mapped and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1) and mallopt(_TOP_PAD, 64 << 20))
