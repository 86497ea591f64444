"""Folders of untrusted programs: functions that measure their size, and remove them whatever they contain."""

import contextlib
import functools
import math
import os
import re
import stat
import time
from collections.abc import Collection

from tandem.sandbox.guest.processes import content, memory_of, threads_of

MAX_FILES = 20_000
MAX_DEPTH = 100
UNMEASURED_S = 0.25
"""Seconds that a program may hold a deleted file which cannot be measured."""
_UNDER_WAY = re.compile(rb"scm_fds:\s+[1-9]")


class FolderMeter:
    """Tells when the files of one program exceed a limit on bytes, files, or depth of folders.

    Some deleted files cannot be measured: a file that is mapped but not open, a descriptor in transit through a socket, a
    process that hides its descriptors. Honest programs pass through each of these states for an instant (an ``mmap`` closes
    its descriptor before it unmaps), so they count as too much only after `UNMEASURED_S`.

    Args:
        root: the folder.
        most_bytes: the limit on the bytes of all files.
    """

    def __init__(self, root: str, most_bytes: int):
        self._root, self._most_bytes = root, most_bytes
        self._unmeasured_since = math.inf

    def is_full(self, pids: Collection[int]) -> bool:
        """True if a limit is exceeded. ``pids``: processes that may hold deleted files open.

        Walks by descriptors, so no path is too long; unreadable folders are made readable for their owner.
        """
        sizes: dict[int, int] = {}
        files = 0
        for folder, folders, names, descriptor in os.fwalk(self._root):
            files += len(names) + len(folders)
            if files > MAX_FILES or folder.count("/") - self._root.count("/") > MAX_DEPTH:
                return True
            for name in names + folders:
                with contextlib.suppress(OSError):
                    facts = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    sizes[facts.st_ino] = facts.st_blocks * 512
                    if stat.S_ISDIR(facts.st_mode) and facts.st_mode & 0o500 != 0o500:
                        _open_to_owner(name, descriptor)
        unmeasured: set[int] = set()
        for pid in pids:
            _add_nameless(pid, self._root, sizes, unmeasured)
        if unmeasured <= sizes.keys():
            self._unmeasured_since = math.inf
        else:
            self._unmeasured_since = min(self._unmeasured_since, time.monotonic())
        is_hiding = time.monotonic() - self._unmeasured_since > UNMEASURED_S
        return is_hiding or len(sizes) > MAX_FILES or sum(sizes.values()) > self._most_bytes


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


def _add_nameless(pid: int, root: str, sizes: dict[int, int], unmeasured: set[int]) -> None:
    """Adds the deleted files that a process holds: their bytes to ``sizes`` by inode, and the inodes of mapped files, or -1
    for whatever else may hide a file, to ``unmeasured``."""
    device, inside = _place(root)
    for thread in threads_of(pid):
        maps = content(f"{thread}/maps")
        for line in maps.splitlines() if b" (deleted)" in maps else ():
            if inside in line and line.endswith(b" (deleted)"):
                unmeasured.add(int(line.split()[4]))
        try:
            for name in ("exe", *(f"fd/{number}" for number in os.listdir(f"{thread}/fd"))):
                with contextlib.suppress(FileNotFoundError):
                    facts = os.stat(f"{thread}/{name}")
                    if (facts.st_dev, facts.st_nlink) == (device, 0):
                        sizes[facts.st_ino] = facts.st_blocks * 512
                    elif stat.S_ISSOCK(facts.st_mode) and _UNDER_WAY.search(content(f"{thread}/fdinfo/{name[3:]}")):
                        unmeasured.add(-1)
        except OSError:
            if memory_of(content(f"{thread}/status")):  # the process has not ended
                unmeasured.add(-1)


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
