"""The parts of tensors that ranks of one machine hold, copied where rank 0 can read them without asking.

Each rank's memory is an anonymous file: it has no name that could be left behind, and is gone with the last process that has
it open, however that ends. Rank 0 opens those of the others by their process, which it can on one machine only.
"""

import contextlib
import mmap
import os
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tandem.api.state import TensorPart
from tandem.api.team import Team

MARK_BYTES = 64
"""At the beginning of each memory, some random bytes: a process of that number on another machine has others."""

ALIGNMENT = 64


class Block(NamedTuple):
    """The place of a copied part."""

    offset: int
    size: tuple[int, ...]
    dtype: torch.dtype
    start: tuple[int, ...]
    shape: tuple[int, ...]
    flat: bool

    def tensor(self, memory: mmap.mmap) -> torch.Tensor:
        count = torch.Size(self.size).numel()
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset).view(self.size)


@dataclass(frozen=True)
class Offer:
    """A rank's description of its memory."""

    path: str
    mark: bytes
    num_bytes: int
    blocks: Mapping[str, Block]


class SharedParts:
    """Copies of one state's parts. `copy` and then `share`, which is collective; each takes the memory of those before."""

    def __init__(self, team: Team) -> None:
        """``team``: the ranks that have parts; its first one reads them all."""
        self._team = team
        self._fd: int | None = None
        self._mark = secrets.token_bytes(MARK_BYTES)
        self._memory: mmap.mmap | None = None
        self._blocks: dict[str, Block] = {}
        self._offers: list[Offer] = []
        self._maps: dict[tuple[str, bytes, int], mmap.mmap] = {}

    @property
    def num_bytes(self) -> int:
        return 0 if self._memory is None else len(self._memory)

    def reachable(self) -> str | None:
        """Tried before anything is copied. Collective."""
        with contextlib.suppress(OSError):  # a system that forbids such memory: `share` says that nobody can read it
            self.copy({})
        return self.share()

    def copy(self, parts: Mapping[str, TensorPart]) -> None:
        """Copies this rank's parts; `whole` gives nothing before `share`.

        Raises:
            OSError: the system says that there is not so much memory. One that promises more than it has, as Linux may, ends
                a process in the middle of a copy; `tandem plan` counts the copy.
        """
        if not hasattr(os, "memfd_create"):
            return  # `share` says so
        self._blocks, place = {}, MARK_BYTES
        for name, part in parts.items():
            if part.values.numel():
                size, dtype = tuple(part.values.shape), part.values.dtype
                self._blocks[name] = Block(place, size, dtype, part.start, part.shape, part.flat)
                place += -(-part.values.nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._room(place)
        for name, block in self._blocks.items():
            block.tensor(memory).copy_(parts[name].values.detach())

    def _room(self, num_bytes: int) -> mmap.mmap:
        """Memory of that size; the one that there is, if it has it."""
        if self._memory is not None and len(self._memory) == num_bytes:
            return self._memory
        if self._fd is None:
            self._fd = os.memfd_create("tandem-checkpoint")
            weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, num_bytes)
        os.posix_fallocate(self._fd, 0, num_bytes)  # where it is known that there is not so much, here and not in the copy
        self._memory = mmap.mmap(self._fd, num_bytes)
        self._memory[:MARK_BYTES] = self._mark
        return self._memory

    def offer(self) -> Offer:
        """The memory of this rank, for rank 0 to read; without a path if there is none."""
        path = f"/proc/{os.getpid()}/fd/{self._fd}" if self._fd is not None else ""
        return Offer(path, self._mark, self.num_bytes, self._blocks)

    def share(self) -> str | None:
        """Lets rank 0 read what every rank has copied; None, or why it cannot. Collective."""
        offers = self._team.gather(self.offer())
        self._offers = offers if self._team.main else []
        return self._team.share(self._map)

    def _map(self) -> str | None:
        """On rank 0."""
        maps = {}
        for rank, offer in enumerate(self._offers):
            key = (offer.path, offer.mark, offer.num_bytes)
            found = self._memory if offer.mark == self._mark else self._maps.get(key) or mapped(offer)
            if found is None:
                where = "on another machine, in another container, or not on Linux"
                return f"rank 0 cannot read the memory of rank {rank}: is it {where}?"
            maps[key] = found
        self._maps = maps
        return None

    def whole(self, name: str) -> torch.Tensor:
        """A tensor put together, on rank 0; valid until the next `copy`, from any thread."""
        found = [
            (offer.blocks[name], memory)
            for offer, memory in zip(self._offers, self._maps.values(), strict=True)
            if name in offer.blocks
        ]
        first = found[0][0]
        whole = torch.empty(first.shape, dtype=first.dtype)
        missing = whole.numel()
        for block, memory in found:
            part = block.tensor(memory)
            place = tuple(slice(at, at + size) for at, size in zip(block.start, block.size, strict=True))
            (whole.view(-1) if block.flat else whole)[place] = part
            missing -= part.numel()
        if missing:
            raise RuntimeError(f"the parts of {name} are {missing} entries short of the whole, {list(first.shape)}")
        return whole


def mapped(offer: Offer) -> mmap.mmap | None:
    """Another rank's memory; None where that cannot be opened, or is another process's."""
    try:
        descriptor = os.open(offer.path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != offer.num_bytes:
            return None
        memory = mmap.mmap(descriptor, offer.num_bytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return memory if memory[:MARK_BYTES] == offer.mark else None
