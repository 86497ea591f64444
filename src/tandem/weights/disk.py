"""Weights for servers that read them from a disk: one Hugging Face model folder per version.

Any server can open such a folder. It appears complete or not at all, the newest folders are kept, and those that a killed
run has left are removed at the start of the next run.
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError

from tandem.api.failures import WeightUpdateFailed
from tandem.api.shared_files import sync
from tandem.api.weights import INDEX, FolderSource, in_groups, save_tensors, tensor_digest
from tandem.weights.channel import Delivery, WeightChannel

log = logging.getLogger(__name__)
MIB = 2**20

SHARD_BYTES = 8 * MIB
"""Bytes after which a file is closed. Files are small because an unchanged file need not be written again."""

FILE = "model-{:05}.safetensors"
Shard = dict[str, tuple[tuple[int, ...], str]]
"""One file of a version: name of each tensor → its shape and digest."""

LOCK = ".lock"
TRIES = 100

SETTINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Endings of the files in a model folder other than weights."""


class DiskChannel(WeightChannel):
    """Delivers to servers that see a folder of this machine under the same path.

    Only the tensors of one file are in memory at a time, beside the stream's own tensor. A file that has not changed since
    the version before becomes a hard link and is not written again.
    """

    for_adapters = False  # its folders are whole models
    takes_key = False

    def __init__(
        self,
        parent: Path,
        base: Path | None = None,
        *,
        keep: int = 2,
        shard_bytes: int = SHARD_BYTES,
        keep_parent: bool = False,
    ):
        """``parent``: the channel makes a folder of its own in it. `close` removes that folder, and ``parent`` if it is then
        empty, unless ``keep_parent``. ``base``: model folder whose configuration and tokenizer are copied into each version.
        ``keep``: number of complete versions to keep; older ones are removed.
        """
        self._parent, self._base, self._keep, self._shard_bytes = Path(parent), base, keep, shard_bytes
        self._keep_parent = keep_parent
        self._own: OwnFolder | None = None
        self._count = 0
        self._versions: dict[Path, tuple[Shard, ...]] = {}
        self.written_bytes = 0
        """Bytes of the last version that were written, not linked."""

    @property
    def folder(self) -> Path | None:
        """The folder of the versions; None before the first one."""
        return None if self._own is None else self._own.path

    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Delivery:
        """Writes the tensors. Raises `WeightUpdateFailed` if the disk is full or fails; earlier versions stay."""
        try:
            self._own = self._own or OwnFolder(self._parent)
        except OSError as error:
            raise WeightUpdateFailed(f"{self._parent} cannot hold weights for the servers: {error}") from error
        self._count += 1
        folder = self._own.path / f"update_{self._count}"
        temporary = folder.with_name(f".{folder.name}.partial")
        digests: dict[str, str] = {}
        num_bytes = written = 0
        before = next(reversed(self._versions), None)
        shards: list[Shard] = []
        old = iter(self._versions.get(before, ()) if before else ())
        try:
            temporary.mkdir()
            # copied, because the stream reuses its memory for the next tensor
            copies = (
                (name, torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())) for name, tensor in named_tensors
            )
            for group in in_groups(copies, self._shard_bytes):
                shard = {name: (tuple(tensor.shape), tensor_digest(tensor)) for name, tensor in group.items()}
                file, size = temporary / FILE.format(len(shards) + 1), sum(tensor.nbytes for tensor in group.values())
                if before is None or next(old, None) != shard or not _linked(before / file.name, file):
                    save_tensors(group, file, {"format": "pt"})
                    written += size
                shards.append(shard)
                digests |= {name: digest for name, (_, digest) in shard.items()}
                num_bytes += size
            places = {name: FILE.format(number) for number, shard in enumerate(shards, 1) for name in shard}
            index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
            (temporary / INDEX).write_text(json.dumps(index, indent=1))
            self._copy_settings(temporary, dtype)
            for path in (*temporary.iterdir(), temporary):
                sync(path)
            os.rename(temporary, folder)
            sync(self._own.path)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, (OSError, SafetensorError)):
                raise WeightUpdateFailed(self._explain(folder, num_bytes, error)) from error
            raise
        self._versions[folder], self.written_bytes = tuple(shards), written
        for oldest in list(self._versions)[: -self._keep]:
            self._remove(oldest)
        return Delivery(FolderSource(folder), digests, num_bytes)

    def withdraw(self) -> None:
        """Removes the last version, which no server has, so that it does not count among the versions to keep."""
        if len(self._versions) > 1:
            self._remove(next(reversed(self._versions)))

    def close(self) -> None:
        """Removes the folder with all versions; idempotent."""
        self._versions.clear()
        if self._own is not None:
            self._own.remove(keep_parent=self._keep_parent)
            self._own = None

    def _remove(self, folder: Path) -> None:
        del self._versions[folder]
        shutil.rmtree(folder, ignore_errors=True)

    def _copy_settings(self, folder: Path, dtype: torch.dtype) -> None:
        if self._base is None:
            return
        for path in self._base.iterdir():
            if path.is_file() and path.suffix in SETTINGS and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
        config = json.loads((folder / "config.json").read_text())
        name = str(dtype).removeprefix("torch.")
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        (folder / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, name), indent=2))

    def _explain(self, folder: Path, num_bytes: int, error: Exception) -> str:
        try:
            free = f"{shutil.disk_usage(self._parent).free / MIB:,.0f} MiB"
        except OSError:
            free = "unknown"
        return (
            f"the weights could not be written to {folder}: {error}, after {num_bytes:,} bytes; free there now: {free}. The "
            "versions before are untouched and nothing was left behind. Free some space, or put rollout.weights.folder on a "
            "larger disk"
        )


class OwnFolder:
    """A folder of this process beside those of other runs. The constructor also removes the folders of killed runs.

    The operating system releases the folder's lock when the process ends, however that happens.
    """

    def __init__(self, parent: Path):
        with _locked(parent):  # so that no run removes a folder that another is just making
            for other in sorted(parent.glob("run-*")):
                _remove_if_left(other)
            self.path = parent / f"run-{os.getpid()}-{secrets.token_hex(4)}"
            self.path.mkdir()
            self._lock: IO[str] = (self.path / LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self, *, keep_parent: bool) -> None:
        """Removes the folder, and its parent if no other folder is left there."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        if keep_parent:
            return
        parent = self.path.parent
        with contextlib.suppress(OSError), _locked(parent):  # another run may be about to make its folder there
            if os.listdir(parent) == [LOCK]:
                (parent / LOCK).unlink()
                parent.rmdir()


def _remove_if_left(folder: Path) -> None:
    """Removes the folder of a run if nobody holds the folder's lock, because then the run has ended."""
    try:
        with (folder / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.warning("removing %s, weights left by a run that was killed", folder)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # the lock is held, or the owner is removing the folder
        return


@contextlib.contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """Makes ``parent`` if it is missing, and locks it against other processes that make or remove folders in it. Raises
    `OSError`."""
    with _lock_of(parent):
        yield


def _lock_of(parent: Path) -> IO[str]:
    for _ in range(TRIES):
        parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the last run there removes the folder, also while others wait
            lock = (parent / LOCK).open("a")
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock.fileno()).st_nlink:
                return lock
            lock.close()
    raise OSError(f"{parent} was removed {TRIES} times while this process waited for its lock")


def _linked(old: Path, new: Path) -> bool:
    """Makes ``new`` a hard link to ``old``. Returns False if the file system cannot."""
    with contextlib.suppress(OSError):
        os.link(old, new)
        return True
    return False
