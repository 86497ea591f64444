"""Safetensors files that are written as a stream: data first, the header into space that was left for it.

A folder of them is written tensor by tensor. A file whose tensors are all as they were in the folder before is not
written again but linked.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.weights.pieces import PIECE_BYTES, digest_of, pieces

HEADER_BYTES = 64 * 1024
"""Space for names and shapes at the front of each file; a file that fills it is closed and another begun."""

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}
"""The format's names of the dtypes that weights are delivered in."""


@dataclass(frozen=True)
class ShardEntry:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    digest: str
    end: int
    """Bytes of data up to its end; it begins where the one before it ends."""

    def fits(self, name: str, shape: tuple[int, ...], digest: str) -> bool:
        """True if it is this tensor."""
        return (self.name, self.shape, self.digest) == (name, shape, digest)


@dataclass(frozen=True)
class Shard:
    """A complete file."""

    path: Path
    entries: tuple[ShardEntry, ...]


class ShardFile:
    """A safetensors file that is being written."""

    def __init__(self, path: Path, dtype: torch.dtype):
        self.path, self.entries = path, list[ShardEntry]()
        self._dtype = dtype
        self._header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = len(json.dumps(self._header))
        self._file = path.open("xb")
        self._file.seek(8 + HEADER_BYTES)

    @property
    def num_bytes(self) -> int:
        """Bytes of data so far."""
        return self.entries[-1].end if self.entries else 0

    def append(self, name: str, shape: tuple[int, ...], parts: Iterable[torch.Tensor]) -> ShardEntry:
        """Writes one tensor, and digests it on the way."""
        found, end = hashlib.sha256(), self.num_bytes
        for part in parts:
            data = part.numpy().data
            found.update(data)
            self._file.write(data)
            end += len(data)
        entry = ShardEntry(name, shape, found.hexdigest(), end)
        self._enter(entry)
        return entry

    def adopt(self, shard: Shard, count: int) -> None:
        """Copies the first ``count`` tensors of another file, at the beginning of this one."""
        if count:
            with shard.path.open("rb") as other:
                other.seek(8 + HEADER_BYTES)
                left = shard.entries[count - 1].end
                while left:
                    data = other.read(min(left, PIECE_BYTES))
                    if not data:
                        raise OSError(f"{shard.path} is shorter than it was written")
                    self._file.write(data)
                    left -= len(data)
        for entry in shard.entries[:count]:
            self._enter(entry)

    def is_full(self, shard_bytes: int) -> bool:
        """True if the next tensor belongs into another file; the same for the same tensors, whenever it is asked."""
        return self.num_bytes >= shard_bytes or self._header_bytes > HEADER_BYTES // 2

    def finish(self) -> Shard:
        """Writes the header, and all of it to the disk."""
        header = json.dumps(self._header).encode()
        if len(header) > HEADER_BYTES:
            raise ValueError(f"the names of {self.path.name} take {len(header)} bytes, more than {HEADER_BYTES}")
        self._file.seek(0)
        self._file.write(HEADER_BYTES.to_bytes(8, "little") + header.ljust(HEADER_BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return Shard(self.path, tuple(self.entries))

    def close(self) -> None:
        """Gives it up; idempotent. What was not written yet may not fit: that is nobody's loss."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _enter(self, entry: ShardEntry) -> None:
        begin = self.num_bytes
        self._header[entry.name] = {
            "dtype": DTYPES[self._dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, entry.end],
        }
        self._header_bytes += len(entry.name) + 100
        self.entries.append(entry)


class FolderWriter:
    """Lays a stream of tensors into the files of an empty folder: `add` each, then `finish`.

    ``before``: the files of the folder before. While the tensors are those of the file there, to the digest, nothing is
    written; at the first that differs the others are copied over from it.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, shard_bytes: int, before: Sequence[Shard] = ()):
        self.shards: list[Shard] = []
        self.digests: dict[str, str] = {}
        self.num_bytes = self.written_bytes = 0
        self._folder, self._dtype, self._shard_bytes, self._before = folder, dtype, shard_bytes, before
        self._file: ShardFile | None = None
        self._same = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor; it need only be valid during the call. Raises `ValueError` for a name that comes twice."""
        if name in self.digests:
            raise ValueError(f"tensor {name!r} came twice")
        shape, old = tuple(tensor.shape), self._old
        if self._file is None and old is not None:
            digest = digest_of(pieces(tensor, self._dtype))
            if old.entries[self._same].fits(name, shape, digest):
                self._same += 1
                self._count(name, digest, tensor)
                if self._same == len(old.entries):
                    self._link(old)
                return
        if self._file is None:
            self._begin()
        assert self._file is not None
        entry = self._file.append(name, shape, pieces(tensor, self._dtype))
        self.written_bytes += tensor.numel() * self._dtype.itemsize
        self._count(name, entry.digest, tensor)
        if self._file.is_full(self._shard_bytes):
            self._end()

    def finish(self) -> tuple[Shard, ...]:
        """Closes the last file and writes the index."""
        if self._same:
            self._begin()
        if self._file is not None:
            self._end()
        where = {entry.name: shard.path.name for shard in self.shards for entry in shard.entries}
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": where}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        return tuple(self.shards)

    def close(self) -> None:
        """Closes what is open; idempotent."""
        if self._file is not None:
            self._file.close()

    @property
    def _old(self) -> Shard | None:
        """The file of the folder before that stands where the next one will."""
        place = len(self.shards)
        return self._before[place] if place < len(self._before) else None

    def _path(self) -> Path:
        return self._folder / f"model-{len(self.shards) + 1:05d}.safetensors"

    def _count(self, name: str, digest: str, tensor: torch.Tensor) -> None:
        self.digests[name] = digest
        self.num_bytes += tensor.numel() * self._dtype.itemsize

    def _begin(self) -> None:
        self._file = ShardFile(self._path(), self._dtype)
        if self._same:
            assert self._old is not None
            self._file.adopt(self._old, self._same)
            self.written_bytes += self._file.num_bytes
            self._same = 0

    def _end(self) -> None:
        assert self._file is not None
        self.shards.append(self._file.finish())
        self._file = None

    def _link(self, old: Shard) -> None:
        path, self._same = self._path(), 0
        try:
            os.link(old.path, path)
        except OSError:  # a file system without hard links
            shutil.copyfile(old.path, path)
        self.shards.append(Shard(path, old.entries))
