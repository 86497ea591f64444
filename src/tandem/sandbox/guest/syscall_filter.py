"""A seccomp filter: denies system calls to programs in a sandbox, in addition to the other isolation.

Programs need none of the denied calls to compute. These calls create sockets, inspect other processes, change mounts,
namespaces, clocks or kernel modules, store data in the kernel that no limit counts (System V and POSIX queues, memfd,
keyrings), or have had many vulnerabilities (io_uring, bpf, userfaultfd, perf).
"""

import ctypes
import errno
import struct

from tandem.sandbox.guest import kernel

_ARCHITECTURE = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in the tables, AUDIT_ARCH
LAST_KNOWN = 462
"""Highest known system call. Newer ones get ENOSYS, as if the kernel did not have them."""

# name: (number on x86_64, on aarch64)
DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fsconfig": (431, 431),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "syslog": (103, 116),
    "fanotify_init": (300, 262),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "process_mrelease": (448, 448),
}
ABSENT: dict[str, tuple[int | None, int | None]] = {  # programs fall back to something else if the kernel lacks these
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "clone3": (435, 435),  # its flags are in memory, which no filter can read
}
UNWATCHED_BY_LANDLOCK: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "inotify_add_watch": (254, 27),
}
"""Calls that are denied only without namespaces, because then the program's user owns the files of the user who runs
Tandem."""

ONLY_ITSELF: dict[str, tuple[int, int, dict[int, int]]] = {  # arguments that must have these values
    "prlimit64": (302, 261, {0: 0}),
    "setpriority": (141, 140, {0: 0, 1: 0}),
    "ioprio_set": (251, 30, {0: 1, 1: 0}),
    "sched_setaffinity": (203, 122, {0: 0}),
    "sched_setparam": (142, 118, {0: 0}),
    "sched_setscheduler": (144, 119, {0: 0}),
    "sched_setattr": (314, 274, {0: 0}),
}
"""Calls that a process may make only for itself. For other targets they would affect processes of the same user outside the
sandbox."""

REACHING: dict[str, tuple[int, int]] = {"socket": (41, 198), "connect": (42, 203)}
"""Calls that a process outside answers, for programs that may reach an address (`guest.door`): (number on x86_64, number on
aarch64)."""

_WITH_FLAGS: dict[str, tuple[int, int, int]] = {"sendto": (44, 206, 3), "sendmsg": (46, 211, 2), "sendmmsg": (307, 269, 3)}
"""Calls with message flags: (number on x86_64, on aarch64, index of the flags argument)."""

_CONNECTS_TOO = 0x20000000
"""MSG_FASTOPEN: sending such a message connects the socket."""

_SETSOCKOPT = (54, 208)
_OPTIONS = {1: (2, 7, 8, 9, 13, 20, 21), 6: (1, 3, 4, 5, 6, 12, 18)}
"""Allowed socket options by protocol level: SO_REUSEADDR, buffers, SO_KEEPALIVE, SO_LINGER, time-outs; TCP_NODELAY,
TCP_CORK, keepalive times, TCP_QUICKACK, TCP_USER_TIMEOUT. Others could redirect packets."""

_ASKS_INTERFACES = (0x8900, 0x8A00)
"""Range of ioctl requests that query the machine's network interfaces and addresses."""

_CLONE, _IOCTL, _SOCKETPAIR = (56, 220), (16, 29), (53, 199)
_DATAGRAMS = 2  # a bit of those socket types that can send messages to any address
_NEW_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWTIME
)
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: they insert input into a terminal

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _HOLD = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_AND = 0x54
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, (16, 24, 32, 40)  # offsets in struct seccomp_data
_SECCOMP = (317, 277)
_NEW_LISTENER, _WAIT_KILLABLE = 8, 32


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def is_known() -> bool:
    """True if the tables contain the system call numbers of this machine's architecture."""
    return kernel.MACHINE in _ARCHITECTURE


def number_of(call: str) -> int:
    """Returns the number of a call in `REACHING` on this machine."""
    return REACHING[call][_ARCHITECTURE[kernel.MACHINE][0]]


def _reaching(column: int) -> list[bytes]:
    """Returns the filter lines for programs that may reach an address: `connect`, and `socket` for TCP over IPv4, are
    suspended for an answer; whatever could lead such a socket elsewhere is denied."""
    refuse, hold = _line(_RETURN, _ERRNO | errno.EPERM), _line(_RETURN, _HOLD)
    kind = [_line(_LOAD, _ARGUMENTS[1]), _line(_AND, 0xFFFFFFFF & ~(0x800 | 0x80000)), _line(_EQUAL, 1, 0, 4)]
    protocol = [_line(_LOAD, _ARGUMENTS[2]), _line(_EQUAL, 0, 1, 0), _line(_EQUAL, 6, 0, 1), hold, refuse]
    lines = [_line(_EQUAL, REACHING["connect"][column], 0, 1), hold, _line(_EQUAL, REACHING["socket"][column], 0, 10)]
    lines += [_line(_LOAD, _ARGUMENTS[0]), _line(_EQUAL, 2, 0, 7), *kind, *protocol]
    for *numbers, position in _WITH_FLAGS.values():
        lines += [_line(_EQUAL, numbers[column], 0, 4), _line(_LOAD, _ARGUMENTS[position])]
        lines += [_line(_ANY_BIT, _CONNECTS_TOO, 0, 1), refuse, _line(_RETURN, _ALLOW)]
    options: list[bytes] = []
    for level, names in _OPTIONS.items():
        tests = [_line(_EQUAL, name, len(names) - i, 0) for i, name in enumerate(names)]
        checks = [_line(_LOAD, _ARGUMENTS[2]), *tests, _line(_RETURN, _ERRNO | errno.ENOPROTOOPT), _line(_RETURN, _ALLOW)]
        options += [_line(_LOAD, _ARGUMENTS[1]), _line(_EQUAL, level, 0, len(checks)), *checks]
    options.append(_line(_RETURN, _ERRNO | errno.ENOPROTOOPT))
    lines += [_line(_EQUAL, _SETSOCKOPT[column], 0, len(options)), *options]
    low, high = _ASKS_INTERFACES
    checks = [_line(_LOAD, _ARGUMENTS[1]), _line(_AT_LEAST, low, 0, 2), _line(_AT_LEAST, high, 1, 0), refuse]
    return [*lines, _line(_EQUAL, _IOCTL[column], 0, len(checks) + 1), *checks, _line(_LOAD, _NUMBER)]


def compile_filter(*, by_landlock: bool, reaches: bool = False) -> bytes:
    """Compiles the filter to a program for the kernel. ``by_landlock``: there are no namespaces, so the machine's files are
    visible. ``reaches``: the program may reach an address, and a process outside answers suspended calls."""
    column, architecture = _ARCHITECTURE[kernel.MACHINE]
    lines = [_line(_LOAD, _ARCH), _line(_EQUAL, architecture, 1, 0), _line(_RETURN, _KILL), _line(_LOAD, _NUMBER)]
    # this includes the calls of x32
    lines += [_line(_AT_LEAST, LAST_KNOWN + 1, 0, 1), _line(_RETURN, _ERRNO | errno.ENOSYS)]
    lines += _reaching(column) if reaches else []
    tables = [(DENIED, errno.EPERM), (ABSENT, errno.ENOSYS)]
    tables += [(UNWATCHED_BY_LANDLOCK, errno.EPERM)] if by_landlock else []
    for table, error in tables:
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                lines += [_line(_EQUAL, number, 0, 1), _line(_RETURN, _ERRNO | error)]
    for x86_64, aarch64, arguments in ONLY_ITSELF.values():
        lines += [_line(_EQUAL, (x86_64, aarch64)[column], 0, 3 * len(arguments) + 1)]
        for position, value in arguments.items():
            lines += [_line(_LOAD, _ARGUMENTS[position]), _line(_EQUAL, value, 1, 0), _line(_RETURN, _ERRNO | errno.EPERM)]
        lines += [_line(_RETURN, _ALLOW)]
    for numbers_of_call, position, bits in ((_CLONE, 0, _NEW_NAMESPACES), (_SOCKETPAIR, 1, _DATAGRAMS)):
        lines += [_line(_EQUAL, numbers_of_call[column], 0, 4), _line(_LOAD, _ARGUMENTS[position])]
        lines += [_line(_ANY_BIT, bits, 0, 1), _line(_RETURN, _ERRNO | errno.EPERM), _line(_RETURN, _ALLOW)]
    lines += [_line(_EQUAL, _IOCTL[column], 0, 4), _line(_LOAD, _ARGUMENTS[1])]
    lines += [_line(_EQUAL, _TERMINAL_INPUT[0], 1, 0), _line(_EQUAL, _TERMINAL_INPUT[1], 0, 1)]
    lines += [_line(_RETURN, _ERRNO | errno.EPERM), _line(_RETURN, _ALLOW)]
    return b"".join(lines)


def install(program: bytes, *, reaches: bool = False) -> int | None:
    """Installs the filter permanently for this process and its children, and forbids them to gain privileges.

    Returns the listener through which suspended calls are answered; None without ``reaches``.
    """
    text = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(text))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if not reaches:
        kernel.prctl(22, 2, ctypes.c_char_p(header))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        return None
    number = _SECCOMP[_ARCHITECTURE[kernel.MACHINE][0]]
    try:
        return kernel.syscall(number, 1, _NEW_LISTENER | _WAIT_KILLABLE, ctypes.c_char_p(header))
    except OSError:  # kernels before 5.19
        return kernel.syscall(number, 1, _NEW_LISTENER, ctypes.c_char_p(header))
