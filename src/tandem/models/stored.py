"""Tensors of a model folder as numbers in files, which are read a piece at a time: no tensor is there twice."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tandem.api.lazy_torch import torch
from tandem.api.weight_files import stored_entries

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
PIECE = 1 << 19
"""Bytes that are read at a time."""

CACHE_LINE = 64
"""Bytes; torch begins each storage of its own at a whole one."""

TRUNK = "model."
"""The beginning of the names of all tensors, but for those of heads."""


@dataclass(frozen=True)
class Stored:
    """The place of a tensor's numbers."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def pieces(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Its numbers in order, flat, in ``dtype``; each piece is valid until the next.

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
        """Fills ``flat``, whose bytes are ``memory``, with its numbers in order; straight from the file if they are of one
        dtype.

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
    """Fills ``view`` from this byte of a file on; several threads may read one file.

    Raises:
        OSError: the file ends before.
    """
    done = 0
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], start + done)
        if not count:
            raise OSError(f"{file.name} is shorter than it was")
        done += count


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors in the files of a model folder by name, of the types in `DTYPES`; those that no file has are missing.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    return {
        name: Stored(entry.file, entry.start, getattr(torch, DTYPES[entry.dtype]), entry.shape)
        for name, entry in stored_entries(folder).items()
        if entry.dtype in DTYPES
    }


def same_trunk(first: Path, second: Path) -> bool:
    """True if two folders hold the same model but for its head, to the byte.

    Each tensor must also lie as far from a cache line in the one file as in the other: kernels may round otherwise for
    another alignment, and a model is computed where its file is mapped.
    """
    if first.resolve() == second.resolve():
        return True
    try:
        one, other = (
            {name: (stored, stored.file.stat().st_mtime_ns) for name, stored in stored_tensors(folder).items()}
            for folder in (first, second)
        )
        names = {name for name in one.keys() | other.keys() if name.startswith(TRUNK)}
        return bool(names) and all(
            name in one and name in other and _same_numbers(*one[name], *other[name]) for name in sorted(names)
        )
    except (OSError, ValueError):
        return False


@functools.lru_cache(maxsize=1 << 14)
def _same_numbers(one: Stored, changed: int, other: Stored, other_changed: int) -> bool:
    """``changed``, ``other_changed``: when the files were written last."""
    about, other_about = ((s.dtype, s.shape, s.start % CACHE_LINE) for s in (one, other))
    if about != other_about:
        return False
    pieces = zip(one.pieces(one.dtype), other.pieces(other.dtype), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pieces)
