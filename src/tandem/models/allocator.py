"""Memory that was freed is kept for the next step instead of being given back to the system.

Every step of training and decoding allocates the same large tensors. The C library's default maps each of them anew, and the
kernel clears every page again when it is first touched: 5 to 15 % of a step on two cores. What that costs is in
docs/planning.md.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""glibc's numbers of the parameters of ``mallopt``."""


def keep_freed_memory() -> bool:
    """Tells this process's C library; False where it is not glibc (macOS, musl, a preloaded one).

    What an earlier run of the process has left is given back first: several gigabytes, which the next one, of other sizes,
    could not use.
    """
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    mallopt, trim = (getattr(library, name, None) for name in ("mallopt", "malloc_trim"))
    if mallopt is None:
        return False
    if trim is not None:
        trim(0)
    # An older glibc takes no threshold above 32 MiB; larger tensors are mapped anew there.
    mapped = mallopt(_MMAP_THRESHOLD, 1 << 30) or mallopt(_MMAP_THRESHOLD, 32 << 20)
    return bool(mapped and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1) and mallopt(_TOP_PAD, 64 << 20))
