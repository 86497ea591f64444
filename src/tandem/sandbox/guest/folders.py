"""Folders of programs that nobody trusts: how full they are, and how they go, whatever lies in them."""

import contextlib
import os
import stat

MAX_FILES = 20_000
MAX_DEPTH = 100


def is_full(root: str, most_bytes: int) -> bool:
    """True if a folder has more than it may: bytes, files, or folders in folders."""
    used = files = 0
    for folder, folders, names in os.walk(root):
        files += len(names) + len(folders)
        for name in names + folders:
            with contextlib.suppress(OSError):
                used += os.lstat(os.path.join(folder, name)).st_blocks * 512
        if used > most_bytes or files > MAX_FILES or folder.count("/") - root.count("/") > MAX_DEPTH:
            return True
    return False


def remove(root: str) -> None:
    """Removes a folder: of any depth, whatever the modes inside, without following links. Nobody may write to it any more.

    What lies two levels down is lifted by one until nothing is left, so neither paths nor the stack grow with the depth.
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
                        os.chmod(inner, 0o700)  # else it cannot be moved
                        lifted += 1
                        os.rename(inner, os.path.join(root, f".lifted-{os.getpid()}-{lifted}"))
                    else:
                        os.unlink(inner)
                os.rmdir(path)
        os.rmdir(root)


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode)
