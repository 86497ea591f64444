"""Folders of untrusted programs: functions that measure their size, and remove them whatever they contain."""

import contextlib
import functools
import os
import re
import stat
from collections.abc import Collection

from tandem.sandbox.guest.processes import content, memory_of, threads_of

MAX_FILES = 20_000
MAX_DEPTH = 100
_UNDER_WAY = re.compile(rb"scm_fds:\s+[1-9]")


def is_full(root: str, most_bytes: int, pids: Collection[int]) -> bool:
    """True if a folder exceeds a limit on bytes, files, or depth of folders.

    Walks by descriptors, so no path is too long; unreadable folders are made readable for their owner. ``pids``: processes
    that may hold deleted files open.
    """
    sizes: dict[int, int] = {}
    files = 0
    for folder, folders, names, descriptor in os.fwalk(root):
        files += len(names) + len(folders)
        if files > MAX_FILES or folder.count("/") - root.count("/") > MAX_DEPTH:
            return True
        for name in names + folders:
            with contextlib.suppress(OSError):
                facts = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                sizes[facts.st_ino] = facts.st_blocks * 512
                if stat.S_ISDIR(facts.st_mode) and facts.st_mode & 0o500 != 0o500:
                    _open_to_owner(name, descriptor)
    for pid in pids:
        sizes |= _nameless(pid, root, most_bytes + 1)
    return len(sizes) > MAX_FILES or sum(sizes.values()) > most_bytes


def _open_to_owner(name: str, above: int) -> None:
    # O_NOFOLLOW, because it may have been replaced by a link
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{place}", 0o700)
    finally:
        os.close(place)


@functools.lru_cache(1)
def _place(root: str) -> tuple[int, bytes]:
    """Returns the device number of a folder, and its path without links."""
    return os.stat(root).st_dev, os.path.realpath(root).encode()


def _nameless(pid: int, root: str, too_much: int) -> dict[int, int]:
    """Returns the bytes, by inode, of deleted files that a process holds.

    Whatever cannot be measured counts as ``too_much``: a file that is mapped but not open, a descriptor in transit through a
    socket, a process that hides its descriptors.
    """
    sizes: dict[int, int] = {}
    device, inside = _place(root)
    for thread in threads_of(pid):
        maps = content(f"{thread}/maps")
        for line in maps.splitlines() if b" (deleted)" in maps else ():
            if inside in line and line.endswith(b" (deleted)"):
                sizes.setdefault(int(line.split()[4]), too_much)
        try:
            for name in ("exe", *(f"fd/{number}" for number in os.listdir(f"{thread}/fd"))):
                with contextlib.suppress(FileNotFoundError):
                    facts = os.stat(f"{thread}/{name}")
                    if (facts.st_dev, facts.st_nlink) == (device, 0):
                        sizes[facts.st_ino] = facts.st_blocks * 512
                    elif stat.S_ISSOCK(facts.st_mode) and _UNDER_WAY.search(content(f"{thread}/fdinfo/{name[3:]}")):
                        sizes[-1] = too_much
        except OSError:
            if memory_of(content(f"{thread}/status")):  # the process has not ended
                sizes[-1] = too_much
    return sizes


def remove(root: str) -> None:
    """Removes a folder of any depth and with any modes inside, without following links. No process may write to the folder
    meanwhile.

    Folders two levels down are moved up by one level until nothing is left, so neither paths nor the stack grow with the
    depth.
    """
    lifted = 0
    with contextlib.suppress(FileNotFoundError):
        os.chmod(root, 0o700)
        while names := os.listdir(root):
            for name in names:
                path = os.path.join(root, name)
                if not _is_folder(path):
                    os.unlink(path)
                    continue
                os.chmod(path, 0o700)
                for below in os.listdir(path):
                    inner = os.path.join(path, below)
                    if _is_folder(inner):
                        os.chmod(inner, 0o700)  # otherwise it cannot be moved
                        lifted += 1
                        os.rename(inner, os.path.join(root, f".lifted-{os.getpid()}-{lifted}"))
                    else:
                        os.unlink(inner)
                os.rmdir(path)
        os.rmdir(root)


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode)
