"""Reads tensors of a model folder from their files in pieces, so that no tensor is in memory twice."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tandem.api.lazy_torch import torch
from tandem.api.weights import stored_entries

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
PIECE = 1 << 19
"""Number of bytes that are read at a time."""

CACHE_LINE = 64
"""Size of a cache line in bytes. Torch's own storages begin at a multiple of it."""

TRUNK = "model."
"""The prefix of the names of all tensors except those of heads."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: the file, first byte, dtype and shape."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def pieces(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yields the tensor's numbers in order as flat tensors of ``dtype``; each is valid until the next one is requested.

        Raises:
            OSError: the file cannot be read, or is too short.
        """
        size = self.dtype.itemsize
        start, end = self.start, self.start + size * torch.Size(self.shape).numel()
        buffer = bytearray(min(PIECE, end - start))
        with self.file.open("rb", buffering=0) as file:
            while start < end:
                view = memoryview(buffer)[: min(len(buffer), end - start)]
                read_whole(file, view, start)
                yield torch.frombuffer(view, dtype=self.dtype).to(dtype)
                start += len(view)

    def read_into(self, flat: torch.Tensor, memory: memoryview) -> None:
        """Fills ``flat``, whose bytes are ``memory``, with the tensor's numbers in order; without a copy if both have the
        same dtype.

        Raises:
            OSError: as `pieces`.
        """
        if self.dtype == flat.dtype:
            with self.file.open("rb", buffering=0) as file:
                read_whole(file, memory, self.start)
            return
        start = 0
        for piece in self.pieces(flat.dtype):
            flat[start : start + len(piece)] = piece
            start += len(piece)


def read_whole(file: IO[bytes], view: memoryview, start: int) -> None:
    """Fills ``view`` from byte ``start`` of a file; several threads may read one file.

    Raises:
        OSError: the file ends too early.
    """
    done = 0
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], start + done)
        if not count:
            raise OSError(f"{file.name} is shorter than it was")
        done += count


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Returns the tensors in the files of a model folder by name; tensors of other types than `DTYPES` are left out.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    return {
        name: Stored(entry.file, entry.start, getattr(torch, DTYPES[entry.dtype]), entry.shape)
        for name, entry in stored_entries(folder).items()
        if entry.dtype in DTYPES
    }


def same_trunk(first: Path, second: Path) -> bool:
    """Tells whether two folders hold the same model except for its head, to the byte.

    Each tensor must also have the same alignment to a cache line in both files: kernels may round differently for another
    alignment, and they read a model's weights from its mapped file.
    """
    if first.resolve() == second.resolve():
        return True
    try:
        tensors, others = (
            {name: (stored, stored.file.stat().st_mtime_ns) for name, stored in stored_tensors(folder).items()}
            for folder in (first, second)
        )
        names = {name for name in tensors.keys() | others.keys() if name.startswith(TRUNK)}
        return bool(names) and all(
            name in tensors and name in others and _same_numbers(*tensors[name], *others[name]) for name in sorted(names)
        )
    except (OSError, ValueError):
        return False


@functools.lru_cache(maxsize=1 << 14)
def _same_numbers(first: Stored, first_changed: int, second: Stored, second_changed: int) -> bool:
    """Tells whether two stored tensors are equal. ``first_changed``, ``second_changed``: modification times of the files in
    ns, which are part of the cache key."""
    first_layout, second_layout = ((s.dtype, s.shape, s.start % CACHE_LINE) for s in (first, second))
    if first_layout != second_layout:
        return False
    pieces = zip(first.pieces(first.dtype), second.pieces(second.dtype), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pieces)
