"""Weights for a server that reads folders: a temporary model folder, on a memory disk where there is one."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from tandem.api.weight_files import in_files, save_tensors

BUCKET_BYTES = 256 << 20
"""One file of the folder; so much is held in memory besides it while it is written."""

MEMORY_DISK = Path("/dev/shm")
_PREFIX = "tandem-weights-of-"


class Spool:
    """Writes one update after another; the one before is removed. Nothing is left behind after `close`."""

    def __init__(self, model: Path, memory_disk: Path = MEMORY_DISK):
        self._model, self._memory_disk = model, memory_disk
        self._root: Path | None = None
        self._finalize: weakref.finalize | None = None
        self._written = 0
        self._last: Path | None = None

    def write(self, named_tensors: Iterable[tuple[str, torch.Tensor]], num_bytes: int) -> Path:
        """Writes all tensors, beside the other files of the model; ``num_bytes``: how much room they take, about.

        Raises:
            OSError: there is no room.
        """
        self._written += 1
        folder = self._open(num_bytes) / f"update-{self._written}"
        folder.mkdir()
        for file in self._model.iterdir():
            if file.is_file() and ".safetensors" not in file.name and file.suffix not in (".bin", ".gguf", ".pt"):
                shutil.copyfile(file, folder / file.name)
        # the stream's own memory is used again for its next tensor
        copies = (
            (name, tensor.detach().cpu().clone(memory_format=torch.contiguous_format)) for name, tensor in named_tensors
        )
        for number, group in enumerate(in_files(copies, BUCKET_BYTES), 1):
            save_tensors(group, folder / f"model-{number:05}.safetensors", {"format": "pt"})
        return folder

    def keep_only(self, folder: Path | None) -> None:
        """Removes the folder that was kept before, if it is another."""
        if self._last is not None and self._last != folder:
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = folder

    def drop(self, folder: Path) -> None:
        if self._root is not None and folder.parent == self._root:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Removes everything; idempotent."""
        if self._finalize is not None:
            self._finalize()
            self._finalize = self._root = None

    def _open(self, num_bytes: int) -> Path:
        if self._root is None:
            # two versions lie there at a time, for a moment
            roomy = self._memory_disk.is_dir() and shutil.disk_usage(self._memory_disk).free > 3 * num_bytes
            place = self._memory_disk if roomy else Path(tempfile.gettempdir())
            _sweep(place)
            self._root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))
            self._finalize = weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        return self._root


def _sweep(place: Path) -> None:
    """Removes what processes of this user that were killed have left behind."""
    for folder in place.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):
            if owner.isdecimal() and not psutil.pid_exists(int(owner)) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
