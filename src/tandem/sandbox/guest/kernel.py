"""Calls of the Linux kernel for which Python has no function."""

import ctypes
import os
import platform
import resource

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x00000080
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 2, 4, 8, 4096
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CLONE = {"x86_64": 56, "aarch64": 220}

MACHINE = platform.machine()
_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the interpreter's lock, which a cloned process must hold


def check_result(result: int, what: str) -> int:
    """Returns the result of a call of the kernel.

    Raises:
        OSError: the result is negative.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Makes a system call by number. Integers are passed as 64 bits."""
    longs = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    return check_result(_libc.syscall(ctypes.c_long(number), *longs), f"system call {number}")


def prctl(option: int, *arguments: object) -> int:
    """Calls prctl(2)."""
    padded = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in (*arguments, 0, 0, 0, 0)[:4]]
    return check_result(_libc.prctl(ctypes.c_int(option), *padded), f"prctl {option}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Calls mount(2)."""
    arguments = [source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None]
    check_result(_libc.mount(*arguments), f"mount {kind or source} on {target}")


def clone(flags: int) -> int:
    """Forks into new namespaces. Returns 0 in the child. Python's own hooks after a fork do not run."""
    child_signal = 17
    return syscall(_CLONE[MACHINE], flags | child_signal, 0, 0, 0, 0)


def drop_capabilities() -> None:
    """Drops all privileges permanently, in this process and its children."""
    for number in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, number)
        except OSError:
            break  # the kernel does not know the number, or this process may not drop it, and so cannot use it
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    syscall(_CAPSET[MACHINE], ctypes.byref(header), ctypes.byref(nothing))


def bound(what: int, value: int) -> None:
    """Sets a resource limit that cannot be raised again. The new limit is never above the present one."""
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def close_from(lowest: int) -> None:
    """Closes all descriptors from ``lowest`` on."""
    os.closerange(lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
