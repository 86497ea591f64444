"""Landlock: restricts the files that a process may open, and its signals to processes inside the same sandbox. Needs no
privilege."""

import ctypes
import os
import struct
from collections.abc import Iterable

from tandem.sandbox.guest import kernel

LEAST_VERSION = 6
"""The first version that can restrict signals (Linux 6.12)."""

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCKET, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_TRUNCATE = 1 << 14
_ALL_FILES = (1 << 16) - 1
_ALL_NETWORK = 0b11  # bind and connect of TCP
_ALL_SCOPES = 0b11  # abstract sockets and signals
_OWN = _ALL_FILES & ~(_MAKE_CHAR | _MAKE_SOCKET | _MAKE_BLOCK)
_READABLE = _EXECUTE | _READ_FILE | _READ_DIR
_DEVICE = _READ_FILE | _WRITE_FILE | _TRUNCATE
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def version() -> int:
    """Returns the version of the kernel's Landlock interface; 0: not available, or switched off."""
    try:
        return kernel.syscall(_CREATE, None, 0, 1)
    except OSError:
        return 0


def confine(writable: str, readable: Iterable[str]) -> None:
    """Permanently restricts this process to these folders and a few devices. PR_SET_NO_NEW_PRIVS must be set."""
    attributes = struct.pack("=QQQ", _ALL_FILES, _ALL_NETWORK, _ALL_SCOPES)
    rules = kernel.syscall(_CREATE, ctypes.c_char_p(attributes), len(attributes), 0)
    try:
        _allow(rules, writable, _OWN)
        for path in readable:
            if os.path.exists(path):
                _allow(rules, path, _READABLE if os.path.isdir(path) else _EXECUTE | _READ_FILE)
        for path in DEVICES:
            _allow(rules, path, _DEVICE)
        kernel.syscall(_RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        kernel.syscall(_ADD_RULE, rules, 1, ctypes.c_char_p(struct.pack("=Qi", rights, place)), 0)
    finally:
        os.close(place)
